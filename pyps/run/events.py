"""What happened to a run's processes: run.jsonl, one JSON line an event, written by the supervisor alone.

The workers' own records (pyps.formats.records) say how each step went; these say who started, joined, died
and came back.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from pyps.errors import InputError

EventKind = Literal[
    "started",
    "joined",
    "died",
    "restarted",
    "replanned",
    "snapshot",
    "finished",
    "failed",
    "interrupted",
    "ended",
]


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event: of a worker (rank, pid), or of the run where rank is None.

    `seconds` is CLOCK_MONOTONIC, as in the step records; `unix_seconds` the time of day. `version` is the
    store's, for snapshots. `detail` says why: an exit code's meaning, a signal, a file.
    """

    kind: EventKind
    seconds: float
    unix_seconds: float
    rank: int | None = None
    pid: int | None = None
    version: int | None = None
    detail: str = ""


class EventLog:
    """Appends events to a file, each in one write, and keeps them for the report."""

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        self._file = path.open("ab", buffering=0)

    def write(
        self,
        kind: EventKind,
        *,
        rank: int | None = None,
        pid: int | None = None,
        version: int | None = None,
        detail: str = "",
    ) -> Event:
        event = Event(kind, time.monotonic(), time.time(), rank, pid, version, detail)
        self.events.append(event)
        self._file.write(msgspec.json.encode(event) + b"\n")
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._file.close()


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a run.jsonl, in order; a last line without its newline is left out.

    Raises InputError, naming the line, if any other line is not an event or the file cannot be read.
    """
    try:
        whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
    except OSError as error:
        raise InputError(str(path), "", error.strerror or str(error), "a run's event log") from None
    decoder = msgspec.json.Decoder(Event)
    events = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            events.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise InputError(str(path), f"line {number}", str(error), "an event") from None
    return events
