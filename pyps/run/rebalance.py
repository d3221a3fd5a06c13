"""Plans anew while a run trains: the split follows the workers, the global batch stays.

Every `window` steps of each rank, its cost is refitted to the seconds that it computed
(pyps.solver.online.refit, with the plan's cost model as the prior). The exact split for these costs and the
plan's transfers replaces the one in force if that saves more than the deadband of the longest step
(pyps.solver.online.decide). A change is in force from the next claims on; steps claimed before it are not
measured. Steps are read from the workers' own records.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pyps.formats import MAX_BATCH, Plan, PlanWorker
from pyps.formats.records import StepRecord
from pyps.profiler.statistics import median_and_error
from pyps.solver.costs import Cost, Line
from pyps.solver.online.decide import Split, SplitChange, decide
from pyps.solver.online.refit import OnlineCost, stretched
from pyps.solver.ranks import cost_of

WINDOW_STEPS = 7
DEADBAND = 0.05
WARM_UP_STEPS = 2  # of each process: allocations, caches
DOUBTS = 2.0  # standard errors: a gain of less may be none


class RecordTail:
    """Reads the records of a run's folder as they are appended."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read: dict[Path, int] = {}  # bytes of each file
        self._decoder = msgspec.json.Decoder(StepRecord)

    def new(self) -> list[StepRecord]:
        """What has come since the last call, whole lines only."""
        found = []
        for path in sorted(self._run_dir.glob("worker-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            found += [self._decoder.decode(line) for line in whole.splitlines()]
        return found


class Balancer:
    """Watches a run by `plan`; `split` is the one in force, by store rank, `history` every change."""

    def __init__(
        self, plan: Plan, run_dir: Path, window: int = WINDOW_STEPS, deadband: float = DEADBAND
    ) -> None:
        workers = [worker for worker in plan.workers if worker.batch > 0]
        self.split: Split = tuple(worker.batch for worker in workers)
        self.history: list[SplitChange] = []
        self._caps = [_cap(worker) for worker in workers]
        self._devices = [OnlineCost(_prior(worker)) for worker in workers]
        self._link_seconds = [worker.link_seconds for worker in workers]
        self._window, self._deadband = window, deadband
        self._tail = RecordTail(run_dir)
        self._times: list[list[float]] = [[] for _ in workers]
        self._planned_at = [1.0] * len(workers)
        self._plans = 0

    def look(self) -> SplitChange | None:
        """Take in new records; the change that they make worth while, which is then taken to be in force."""
        step = 0
        for record in self._tail.new():
            step = max(step, record.step)
            if self._tells(record):
                compute = sum(end - begin for kind, begin, end in record.spans if kind == "compute")
                self._times[record.rank].append(compute)
        if any(len(times) < self._window for times in self._times):
            return None
        return self._decide(step)

    def _tells(self, record: StepRecord) -> bool:
        """Whether a step was a full one of the split in force."""
        if record.rank >= len(self.split) or record.plan != self._plans or record.step < WARM_UP_STEPS:
            return False
        return record.samples == record.batch == self.split[record.rank] and not record.skipped

    def _decide(self, step: int) -> SplitChange | None:
        doubt = 0.0
        for rank, times in enumerate(self._times):
            middle, error = median_and_error(times)
            doubt = max(doubt, error)
            self._devices[rank].observe(self.split[rank], middle)
        self._times = [[] for _ in self.split]
        levels = [device.level for device in self._devices]
        paces = [now / then for now, then in zip(levels, self._planned_at, strict=True)]
        costs = [stretched(d.cost, s, 1.0) for d, s in zip(self._devices, self._link_seconds, strict=True)]
        move = decide(
            self.split, costs, paces, [1] * len(self.split), self._caps,
            max(self._deadband, DOUBTS * doubt), step,
        )  # fmt: skip
        if move is not None:
            self.split, self._planned_at = move.after, levels
            self._plans += 1
            self.history.append(move)
        return move


def _prior(worker: PlanWorker) -> Cost:
    """The plan's cost model; where it has none, time in proportion to the batch."""
    if worker.fit is not None:
        return cost_of(worker.fit)
    computing = worker.predicted_seconds - worker.link_seconds
    return Line(0.0, (computing or worker.batch) / worker.batch)


def _cap(worker: PlanWorker) -> int:
    at_once = worker.max_batch or MAX_BATCH
    return min(MAX_BATCH, at_once * worker.max_accumulation)
