"""The report of a run: report.json (pyps.report/1.1), computed from the step records and the events.

An iteration is one global batch of samples, under every policy: the time between the moments at which the
samples in the parameters pass k B and (k + 1) B. Under BSP that is one round. The first has no beginning and
is not counted, nor is a process's wait for all others to join before its first step.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Final, Literal

import msgspec
import numpy as np

from pyps.formats.events import RunEvent
from pyps.formats.files import read_struct
from pyps.formats.records import StepRecord
from pyps.formats.setup import RankSpec, RunSetup
from pyps.report.rate import rate_advice
from pyps.report.ring import TurnsReport, turns_report
from pyps.report.steps import (
    PHASES,
    Distribution,
    LossPoint,
    NonNegative,
    RankTime,
    absent_seconds,
    applied_steps,
    between,
    by_rank,
    distribution,
    idle_share,
    is_applied,
    iteration_times,
    loss_points,
    mean_staleness,
    mode_changes,
    overlapped_seconds,
    pauses,
    phase_seconds,
    phase_totals,
    recent_loss,
    short_rounds,
    thinned,
    training_time,
    without_startup_wait,
)
from pyps.store.stragglers import StepPace, stragglers

REPORT_SCHEMA: Final = "pyps.report/1.1"
REPORT = "report.json"
RunOutcome = Literal["finished", "interrupted", "failed", "unfinished"]  # the worst last
MIN_ABSENT_SECONDS = 1.0  # that are said
MOST_VERSIONS = 8  # of short rounds that are named
FAR_OFF = 2.0  # times the prediction, or its half: the plan was made from other figures than this run's
LOADING_SHARE = 0.1  # of data and compute: a longer wait for data holds the rank up
LEAST_LOADING_SECONDS = 1e-3  # about what a batch takes from a loader process to its rank
OFTEN = 0.95  # a dynamic straggler has one such step in twenty
ENOUGH = 20  # steps, for that


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, over all processes that held it.

    steps, samples: the gradients that are in the parameters, and the samples that they were computed from.
    data, compute, push, pull, wait: of the training thread, seconds a step; data: its wait for batches.
    overlapped: a pipeline's pushes and pulls during compute, seconds a step, without their waits for others.
    loader: seconds a step for which its samples kept the loader busy.
    loader_workers: loader processes; 0: the training thread loads.
    idle_share: the wait's share of all five together.
    absent_seconds: while others trained, without a step of this rank: dead, starting, stopped or cut off.
    fenced: how often it was removed because it missed a deadline, and joined again.
    deaths: how each of its processes ended that did not end well.
    overrun_seconds: the sum of what steps took longer than the emulated device would have. Above a few per
        cent of the compute time, the emulation did not hold.
    """

    rank: NonNegative
    name: str
    batch: NonNegative
    predicted_seconds: float | None
    emulated: bool
    processes: NonNegative
    steps: NonNegative
    samples: NonNegative
    skipped_samples: NonNegative
    returned_samples: NonNegative
    rejected_steps: NonNegative
    data: Distribution = Distribution(0)
    loader: Distribution = Distribution(0)
    loader_workers: NonNegative = 0
    compute: Distribution
    push: Distribution
    pull: Distribution
    wait: Distribution
    overlapped: Distribution = Distribution(0)
    idle_share: float
    overrun_seconds: float
    staleness_mean: float
    staleness_max: NonNegative
    absent_seconds: float = 0.0
    fenced: NonNegative = 0
    deaths: list[str] = []


