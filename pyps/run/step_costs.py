"""What a step costs each rank of a run, estimated from the plan and from the steps that the store has timed.

The estimates are the same in every launcher of a run, whichever host the ranks are on. A rank that the plan
does not have is known by its worker's profile, or once its first steps are timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyps.formats import MAX_BATCH, Plan, PlanWorker
from pyps.native.values import CostModel, RankCost
from pyps.profiler.statistics import median_and_error
from pyps.report.report import LOADING_SHARE
from pyps.solver.costs import Cost, Line
from pyps.solver.online.refit import OnlineCost, at_least, stretched
from pyps.solver.online.window import CONFIRMED, quicker, settled, tells, undecided
from pyps.solver.ranks import cost_of


@dataclass
class _Device:
    """A rank's device. taken: of its timed steps, those that have been taken in at this batch."""

    estimate: OnlineCost
    max_batch: int
    link_seconds: float = 0.0
    depth: int = 1
    known: bool = True
    required: bool = False
    min_batch: int = 1
    batch_multiple: int = 1
    batch: int = 0
    taken: int = 0

    def of_step(self, compute: Cost) -> Cost:
        """With the step's transfers; those of steps under way overlap with its compute."""
        if self.depth == 1:
            return stretched(compute, self.link_seconds, 1.0)
        return at_least(compute, self.link_seconds / (self.depth - 1))


class StepCosts:
    """The costs of every rank, by store rank."""

    def __init__(self, plan: Plan, depths: Sequence[int]) -> None:
        """plan: as it is run. depths: steps under way, by store rank; empty: 1."""
        workers = [worker for worker in plan.workers if worker.batch > 0]
        self._devices = [_planned(worker) for worker in workers]
        for device, depth in zip(self._devices, depths, strict=False):
            device.depth = depth
        self._found: Sequence[RankCost] = ()

    def see(self, found: Sequence[RankCost], split: Sequence[int]) -> None:
        """Take note of what the store has timed, and at which batches."""
        self._found = found
        for rank, (cost, batch) in enumerate(zip(found, split, strict=True)):
            if rank >= len(self._devices):
                self._devices.append(_new(cost.model))
            device = self._devices[rank]
            if not device.known and cost.model is not None:
                device = self._devices[rank] = _new(cost.model)
            if device.batch != batch or cost.steps < device.taken:
                device.batch, device.taken = batch, 0

    @property
    def all(self) -> list[Cost]:
        return [device.of_step(device.estimate.cost) for device in self._devices]

    @property
    def proportional(self) -> list[Cost]:
        """The same if what changed last takes time for each sample, until another batch is timed."""
        return [device.of_step(device.estimate.proportional) for device in self._devices]

    @property
    def unsure(self) -> list[bool]:
        """Whether only one batch was timed since the rank's cost has changed."""
        return [device.estimate.unsure for device in self._devices]

    @property
    def max_batches(self) -> list[int]:
        return [device.max_batch for device in self._devices]

    @property
    def min_batches(self) -> list[int]:
        """The least samples of a rank that has any; a multiple of its batch_multiple."""
        return [-(-d.min_batch // d.batch_multiple) * d.batch_multiple for d in self._devices]

    @property
    def batch_multiples(self) -> list[int]:
        return [device.batch_multiple for device in self._devices]

    @property
    def levels(self) -> list[float]:
        """How many times longer steps take than when they were first measured."""
        return [device.estimate.level for device in self._devices]

    def is_known(self, rank: int) -> bool:
        return self._devices[rank].known

    def is_required(self, rank: int) -> bool:
        """Whether the plan says that the rank must have samples."""
        return self._devices[rank].required

    def new_steps(self, rank: int) -> int:
        """Timed steps that have not been taken in."""
        return self._found[rank].steps - self._devices[rank].taken

    def tells(self, rank: int, window: int) -> bool:
        """Whether the last new steps are worth taking in before the window ends."""
        device = self._devices[rank]
        return device.known and tells(self._last(rank, window), device.estimate, device.batch)

    def quicker(self, rank: int, window: int) -> bool:
        """Whether the last new step shows that the rank's device has become quicker."""
        device = self._devices[rank]
        return quicker(self._last(rank, window), device.estimate, device.batch)

    def take(self, rank: int, window: int, confirmed: int = CONFIRMED) -> float:
        """Take in the last new steps, at most so many; the relative standard error of the rank's time.

        A step that may be a hiccup stays new until the next one. confirmed: surprises that are none.
        """
        device, times = self._devices[rank], self._last(rank, window)
        waits = confirmed > 1 and undecided(times, device.estimate, device.batch)
        times = times[:-1] if waits else times
        device.estimate.observe(device.batch, settled(times, device.estimate, device.batch, confirmed))
        device.taken, device.known = self._found[rank].steps - waits, True
        return device.estimate.error

    def renew(self, rank: int) -> None:
        """Take in the last step of a rank that rested: its device may be another one by now."""
        device = self._devices[rank]
        device.estimate.renew(device.batch, self._found[rank].seconds[-1])
        device.taken = self._found[rank].steps

    def loading_reasons(self, ranks: Sequence[int]) -> list[str]:
        """A line for each rank whose data costs it more time than its compute."""
        reasons = []
        for rank in ranks:
            if not self._found[rank].seconds:
                continue
            cost, _ = median_and_error(list(self._found[rank].seconds))
            compute = max(0.0, cost - self._found[rank].data_seconds)
            if cost > (1 + LOADING_SHARE) * compute:
                how = f"{cost * 1e3:.1f} ms a step, {compute * 1e3:.1f} ms of it compute"
                reasons.append(f"rank {rank} is held up by its data: {how}")
        return reasons

    def _last(self, rank: int, window: int) -> list[float]:
        count = min(window, self.new_steps(rank), len(self._found[rank].seconds))
        return list(self._found[rank].seconds[-count:])


def _planned(worker: PlanWorker) -> _Device:
    """A worker of the plan, with its cost model; without one, or in micro-batches, time is in proportion to
    the batch.
    """
    if worker.fit is not None and worker.accumulation == 1:
        prior = cost_of(worker.fit)
    else:
        compute_seconds = worker.predicted_seconds - worker.link_seconds
        prior = Line(0.0, (compute_seconds or worker.batch) / worker.batch)
    at_once = worker.max_batch or MAX_BATCH
    most = min(MAX_BATCH, at_once * worker.max_accumulation)
    return _Device(
        OnlineCost(prior),
        most,
        worker.link_seconds,
        required=worker.required,
        min_batch=worker.min_batch,
        batch_multiple=worker.batch_multiple,
    )


def _new(model: CostModel | None) -> _Device:
    """A rank that the plan does not have."""
    if model is None:
        return _Device(OnlineCost(), MAX_BATCH, known=False)
    line = Line(model.fixed_seconds, model.sample_seconds, model.least_seconds)
    return _Device(OnlineCost(line), model.max_batch or MAX_BATCH)
