"""Rebalancing of a run: moves samples between ranks while it trains; the global batch stays the same.

Every `window` steps of each rank, the rank's cost is refitted to what its steps cost: compute and the wait
for data, or its loader's time if that is longer (pyps.solver.online.refit, with the plan's cost model as the
prior). The exact split for these costs and the plan's transfers, which in a pipeline overlap, replaces the
current split if it shortens the longest step by more than the deadband (pyps.solver.online.decide). A change
applies from the next claims on; steps claimed before it are not measured. Steps are read from the workers'
records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from pyps.formats import MAX_BATCH, Plan, PlanWorker
from pyps.formats.records import RunReader, StepRecord
from pyps.profiler.statistics import median_and_error
from pyps.report.report import LOADING_SHARE
from pyps.solver.costs import Cost, Line
from pyps.solver.online.decide import Split, SplitChange, decide
from pyps.solver.online.refit import OnlineCost, at_least, stretched
from pyps.solver.ranks import cost_of

WINDOW_STEPS = 7
DEADBAND = 0.05
WARM_UP_STEPS = 2  # of each process: allocations, caches
MIN_STANDARD_ERRORS = 2.0  # a gain of less may be noise


class RunRebalancer:
    """Rebalances a run of `plan`; `split` is the current one, by store rank, `history` every change."""

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        window: int = WINDOW_STEPS,
        deadband: float = DEADBAND,
        depths: Sequence[int] = (),
    ) -> None:
        """plan: as it is run. run_dir: with the records. window: steps. deadband: the least relative gain.
        depths: steps under way, by store rank; by default 1.
        """
        workers = [worker for worker in plan.workers if worker.batch > 0]
        self.split: Split = tuple(worker.batch for worker in workers)
        self.history: list[SplitChange] = []
        self.max_batches = [_max_batch(worker) for worker in workers]
        self._devices = [OnlineCost(_prior(worker)) for worker in workers]
        self._link_seconds = [worker.link_seconds for worker in workers]
        self._depths = depths or [1] * len(workers)
        self._window, self._deadband = window, deadband
        self._records = RunReader(run_dir)
        self._cost_seconds: list[list[float]] = [[] for _ in workers]
        self._compute_seconds: list[list[float]] = [[] for _ in workers]
        self._levels_at_change = [1.0] * len(workers)
        self._plan = 0

    @property
    def costs(self) -> list[Cost]:
        """Of a step of each rank, as estimated now."""
        links = zip(self._devices, self._link_seconds, self._depths, strict=True)
        return [_step_cost(device.cost, seconds, depth) for device, seconds, depth in links]

    def update(self, plan: int | None = None) -> SplitChange | None:
        """Read the new records; the change that pays, which then counts as the current split.

        plan: the store's number of the split in force; None: it counts the changes made here.
        """
        self._plan, step = len(self.history) if plan is None else plan, 0
        for record in self._records.new():
            step = max(step, record.step)
            if self._is_full_step(record):
                self._cost_seconds[record.rank].append(record.cost_seconds)
                self._compute_seconds[record.rank].append(record.seconds("compute"))
        if any(len(seconds) < self._window for seconds in self._cost_seconds):
            return None
        return self._decide(step)

    def _is_full_step(self, record: StepRecord) -> bool:
        """Whether a step is past the warm-up and trained its rank's whole batch of the current split."""
        if record.rank >= len(self.split) or record.plan != self._plan or record.step < WARM_UP_STEPS:
            return False
        return record.samples == record.batch == self.split[record.rank] and not record.skipped

    def _decide(self, step: int) -> SplitChange | None:
        error = 0.0
        for rank, seconds in enumerate(self._cost_seconds):
            middle, relative_error = median_and_error(seconds)
            error = max(error, relative_error)
            self._devices[rank].observe(self.split[rank], middle)
        loading = self._loading_reasons()
        self._cost_seconds = [[] for _ in self.split]
        self._compute_seconds = [[] for _ in self.split]
        levels = [device.level for device in self._devices]
        paces = [now / then for now, then in zip(levels, self._levels_at_change, strict=True)]
        costs = self.costs
        deadband = max(self._deadband, MIN_STANDARD_ERRORS * error)
        change = decide(self.split, costs, paces, [1] * len(self.split), self.max_batches, deadband, step)
        if change is not None:
            change = replace(change, reasons=(*change.reasons, *loading))
            self.split, self._levels_at_change = change.after, levels
            self.history.append(change)
        return change

    def _loading_reasons(self) -> list[str]:
        """A line for each rank whose data costs it more time than its compute."""
        reasons = []
        for rank, (costs, computes) in enumerate(zip(self._cost_seconds, self._compute_seconds, strict=True)):
            cost, compute = median(costs), median(computes)
            if cost > (1 + LOADING_SHARE) * compute:
                how = f"{cost * 1e3:.1f} ms a step, {compute * 1e3:.1f} ms of it compute"
                reasons.append(f"rank {rank} is held up by its data: {how}")
        return reasons


def _step_cost(compute: Cost, link_seconds: float, depth: int) -> Cost:
    """The cost of a step with its transfers; those of steps under way overlap with its compute."""
    if depth == 1:
        return stretched(compute, link_seconds, 1.0)
    return at_least(compute, link_seconds / (depth - 1))


def _prior(worker: PlanWorker) -> Cost:
    """The plan's cost model; where it has none, time in proportion to the batch."""
    if worker.fit is not None:
        return cost_of(worker.fit)
    compute_seconds = worker.predicted_seconds - worker.link_seconds
    return Line(0.0, (compute_seconds or worker.batch) / worker.batch)


def _max_batch(worker: PlanWorker) -> int:
    """The largest batch that the worker can train, in micro-batches."""
    at_once = worker.max_batch or MAX_BATCH
    return min(MAX_BATCH, at_once * worker.max_accumulation)