class SampleCounts(msgspec.Struct, frozen=True):
    """Sample positions of the whole run, or of its part on this machine.

    requested: to train in all; 0: without end.
    trained: in the parameters.
    elsewhere: of the other machines' ranks, in the parameters when the report was written.
    skipped: claimed by a step without a gradient.
    returned: given back after a death or a fence, and assigned again.
    dropped: given back, but not assigned again.
    """

    requested: NonNegative
    trained: NonNegative
    skipped: NonNegative
    returned: NonNegative
    dropped: NonNegative
    elsewhere: NonNegative = 0

    @property
    def left(self) -> int:
        """Samples that were requested, and that no rank has taken up."""
        return max(0, self.requested - self.trained - self.elsewhere - self.skipped - self.dropped)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run; with --ranks its part on this machine.

    iteration_seconds: for one global batch of samples, under every policy.
    idle_share: the ranks' waits over all their time.
    measured_over_predicted: of the iteration time; None where the plan predicts none.
    error: why the run did not finish.
    loss_first, loss_last: the mean losses of the first and of the last global batch; None: none recorded.
    loss: over time, at most CURVE_POINTS points, each of whole global batches.
    short_rounds: rounds with fewer samples than a global batch, the last one aside; None where no round has
        several sources, the policy does not wait for all, or the host's part of the batch changed.
    short_versions: the first MOST_VERSIONS that these rounds made.
    replans: why the batches changed while it trained, and how the ranks' codecs and depths did, one line a
        change.
    stragglers: which ranks are, by version and by time, one line a rank.
    advice: what to change where a rank's data loading holds it up, the learning rate is too large, or the
        plan's prediction is far off.
    turns: planned against actual turns, where the policy takes turns and all ranks were started here.
    resumed_at: the version at which each later part of it began.
    undone: versions after a checkpoint that were lost with what trained them, and trained again.
    checkpoint: the folder of the last one, in checkpoints/; "": there is none.
    training_seconds: of the wall time, from the first step's begin to the last one's end, of each part of a
        run that was resumed.
    """

    schema: Literal["pyps.report/1.1"] = REPORT_SCHEMA
    outcome: RunOutcome
    policy: str
    even: bool
    emulated: bool
    seed: int
    global_batch: int
    wall_seconds: float
    iteration_seconds: Distribution
    predicted_iteration_seconds: float | None
    measured_over_predicted: float | None
    idle_share: float
    versions: NonNegative
    samples: SampleCounts
    restarts: NonNegative
    ranks: list[RankReport]
    error: str = ""
    replans: list[str] = []
    loss_first: float | None = None
    loss_last: float | None = None
    loss: list[LossPoint] = []
    short_rounds: NonNegative | None = None
    short_versions: list[NonNegative] = []
    stragglers: list[str] = []
    advice: list[str] = []
    turns: TurnsReport | None = None
    resumed_at: list[NonNegative] = []
    undone: NonNegative = 0
    checkpoint: str = ""
    training_seconds: float = 0.0


class StoreTotals(msgspec.Struct, frozen=True):
    """The store's counters at the end of a run; zeros where it was never created. Tuples are by rank."""

    versions: int = 0
    dropped: int = 0
    samples: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()


def make_report(
    setup: RunSetup,
    records: Sequence[StepRecord],
    events: Sequence[RunEvent],
    totals: StoreTotals,
    outcome: RunOutcome,
    error: str = "",
) -> Report:
    """The report of a run.

    setup: what was run. records, events: what happened. totals: the store's counters. Where there are any,
    samples come from them: a killed worker's last record may be missing although its gradient was applied.
    outcome, error: how it ended.
    """
    resumed = [e.monotonic_seconds for e in events if e.kind == "resumed"]
    training, paused = training_time(records), pauses(records, resumed)
    kept, applied = without_startup_wait(records), applied_steps(records)
    mine = by_rank(kept, [rank.rank for rank in setup.ranks])
    ranks = [rank_report(rank, mine[rank.rank], events, totals, training, paused) for rank in setup.ranks]
    crowd = crowding(setup, ranks)
    times = distribution(iteration_times(applied, setup.global_batch, resumed))
    predicted = setup.predicted_iteration_seconds
    measured_over_predicted = times.median / predicted if predicted and times.count else None
    losses, short = loss_points(applied, setup.global_batch), short_rounds(records, setup)
    return Report(
        outcome=outcome,
        policy=setup.policy,
        even=setup.even,
        emulated=any(rank.emulated for rank in setup.ranks),
        seed=setup.seed,
        global_batch=setup.global_batch,
        wall_seconds=_wall_seconds(events, records),
        training_seconds=between(*training, paused),
        iteration_seconds=times,
        predicted_iteration_seconds=predicted,
        measured_over_predicted=measured_over_predicted,
        idle_share=idle_share(phase_totals(kept)),
        versions=totals.versions or (applied[-1].version if applied else 0),
        samples=_sample_counts(setup.samples, ranks, totals),
        restarts=sum(e.kind == "restarted" for e in events),
        ranks=ranks,
        error=error,
        replans=[*(e.detail for e in events if e.kind == "replanned"), *mode_changes(mine)],
        loss_first=losses[0].loss if losses else None,
        loss_last=recent_loss(applied, setup.global_batch),
        loss=thinned(losses),
        short_rounds=None if short is None else len(short),
        short_versions=(short or [])[:MOST_VERSIONS],
        stragglers=[*straggler_lines(setup.ranks, mine)],
        advice=[
            *filter(None, (loading_advice(rank, crowd) for rank in ranks)),
            *filter(None, [rate_advice(setup.policy, applied, losses, setup.global_batch)]),
            *prediction_advice(measured_over_predicted, setup.ranks, ranks),
        ],
        turns=_turns(setup, applied),
        resumed_at=_resumed_at(events, applied),
        undone=sum(event.pushes or 0 for event in events),
        checkpoint=next((e.detail for e in reversed(events) if e.kind == "checkpoint"), ""),
    )


