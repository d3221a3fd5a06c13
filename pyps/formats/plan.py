"""pyps.plan/1: each worker's batch, and what follows from it, as the ring of turns of `r2sp`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from pyps.errors import InputError
from pyps.formats.kinds import Batch, Bits, Bytes, Elapsed, Factor, Fraction, Name, Seconds, Share, Unit
from pyps.formats.mode import Mode, PlannedRun
from pyps.formats.profile import Fit, LengthCost, Memory

PLAN_SCHEMA = "pyps.plan/1"
MAX_TURN_SECONDS = 1e6  # as in csrc/policy/config.h


class EvenSplit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same batch for every worker, for comparison; `seconds` is null if that breaks a bound."""

    feasible: bool
    seconds: Seconds | None = None


class HeldBytes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bytes that a rank of a sharded model holds at most, and its card's `memory`.

    fixed: what is neither the model's nor its samples'. activations: of a micro-batch.
    """

    fixed: Bytes
    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    activations: Bytes
    memory: Bytes

    @property
    def total(self) -> int:
        """All that the rank holds."""
        return self.fixed + self.parameters + self.gradients + self.optimizer + self.activations


class PlanWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's share: batch 0 means left out; weight = batch / global batch.

    The batch is computed as `accumulation` micro-batches of micro_batch samples; the last one has the
    remainder. In a mode with local steps each of them is one. max_batch is the most that the rank may compute
    at once, in at most max_accumulation micro-batches; fit is its cost model in this plan. With these a run
    can change the split while it trains, and with the memory model it can adapt to the free memory. throttle
    repeats the profile's, so that a run can emulate the devices of the plan. predicted_seconds: of a step,
    from one to the next. link_seconds are the rank's transfers each iteration over its own and its shared
    links; they are part of predicted_seconds or, in a pipeline, overlap with the rest of it. required: a run
    may not leave the rank out. min_batch, batch_multiple: bounds of its batch, unless it is left out, that a
    run keeps too. mode: how it runs in the plan's mode; of a plan that names none, what `--depth auto` and
    `--codec plan` take: what hides its transfers within the error budget. null: its link is not known.
    share: of the sharded state that the rank holds; null: the plan has no [sharding], or several copies.
    bytes: by kind; max_batch and memory then are what its share leaves. length_cost: of its profile.
    """

    rank: Share
    name: Name
    batch: Share
    micro_batch: Share
    accumulation: Share
    weight: Annotated[float, Meta(ge=0, le=1)]
    predicted_seconds: Elapsed
    link_seconds: Elapsed = 0.0
    throttle: Factor = 1.0
    max_batch: Batch | None = None
    max_accumulation: Batch = 1
    fit: Fit | None = None
    memory: Memory | None = None
    required: bool = False
    min_batch: Batch = 1
    batch_multiple: Batch = 1
    mode: Mode | None = None
    share: Fraction | None = None
    bytes: HeldBytes | None = None
    length_cost: LengthCost | None = None

    @property
    def most_at_once(self) -> int:
        """The most samples of a micro-batch: as planned where the batch is split, else what the rank's memory
        holds, which leaves room for a batch that grows while the run trains.
        """
        return self.micro_batch if self.accumulation > 1 else self.max_batch or self.micro_batch


