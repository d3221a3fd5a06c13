"""The events of a run: run.jsonl, one JSON line for each, written by the launcher alone.

The step records (pyps.formats.records) say how each step went; the events say which processes started,
joined, died and were restarted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from pyps.errors import InputError
from pyps.formats.files import open_plain
from pyps.formats.records import LineReader, append_whole, drop_half_line

EVENTS = "run.jsonl"
UNDONE = "undone.jsonl"
RunEventKind = Literal[
    "started",
    "joined",
    "died",
    "left",
    "restarted",
    "replanned",
    "probed",
    "checkpoint",
    "resumed",
    "undone",
    "finished",
    "ended",
]


class RunEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of a worker (rank, pid), or of the run where rank is None.

    monotonic_seconds: CLOCK_MONOTONIC, as in the step records.
    unix_seconds: the time of day.
    version: the store's, for checkpoints, and where the run was resumed or went back to.
    detail: the reason: an exit code, a signal, a file.
    pushes: the versions that are undone, where the run was resumed or went back to a checkpoint.
    """

    kind: RunEventKind
    monotonic_seconds: float
    unix_seconds: float
    rank: int | None = None
    pid: int | None = None
    version: int | None = None
    detail: str = ""
    pushes: int | None = None


class EventLog:
    """Appends events to a file, each in one write, unless the disk is full; `events` holds all of them.

    Holds the file's lock: one launcher at a time. Raises InputError if another one runs.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() or path.is_symlink():
            open_plain(path, links=False).close()  # a pipe would be waited for
        self._path = path
        self._file = path.open("ab", buffering=0)
        import fcntl  # Windows has none, and plans without it

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            found = "a run that is still going on"
            raise InputError(
                str(path.parent), "", found, "a folder without one, or wait for its end"
            ) from None
        drop_half_line(path)
        self.events: list[RunEvent] = []
        self.read_again()

    def read_again(self) -> None:
        """Its times may have been moved."""
        self.events[:] = read_events(self._path)

    def write(
        self,
        kind: RunEventKind,
        *,
        rank: int | None = None,
        pid: int | None = None,
        version: int | None = None,
        detail: str = "",
        pushes: int | None = None,
    ) -> RunEvent:
        """Append an event with the present time; kind and the others: fields of RunEvent."""
        event = RunEvent(kind, time.monotonic(), time.time(), rank, pid, version, detail, pushes)
        self.events.append(event)
        append_whole(self._file, msgspec.json.encode(event) + b"\n")
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._file.close()


def read_events(path: str | os.PathLike[str]) -> list[RunEvent]:
    """The events of a run.jsonl, in order; a last line without its newline is left out.

    Raises InputError, naming the line, if any other line is not an event or the file cannot be read.
    """
    return LineReader(path).new(RunEvent)


class Undone(msgspec.Struct, frozen=True):
    """Hold what a run lost when rank 0 made its store again from a checkpoint: a line of undone.jsonl,
    which its worker writes and the launcher passes on as events.

    version: of the checkpoint; pushes: known to have come after it.
    """

    version: int
    pushes: int


def append_undone(run_dir: Path, undone: Undone) -> None:
    """Add a line; nothing where the disk is full. Raises OSError."""
    with (run_dir / UNDONE).open("ab", buffering=0) as file:
        append_whole(file, msgspec.json.encode(undone) + b"\n")


def read_undone(run_dir: Path) -> list[Undone]:
    """All lines; none without the file. Raises InputError for one of something else."""
    path = run_dir / UNDONE
    return LineReader(path).new(Undone) if path.exists() else []