def _sample_counts(requested: int, ranks: Sequence[RankReport], totals: StoreTotals) -> SampleCounts:
    trained = sum(r.samples for r in ranks)
    return SampleCounts(
        requested=requested,
        trained=trained,
        skipped=sum(r.skipped_samples for r in ranks),
        returned=sum(r.returned_samples for r in ranks),
        dropped=totals.dropped,
        elsewhere=max(0, sum(totals.samples) - trained),
    )


def _resumed_at(events: Sequence[RunEvent], applied: Sequence[StepRecord]) -> list[int]:
    """The version of each event, or, where that was not known, of the last step before it."""
    found = []
    for event in (e for e in events if e.kind == "resumed"):
        before = [r.version for r in applied if r.spans and r.spans[-1][2] <= event.monotonic_seconds]
        found.append(max(before, default=0) if event.version is None else event.version)
    return found


def _turns(setup: RunSetup, applied: Sequence[StepRecord]) -> TurnsReport | None:
    if setup.turns is None or len(setup.ranks) != len(setup.turns.order):
        return None
    return turns_report(setup.turns, applied)


def rank_report(
    setup: RankSpec,
    mine: Sequence[StepRecord],
    events: Sequence[RunEvent],
    totals: StoreTotals,
    training: tuple[float, float],
    paused: Sequence[tuple[float, float]] = (),
) -> RankReport:
    """One rank's part of the report.

    setup, mine: the rank and its records, without_startup_wait. events, totals: of all ranks. training: when
    the run trained, as `training_time` says; paused: when it did not meanwhile.
    """
    rank = setup.rank
    applied = [r for r in mine if is_applied(r)]
    present = [r for r in mine if not r.fenced]  # a stopped worker's step says nothing of the usual ones
    data, compute, push, pull, wait = map(distribution, phase_seconds(present))
    return RankReport(
        rank=rank,
        name=setup.name,
        batch=setup.batch,
        predicted_seconds=setup.predicted_seconds,
        emulated=setup.emulated,
        processes=sum(e.rank == rank and e.kind in ("started", "restarted") for e in events),
        steps=len(applied),
        samples=_get(totals.samples, rank, sum(r.samples for r in applied)),
        skipped_samples=_get(totals.skipped, rank, sum(r.samples for r in mine if r.skipped)),
        returned_samples=_get(totals.returned, rank, 0),
        rejected_steps=sum(r.rejected for r in mine),
        data=data,
        loader=distribution([r.loader_seconds for r in mine]),
        loader_workers=max((r.loader_workers for r in mine), default=0),
        compute=compute,
        push=push,
        pull=pull,
        wait=wait,
        overlapped=distribution(overlapped_seconds(present)),
        idle_share=idle_share(phase_totals(present)),
        overrun_seconds=sum(r.overrun_seconds for r in mine),
        staleness_mean=mean_staleness(applied),
        staleness_max=max((r.staleness for r in applied), default=0),
        absent_seconds=absent_seconds(present, *training, paused),
        fenced=len(mine) - len(present),
        deaths=[e.detail for e in events if e.rank == rank and e.kind == "died"],
    )


