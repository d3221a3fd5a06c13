"""The watch on a run of this machine: it tells callbacks and metrics how far the run is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pyps.formats.events import RunEvent
from pyps.formats.records import RunReader
from pyps.formats.setup import RunSetup
from pyps.metrics import Reading, Sink
from pyps.report.live import LiveRun, Tracker
from pyps.store.activity import StoreActivity

REFRESH_SECONDS = 0.25
SINK_SECONDS = 1.0
NOTED = ("died", "left", "restarted", "replanned")  # events that sinks of text get
FIELDS = ("loss", "samples_per_second", "iteration_seconds", "predicted_seconds", "eta_seconds")

OnProgress = Callable[[LiveRun], None]


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
        progress = self._tracker.update(self._records.new(), state, now, self._events, ended=last)
        if self._on_progress is not None:
            self._on_progress(progress)
        if self._sinks and (last or now >= self._next_sink):
            self._next_sink = now + SINK_SECONDS
            self._write(progress)

    def _write(self, progress: LiveRun) -> None:
        new, self._noted = self._events[self._noted :], len(self._events)
        found = list(readings(progress))
        for sink in self._sinks:
            with contextlib.suppress(OSError):  # a full disk: training goes on without this reading
                sink.write(progress.iterations, found)
                for event in new:
                    if event.kind in NOTED:
                        rank = "" if event.rank is None else f"rank {event.rank} "
                        sink.note(progress.iterations, f"{rank}{event.kind}: {event.detail}".rstrip(": "))


def readings(progress: LiveRun) -> Iterator[Reading]:
    """The figures of a run, as far as they are known; of ranks, those whose records are here."""
    yield Reading("samples", progress.samples)
    yield Reading("version", progress.versions)
    yield Reading("staleness", progress.staleness)
    yield Reading("restarts", progress.restarts)
    for name in FIELDS:
        if (value := getattr(progress, name)) is not None:
            yield Reading(name, value)
    for rank in progress.ranks:
        if rank.idle_share is None or not rank.phases:
            continue
        for name in ("batch", "samples", "idle_share", "staleness"):
            yield Reading(name, getattr(rank, name), rank.rank)
        for phase, seconds in rank.phases.items():
            yield Reading(f"{phase}_seconds", seconds, rank.rank)
