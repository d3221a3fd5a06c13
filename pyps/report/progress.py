"""How far a run is, while it trains: from its step records and its store's state.

A Tracker keeps the last seconds of a run; `update` returns a RunProgress. Rates, losses and staleness are of
that time alone. Watch reads a run's records a few times a second, and tells callbacks and sinks.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyps.formats.events import RunEvent
from pyps.formats.records import RunReader, StepRecord
from pyps.formats.setup import RankSpec, RunSetup
from pyps.metrics import Reading, Sink
from pyps.report.steps import PHASES, phase_seconds
from pyps.store.activity import StoreActivity, activities, explain

WINDOW_SECONDS = 20.0
LEAST_ITERATIONS = 4  # that a window holds, however long they take
MOST_RECORDS = 4000  # of a window
STALLED_SECONDS = 10.0
STALLED_ITERATIONS = 5.0
REFRESH_SECONDS = 0.25
SINK_SECONDS = 1.0
NOTED = ("died", "left", "restarted", "replanned")  # events that sinks of text get
FIELDS = ("loss", "samples_per_second", "iteration_seconds", "predicted_seconds", "eta_seconds")


@dataclass(frozen=True, slots=True)
class LiveRank:
    """One rank: all its samples, and of the last seconds the means of its steps' phases, in seconds."""

    rank: int
    name: str
    batch: int
    samples: int
    steps: int
    phases: dict[str, float]
    idle_share: float
    staleness: float


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Where a run is. None: not known yet.

    samples: trained. requested: to train in all; 0: without end. iteration_seconds: for one global batch.
    predicted_seconds: the plan's, of the same. loss: the mean over the last global batch's samples.
    staleness: the mean. eta_seconds: until the end. stalled: what holds the run up, a sentence; "": it goes
    on.
    """

    samples: int
    requested: int
    versions: int
    seconds: float
    iterations: int
    samples_per_second: float | None = None
    iteration_seconds: float | None = None
    predicted_seconds: float | None = None
    loss: float | None = None
    staleness: float = 0.0
    eta_seconds: float | None = None
    restarts: int = 0
    stalled: str = ""
    ranks: tuple[LiveRank, ...] = ()


class Tracker:
    """Follows one run, which began, or went on, at `began` (seconds, monotonic): earlier steps only count.

    If other hosts train too, samples are counted by the store; losses and phases are of the ranks here.
    """

    def __init__(self, setup: RunSetup, began: float) -> None:
        self._setup, self._began = setup, began
        self._names = {rank.rank: rank.name for rank in setup.ranks}
        self._global_batch = setup.global_batch or 1
        self._window: deque[tuple[float, StepRecord]] = deque(maxlen=MOST_RECORDS)
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=MOST_RECORDS)  # when, how many samples
        self._samples: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()
        self._counted = 0  # samples, by the store
        self._versions = 0

    def update(
        self,
        records: Sequence[StepRecord],
        state: StoreActivity | None,
        now: float,
        restarts: int = 0,
        *,
        ended: bool = False,
    ) -> RunProgress:
        """How far the run is.

        records: those written since the last call. state: of its store, None while there is none. now:
        seconds, monotonic. restarts: of workers, until now. ended: no step follows.
        """
        all_here = state is None or len(state.ranks) == len(self._setup.ranks)
        for record in records:
            self._add(record, all_here)
        if state is not None:
            self._versions = max(self._versions, state.status.version)
            self._global_batch = sum(rank.batch for rank in state.ranks) or 1
            self._count(sum(rank.samples for rank in state.ranks), None if all_here else now)
        self._forget()
        samples, requested = max(self._counted, sum(self._samples.values())), self._setup.samples
        ended = ended or 0 < requested <= samples
        rate = self._rate(now, ended)
        return RunProgress(
            samples=samples,
            requested=requested,
            versions=self._versions,
            seconds=now - self._began,
            iterations=samples // self._global_batch,
            samples_per_second=rate,
            iteration_seconds=self._global_batch / rate if rate else None,
            predicted_seconds=self._setup.predicted_iteration_seconds,
            loss=self._loss(),
            staleness=_mean([r.staleness for _, r in self._window]),
            eta_seconds=max(0, requested - samples) / rate if rate and requested else None,
            restarts=restarts,
            stalled="" if ended else self._stalled(state, now),
            ranks=tuple(self._rank(spec, state) for spec in self._setup.ranks),
        )

    def _add(self, record: StepRecord, all_here: bool) -> None:
        if record.skipped or record.rejected or not record.spans:
            return
        end = record.spans[-1][2]
        if end >= self._began:
            self._window.append((end, record))
            if all_here:
                self._arrivals.append((end, record.samples))
        self._samples[record.rank] += record.samples
        self._steps[record.rank] += 1
        self._versions = max(self._versions, record.version)

    def _count(self, samples: int, now: float | None) -> None:
        """Samples by the store's count: a killed worker's last record may be missing. now: they arrived."""
        if now is not None and samples > self._counted:
            self._arrivals.append((now, samples - self._counted))
        self._counted = max(self._counted, samples)

    def _forget(self) -> None:
        """Drop what came a window's time before the last arrival, down to a few iterations."""
        if not self._arrivals:
            return
        least = LEAST_ITERATIONS * self._global_batch
        held = sum(samples for _, samples in self._arrivals)
        begin = max(t for t, _ in self._arrivals) - WINDOW_SECONDS
        while self._arrivals[0][0] < begin:
            held -= self._arrivals[0][1]
            if held < least:
                break
            self._arrivals.popleft()
        while self._window and self._window[0][0] < self._arrivals[0][0]:
            self._window.popleft()

    def _rate(self, now: float, ended: bool) -> float | None:
        """Samples a second over the window; while nothing arrives, it falls, until the run has ended."""
        usual = self._usual_seconds()
        if usual is None:
            return None
        last, first = max(t for t, _ in self._arrivals), min(t for t, _ in self._arrivals)
        seconds = (now if now - last > 2.0 * usual and not ended else last) - first
        return self._global_batch * (last - first) / usual / seconds

    def _usual_seconds(self) -> float | None:
        """For one global batch, between the ends of the window's first one and of its last one."""
        ends: list[tuple[float, int]] = []  # of each global batch: when, with how many samples until then
        counted = batches = 0
        for end, samples in sorted(self._arrivals):
            counted += samples
            if counted // self._global_batch > batches:
                batches = counted // self._global_batch
                ends.append((end, counted))
        if len(ends) < 2:
            return None
        (began, before), (ended, after) = ends[0], ends[-1]
        return (ended - began) * self._global_batch / (after - before)

    def _loss(self) -> float | None:
        """The mean over the last global batch's samples whose loss was recorded."""
        total = weight = 0.0
        for _, record in reversed(self._window):
            if weight >= self._global_batch:
                break
            if record.loss is not None:
                total += record.loss * record.samples
                weight += record.samples
        return total / weight if weight else None

    def _stalled(self, state: StoreActivity | None, now: float) -> str:
        """Nothing before the first step is a stall: workers still start."""
        if not self._arrivals:
            return ""
        quiet = now - max(t for t, _ in self._arrivals)
        if quiet < max(STALLED_SECONDS, STALLED_ITERATIONS * (self._usual_seconds() or 0.0)):
            return ""
        reason = explain(activities(state, local=True), self._names) if state is not None else ""
        return f"no step for {quiet:.0f} s" + (f": {reason}" if reason else "")

    def _rank(self, spec: RankSpec, state: StoreActivity | None) -> LiveRank:
        mine = [record for _, record in self._window if record.rank == spec.rank]
        phases: dict[str, float] = dict(zip(PHASES, map(_mean, phase_seconds(mine)), strict=True))
        total = sum(phases.values())
        known = state is not None and spec.rank < len(state.ranks)
        return LiveRank(
            rank=spec.rank,
            name=spec.name,
            batch=state.ranks[spec.rank].batch if state is not None and known else spec.batch,
            samples=self._samples[spec.rank],
            steps=self._steps[spec.rank],
            phases=phases,
            idle_share=phases["wait"] / total if total else 0.0,
            staleness=_mean([r.staleness for r in mine]),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


OnProgress = Callable[[RunProgress], None]


class Watch:
    """The watch on the run in `run_dir`; `events`: its log, which grows while it trains."""

    def __init__(
        self,
        setup: RunSetup,
        run_dir: Path,
        events: Sequence[RunEvent],
        on_progress: OnProgress | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """on_progress: called a few times a second. sinks: get readings once a second, and at the end."""
        self._records, self._events = RunReader(run_dir), events
        self._tracker = Tracker(setup, time.monotonic())
        self._on_progress, self._sinks = on_progress, sinks
        self._next = self._next_sink = 0.0
        self._noted = len(events)  # those of earlier parts of the run are old
        self._state: StoreActivity | None = None

    def tick(self, state: StoreActivity | None) -> None:
        """Look again if it is time. state: the store's present one, None while there is none."""
        self._state = state if state is not None else self._state
        if time.monotonic() >= self._next:
            self._look(last=False)

    def finish(self) -> None:
        """Look a last time."""
        self._look(last=True)

    def _look(self, last: bool) -> None:
        now, state = time.monotonic(), self._state
        self._next = now + REFRESH_SECONDS
        restarts = sum(event.kind == "restarted" for event in self._events)
        progress = self._tracker.update(self._records.new(), state, now, restarts, ended=last)
        if self._on_progress is not None:
            self._on_progress(progress)
        if self._sinks and (last or now >= self._next_sink):
            self._next_sink = now + SINK_SECONDS
            self._write(progress)

    def _write(self, progress: RunProgress) -> None:
        new, self._noted = self._events[self._noted :], len(self._events)
        found = list(readings(progress))
        for sink in self._sinks:
            with contextlib.suppress(OSError):  # a full disk: training goes on without this reading
                sink.write(progress.iterations, found)
                for event in new:
                    if event.kind in NOTED:
                        rank = "" if event.rank is None else f"rank {event.rank} "
                        sink.note(progress.iterations, f"{rank}{event.kind}: {event.detail}".rstrip(": "))


def readings(progress: RunProgress) -> Iterator[Reading]:
    """The figures of a RunProgress, as far as they are known."""
    yield Reading("samples", progress.samples)
    yield Reading("version", progress.versions)
    yield Reading("staleness", progress.staleness)
    yield Reading("restarts", progress.restarts)
    for name in FIELDS:
        if (value := getattr(progress, name)) is not None:
            yield Reading(name, value)
    for rank in progress.ranks:
        for name in ("batch", "samples", "idle_share", "staleness"):
            yield Reading(name, getattr(rank, name), rank.rank)
        for phase, seconds in rank.phases.items():
            yield Reading(f"{phase}_seconds", seconds, rank.rank)
