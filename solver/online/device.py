"""BalancedDevice: one rank as a Balancer knows it: its timed steps, their estimate, its batch's bounds.

Where all steps are seen in one place (a store), one process keeps a BalancedDevice of each rank. Where each
rank times its own (DDP), it keeps its own and gives the others an Estimate: all that a decision needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pyps.formats import MAX_BATCH, PlanWorker
from pyps.solver.accumulate import seconds_in_parts
from pyps.solver.costs import Cost, Line, cost_of
from pyps.solver.online.decide import Bounds
from pyps.solver.online.refit import COUNTED_FROM, OnlineCost, at_least, stretched
from pyps.solver.online.window import LARGE, quicker, settled, slow, surprises, tells, undecided

MOST_KEPT = 16  # timed steps that were not taken in: a window has fewer


@dataclass(frozen=True)
class Estimate:
    """Hold what is known of a rank's device now.

    cost: of a step, by batch. proportional: the same if what changed last takes time for each sample; as
    likely, until another batch is timed. level: how many times longer steps take than when they were first
    measured. error: relative, of the time of the latest batch. unsure: only one batch was timed since the
    cost has changed. drifts: it changes a little all the time.
    """

    cost: Cost
    proportional: Cost
    level: float = 1.0
    error: float = 0.0
    unsure: bool = False
    drifts: bool = False


@dataclass(frozen=True)
class DeviceReading:
    """A rank at the end of a window, where each rank times its own steps.

    seconds: of a step of `batch`; None if nothing new was measured. changing: another batch is to come, or
    has come and was not timed.
    """

    batch: int
    seconds: float | None
    estimate: Estimate
    bounds: Bounds
    changing: bool


class BalancedDevice:
    """A rank's device. batch: of its latest steps. times: seconds of steps that were not taken in yet.

    known: whether anything is known of it: a profile, or steps.
    """

    def __init__(
        self,
        prior: Cost | None = None,
        bounds: Bounds | None = None,
        *,
        known: bool = True,
        link_seconds: float = 0.0,
        depth: int = 1,
    ) -> None:
        """link_seconds: of a step's transfers, which no timed step has. depth: steps under way."""
        self.online = OnlineCost.of(prior)
        self.bounds = bounds or Bounds()
        self.known, self.batch = known, 0
        self.times: list[float] = []
        self._link_seconds, self._depth = link_seconds, depth
        self._seen = 0  # steps of this batch, as they were counted
        self._doubted: Cost | None = None  # the cost that the latest slow step does not fit

    def hear(self, batch: int, seconds: float) -> None:
        """Take note of one timed step of `batch` samples; those of another batch before it say nothing."""
        if batch != self.batch:
            self.batch, self.times, self._seen = batch, [], 0
        online, doubted = self.online, self._doubted
        self.times = [*self.times, seconds][-MOST_KEPT:]
        self._seen += 1
        if doubted is not None and online.scattered >= COUNTED_FROM:
            lasted = slow(seconds, online, doubted, batch)
            online.lasted, online.passed = online.lasted + lasted, online.passed + (not lasted)
        then = online.known.get(batch)
        late = then is not None and seconds > (1 + LARGE) * then.seconds
        first = late and surprises(self.times, online, batch) == 1
        self._doubted = online.cost if first and slow(seconds, online, online.cost, batch) else None

    def see(self, batch: int, steps: int, latest: Sequence[float]) -> None:
        """Take note of all steps so far: how many of this batch were timed, and the seconds of the latest."""
        if batch != self.batch or steps < self._seen:
            self.batch, self.times, self._seen = batch, [], 0
        new = min(steps - self._seen, len(latest))
        for seconds in latest[len(latest) - new :]:
            self.hear(batch, seconds)
        self._seen = steps

    @property
    def estimate(self) -> Estimate:
        """With the step's transfers."""
        online = self.online
        return Estimate(
            self._of_step(online.cost),
            self._of_step(online.proportional),
            online.level,
            online.error,
            online.unsure,
            online.drift.clear,
        )

    def _of_step(self, compute: Cost) -> Cost:
        """With a step's transfers; those of steps under way overlap with its compute."""
        if self._depth == 1:
            return stretched(compute, self._link_seconds, 1.0) if self._link_seconds else compute
        return at_least(compute, self._link_seconds / (self._depth - 1))

    def tells(self, window: int) -> bool:
        """Return whether the new steps are worth taking in before the window ends."""
        return self.known and tells(self.times[-window:], self.online, self.batch)

    def quicker(self) -> bool:
        """Return whether the last new step shows that the device has become quicker."""
        return quicker(self.times, self.online, self.batch)

    def take(self, window: int, confirmed: int | None = None, least: int = 1) -> list[float]:
        """Take in the last new steps, at most `window`; those that counted.

        A step that may be a hiccup stays new until the next one. confirmed: surprises that are none. least:
        steps without which nothing is taken in, and all are forgotten.
        """
        times = self.times[-window:]
        waits = confirmed is None and undecided(times, self.online, self.batch)
        self.times = times[-1:] if waits else []
        times = times[:-1] if waits else times
        if len(times) < least:
            return []
        counted = list(settled(times, self.online, self.batch, confirmed))
        self.online.observe(self.batch, counted)
        self.known = True
        return counted

    def read(self, window: int, asked: bool, batch: int, next_batch: int) -> DeviceReading:
        """Take in the window's steps, and say what is known. batch, next_batch: the rank's own, and the one
        that was decided last. asked: the window is not over, so that what was known before may do.
        """
        if not self.times:
            self.batch = batch
        counted = self.take(MOST_KEPT, least=self.online.confirmed if asked else window // 2 + 1)
        seconds = median(counted) if counted else None
        if seconds is None and asked and self.online.known:
            seconds = self.online.cost.seconds(self.batch)
        changing = self.batch != next_batch or self.online.awaits(self.batch)
        return DeviceReading(self.batch, seconds, self.estimate, self.bounds, changing)

    def renew(self) -> None:
        """Take in the last step of a rank that rested: its device may be another one by now."""
        if self.times:
            self.online.renew(self.batch, self.times[-1])
        self.times = []


def planned_device(worker: PlanWorker, depth: int = 1) -> BalancedDevice:
    """The device of a plan's worker, with its cost model; without one, or in micro-batches, time is in
    proportion to the batch. depth: steps under way.
    """
    if worker.fit is not None and worker.accumulation == 1:
        prior = cost_of(worker.fit)
    else:
        prior = Line(0.0, planned_compute_seconds(worker) / worker.batch)
    most = min(MAX_BATCH, (worker.max_batch or MAX_BATCH) * worker.max_accumulation)
    bounds = Bounds(worker.min_batch, most, worker.batch_multiple, worker.required)
    return BalancedDevice(prior, bounds, link_seconds=worker.link_seconds, depth=depth)


def planned_compute_seconds(worker: PlanWorker) -> float:
    """Return a planned worker's seconds of a step, in its micro-batches. Without a cost model: the plan's
    prediction, less the transfers where these do not overlap.
    """
    if worker.fit is not None:
        return seconds_in_parts(worker.fit, worker.batch, worker.micro_batch)
    serial = worker.predicted_seconds - worker.link_seconds
    return serial if serial > 0 else worker.predicted_seconds or float(worker.batch)