def rank_time(rank: RankReport) -> RankTime:
    """Where the time of a rank's steps went."""
    kinds = ((phase, getattr(rank, phase)) for phase in PHASES)
    return RankTime(rank.rank, rank.name, rank.steps, {kind: d.mean * d.count for kind, d in kinds})


def absences(report: Report) -> Iterator[str]:
    """Say which ranks' processes died or were away, why and how long, and which rounds are smaller for it."""
    for r in report.ranks:
        away = f"absent for {r.absent_seconds:,.1f} s while others trained"
        long = r.absent_seconds >= MIN_ABSENT_SECONDS
        often = f" {len(r.deaths)} times, last" if len(r.deaths) > 1 else ""
        missed = f"missed a deadline{f' {r.fenced} times' * (r.fenced > 1)}, and its samples went to others"
        parts = [f"was {away}"] * long + [missed] * bool(r.fenced)
        parts += [f"died{often}: {death}" for death in r.deaths[-1:]]
        if parts:
            yield f"rank {r.rank} ({r.name}) {'; it '.join(parts)}"
    if report.short_rounds:
        named = ", ".join(map(str, report.short_versions)) + ", ..." * (report.short_rounds > MOST_VERSIONS)
        rounds = f"{report.short_rounds:,} of {report.versions:,} rounds (version {named})"
        few = f"had fewer samples than the global batch of {report.global_batch:,}"
        yield f"{rounds} {few}: their gradients are not those of one process with whole batches"


def crowding(setup: RunSetup, ranks: Sequence[RankReport]) -> str:
    """Say that more processes train and load than there are cores; empty if not, or if it is not known."""
    processes = sum(1 + rank.loader_workers for rank in ranks if rank.steps)
    cores = f"{setup.cpus} CPU core{'s' * (setup.cpus != 1)}"
    return f"{processes} processes share {cores}" if 0 < setup.cpus < processes else ""


def straggler_lines(ranks: Sequence[RankSpec], records: Mapping[int, Sequence[StepRecord]]) -> Iterator[str]:
    """A line for each straggler. records: by rank."""
    trained = [rank for rank in ranks if any(map(is_applied, records[rank.rank]))]
    paces = [_pace(records[rank.rank]) for rank in trained]
    applied = [record.version for rank in trained for record in records[rank.rank] if is_applied(record)]
    pushes = len(applied) / max(1, len({version for version in applied if version}))
    for rank, pace, found in zip(trained, paces, stragglers(paces, len(trained), pushes), strict=True):
        if kind := str(found):
            usual, worst = pace.seconds * 1e3, pace.seconds_now / pace.seconds
            times = f"a step computes for {usual:,.1f} ms"
            times += f", one in twenty {worst:.1f} times as long" if worst >= 1.05 else ""
            versions = f"{pace.versions:.1f} versions late, one in twenty {pace.versions_now:.1f}"
            yield f"rank {rank.rank} ({rank.name}): {kind}: its gradients are {versions}; {times}"


def _pace(records: Sequence[StepRecord]) -> StepPace:
    """The usual step, and one of the worst: of too few the usual one. A step is long by those of its batch: a
    worker is not late that took over the samples of others.
    """
    applied = [r for r in records if is_applied(r)]
    seconds = phase_seconds(applied)[PHASES.index("compute")]
    versions = [r.staleness for r in applied]
    median, mean = float(np.median(seconds)), float(np.mean(versions))
    by_batch = defaultdict(list)
    for record, took in zip(applied, seconds, strict=True):
        by_batch[record.samples].append(took)
    times = [took / np.median(by_batch[r.samples]) for r, took in zip(applied, seconds, strict=True)]
    if len(applied) < ENOUGH:
        return StepPace(median, mean, median, mean)
    worst = median * float(np.quantile(times, OFTEN))
    return StepPace(median, mean, worst, float(np.quantile(versions, OFTEN)))