class R2spRemedies(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes that would each make the turns fit; null where a change cannot help.

    global_batch: the smallest larger one found. bits: the most that a number may have on the wire. links: how
    many such links suffice.
    """

    global_batch: Batch | None = None
    bits: Bits | None = None
    links: Batch | None = None


class R2spSchedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Turns in the ring `order` (ranks); feasible is null if a bandwidth is unknown.

    gap_seconds is period / N. The offsets are that far apart if every transfer fits into its gap; otherwise
    each turn takes its transfer and an equal share of the rest of the period. turn_seconds: the transfers, in
    the same order; empty if feasible is null.
    """

    feasible: bool | None
    period_seconds: Seconds
    gap_seconds: Seconds
    order: list[Share]
    offsets_seconds: list[Elapsed]
    turn_seconds: list[Elapsed] = []
    remedies: R2spRemedies | None = None


class HpsEstimate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Period with and without overlapping transfer and compute; empty if a bandwidth is unknown.

    serial_seconds and pipelined_seconds are of the slowest worker, at 32 bits; quantized_seconds is its
    period with the bits that the error budget allows.
    """

    compute_seconds: Seconds | None = None
    transfer_seconds: Elapsed | None = None
    serial_seconds: Seconds | None = None
    pipelined_seconds: Seconds | None = None
    quantized_seconds: Seconds | None = None


class SyncEstimate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that the synchronisation of the workers in use adds to their compute, part of
    iteration_seconds; where it overlaps with the compute, it takes longer.
    """

    kind: str
    seconds: Elapsed


class CostEstimate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold what the workers in use cost together; null if one of them states no figure."""

    price_per_hour: Elapsed | None = None
    price_per_million_samples: Elapsed | None = None
    watts: Elapsed | None = None


class Forecast(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One split: its time as fitted, and at the iteration's quantile; chance: the probability that all its
    workers finish by the robust split's quantile.
    """

    batches: list[Share]
    seconds: Seconds
    quantile_seconds: Seconds
    chance: Annotated[float, Meta(ge=0, le=1)]


class NoiseForecast(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The split for the fitted times, and the split for this quantile of the time of an iteration."""

    quantile: Annotated[float, Meta(gt=0, lt=1)]
    nominal: Forecast
    robust: Forecast


class GoodputEstimate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Goodput of this global batch: samples a second times their efficiency against base_batch."""

    noise_scale: Seconds
    base_batch: Batch
    samples_per_second: Seconds
    efficiency: Seconds
    goodput: Seconds


class TargetEstimate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long `samples` take with this plan, and their price; null if a worker in use states none.

    base_batch: the samples count as those of batches of this size, as in `goodput`; null: all count alike.
    lost: how many times longer it takes for preemptions and checkpoints, which is part of `seconds`.
    checkpoint_every_seconds: with which that is least; null: no preemptions are stated. deadline_chance: the
    probability that the job's deadline is kept; null: it has none, or no worker may be taken away.
    """

    samples: Seconds
    seconds: Annotated[float, Meta(gt=0)]
    price: Annotated[float, Meta(ge=0)] | None = None
    base_batch: Batch | None = None
    lost: Annotated[float, Meta(ge=1)] = 1.0
    checkpoint_every_seconds: Annotated[float, Meta(gt=0)] | None = None
    deadline_chance: Fraction | None = None


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of the planner.

    run: the mode that it was made for; null if none was stated: then bsp, without a pipeline, at 32 bits.
    With local steps an iteration is a round of them, and all batches are those of a round.
    iteration_seconds: of a global batch in this mode, with the synchronisation. lower_bound_seconds: the
    optimum with fractional batches and no minima; 0 if none is known. cost, sync, noise, goodput and target
    are null if the cluster does not state what they need. unit: what batches, and all that are called samples
    here, count.
    """

    schema: Literal["pyps.plan/1"] = "pyps.plan/1"
    global_batch: Batch
    iteration_seconds: Seconds
    lower_bound_seconds: Elapsed
    even_split: EvenSplit
    speedup_over_even: Seconds | None
    workers: Annotated[list[PlanWorker], Meta(min_length=1)]
    r2sp: R2spSchedule
    hps: HpsEstimate
    warnings: list[str]
    run: PlannedRun | None = None
    sync: SyncEstimate | None = None
    cost: CostEstimate | None = None
    noise: NoiseForecast | None = None
    goodput: GoodputEstimate | None = None
    target: TargetEstimate | None = None
    unit: Unit = "samples"

    def mode_of(self, worker: PlanWorker) -> Mode:
        """The codecs and steps under way of one of its workers, in the mode that it was made for."""
        if self.run is None or worker.mode is None:
            return Mode()
        return worker.mode if self.run.depth != 1 else replace(worker.mode, depth=1)


def check_plan(where: str, plan: Plan) -> None:
    """Raises InputError, naming the file `where`, if the workers' figures do not fit together."""
    total = 0
    names: set[str] = set()
    for k, worker in enumerate(plan.workers):
        if worker.rank != k:
            raise InputError(where, f"workers[{k}].rank", str(worker.rank), f"{k}: ranks count from 0")
        if worker.name in names:
            raise InputError(where, f"workers[{k}].name", f"{worker.name!r} a second time", "a unique name")
        names.add(worker.name)
        if not _adds_up(worker):
            found = f"{worker.micro_batch} x {worker.accumulation}"
            expected = f"{worker.batch} samples in full micro-batches, and the rest in the last one"
            raise InputError(where, f"workers[{k}].micro_batch", found, expected)
        if not math.isclose(worker.weight, worker.batch / plan.global_batch, rel_tol=1e-9, abs_tol=1e-12):
            expected = f"batch / global_batch = {worker.batch / plan.global_batch}"
            raise InputError(where, f"workers[{k}].weight", str(worker.weight), expected)
        total += worker.batch
    if total != plan.global_batch:
        raise InputError(
            where, "global_batch", str(plan.global_batch), f"the sum of the workers' batches, {total}"
        )
    shares = [worker.share for worker in plan.workers if worker.share is not None]
    if shares and (len(shares) < len(plan.workers) or not math.isclose(math.fsum(shares), 1.0)):
        found = f"{len(shares)} of {len(plan.workers)}, in all {math.fsum(shares):g}"
        raise InputError(where, "workers.share", found, "one for each worker, in all 1")


def _adds_up(worker: PlanWorker) -> bool:
    """Return whether the batch takes exactly `accumulation` micro-batches."""
    most = worker.micro_batch * worker.accumulation
    least = worker.micro_batch * (worker.accumulation - 1)
    return least < worker.batch <= most if worker.accumulation > 1 else worker.batch == most


@dataclass(frozen=True)
class TurnSchedule:
    """Which rank of the store takes the k-th turn, and the seconds from its push to the next turn's.

    order: every rank once. gaps_seconds: one for each turn. period_seconds: that a cycle of all turns is
    planned to take; with gaps of equal length, each is the period divided by the number of turns. Raises
    InputError.
    """

    order: tuple[int, ...]
    gaps_seconds: tuple[float, ...]
    period_seconds: float

    def __post_init__(self) -> None:
        if not self.order or sorted(self.order) != list(range(len(self.order))):
            expected = "each rank from 0 on, once"
            raise InputError("schedule", "order", str(list(self.order)), expected)
        if len(self.gaps_seconds) != len(self.order):
            expected = f"one for each of {len(self.order)} turns"
            raise InputError("schedule", "gaps_seconds", f"{len(self.gaps_seconds)} of them", expected)
        for gap in self.gaps_seconds:
            if not 0.0 <= gap <= MAX_TURN_SECONDS:
                raise InputError("schedule", "gaps_seconds", str(gap), f"0 to {MAX_TURN_SECONDS:g}")
        if not 0.0 < self.period_seconds <= MAX_TURN_SECONDS:
            found, expected = str(self.period_seconds), f"above 0, and at most {MAX_TURN_SECONDS:g}"
            raise InputError("schedule", "period_seconds", found, expected)


def plan_turns(plan: Plan, where: str = "plan") -> TurnSchedule:
    """The turns of a plan's ring, for the store's ranks: the plan's workers that have a batch, in order.

    where: what an error names, the plan's file. Raises InputError if `r2sp` is not of these workers.
    """
    ring = plan.r2sp
    ranks = [worker.rank for worker in plan.workers if worker.batch > 0]
    if sorted(ring.order) != ranks:
        expected = f"each worker with a batch once: {', '.join(map(str, ranks))}"
        raise InputError(where, "r2sp.order", ", ".join(map(str, ring.order)) or "none", expected)
    return TurnSchedule(tuple(map(ranks.index, ring.order)), _gaps(ring, where), ring.period_seconds)


def _gaps(ring: R2spSchedule, where: str) -> tuple[float, ...]:
    """Equal, unless a transfer does not fit into its gap: then the offsets say when each turn begins."""
    turns, offsets = len(ring.order), ring.offsets_seconds
    if max(ring.turn_seconds, default=0.0) <= ring.gap_seconds:
        return (ring.gap_seconds,) * turns
    begins = [*offsets, math.fsum([*offsets[:1], ring.period_seconds])]
    gaps = [b - a for a, b in pairwise(begins)]
    if len(gaps) != turns or min(gaps) < 0.0:
        expected = f"{turns} times that do not go back, within a period of {ring.period_seconds:g}"
        raise InputError(where, "r2sp.offsets_seconds", ", ".join(map(str, offsets)) or "none", expected)
    return tuple(gap * ring.gap_seconds * turns / ring.period_seconds for gap in gaps)