def loading_advice(rank: RankReport, crowd: str = "") -> str:
    """Return what to change if loading data holds this rank up, or nothing. crowd: as crowding says."""
    data, compute, loader = rank.data.median, rank.compute.median, rank.loader.median
    if data <= max(LEAST_LOADING_SECONDS, LOADING_SHARE * (data + compute)) or not loader:
        return ""
    who = f"rank {rank.rank} ({rank.name}) waits {data * 1e3:.1f} ms a step for data"
    if crowd:
        return f"{who}: {crowd}; use fewer loader processes or ranks on this machine, or cheaper samples"
    needed = math.ceil(max(1, rank.loader_workers) * loader / compute) if compute else 1
    if not rank.loader_workers:
        return f"{who}, which its training thread loads: use batches(..., num_workers={needed})"
    if loader > compute:
        busy = f"its {rank.loader_workers} loader processes need {loader * 1e3:.1f} ms a step"
        busy += f", its compute {compute * 1e3:.1f} ms"
        return f"{who}: {busy}; use num_workers={needed}, or faster samples"
    alone = rank.loader_workers * loader
    if alone < data:  # what is long is the way from process to process, or the wait for a CPU core
        made = f"its {rank.loader_workers} processes load a step in {alone * 1e3:.1f} ms in all"
        return f"{who}: {made}, less than the wait: use num_workers=0"
    late = "its loader is fast enough, but begins late"
    return f"{who}: {late}; raise batches(..., prefetch=2), or, where a collate_fn is given, leave it out"


def prediction_advice(
    measured_over_predicted: float | None, setups: Sequence[RankSpec], ranks: Sequence[RankReport]
) -> Iterator[str]:
    """Yield what to measure again if the run is far from the plan's prediction: compute is compared with
    planned compute, transfers with planned transfers. setups, ranks: of the same ranks.
    """
    if measured_over_predicted is None or 1 / FAR_OFF <= measured_over_predicted <= FAR_OFF:
        return
    pairs = list(zip(setups, ranks, strict=True))
    computing = [(r, setup.compute_seconds or setup.predicted_seconds) for setup, r in pairs]
    planned = [(r, seconds) for r, seconds in computing if seconds and r.compute.count]
    if not planned:
        return
    rank, seconds = max(planned, key=lambda pair: abs(math.log(max(pair[0].compute.median, 1e-9) / pair[1])))
    name, compute = f"rank {rank.rank} ({rank.name})", rank.compute.median
    if not 1 / math.sqrt(FAR_OFF) <= compute / seconds <= math.sqrt(FAR_OFF):
        yield (
            f"{name} computes {compute * 1e3:.1f} ms a step, where the plan has {seconds * 1e3:.1f} ms: "
            "profile it again as it trains here: same model, precision and CPU threads, and no other work"
        )
        return
    off = [(abs(_transfer_seconds(r) - setup.link_seconds), setup.link_seconds, r) for setup, r in pairs]
    difference, seconds, rank = max(off, key=itemgetter(0))
    if difference > rank.compute.median:
        where = f", where the plan has {seconds * 1e3:.1f} ms" if seconds else ""
        yield (
            f"rank {rank.rank} ({rank.name}) pushes and pulls for {_transfer_seconds(rank) * 1e3:.1f} ms a "
            f"step{where}: state the bandwidth and latency of its link in the cluster file, and plan again"
        )


def _transfer_seconds(rank: RankReport) -> float:
    return rank.push.median + rank.pull.median + rank.overlapped.median


def read_report(path: str | os.PathLike[str]) -> Report:
    """Read and check a pyps.report/1.1 file. Raises InputError."""
    return read_struct(path, Report, f"a {REPORT_SCHEMA} file")


def _wall_seconds(events: Sequence[RunEvent], records: Sequence[StepRecord]) -> float:
    """From the first event to the last event or step, without the time between two parts of the run."""
    moments = [(e.monotonic_seconds, e.kind == "resumed") for e in events]
    moments += [(r.spans[-1][2], False) for r in records if r.spans] if events else []
    return sum(b - a for (a, _), (b, begins) in pairwise(sorted(moments)) if not begins)


def _get(values: Sequence[int], index: int, default: int) -> int:
    return values[index] if index < len(values) else default
