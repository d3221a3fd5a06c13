"""The records of a run's steps: one JSON line for each step, appended by the worker in one write.

A killed worker can leave half a line, always the last one; readers leave it out. The trace, the report and
rebalancing are computed from these records.
"""

from __future__ import annotations

import errno
import os
import warnings
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import msgspec

from pyps.errors import InputError
from pyps.formats.files import learnt, open_plain
from pyps.formats.mode import Mode

SpanKind = Literal["wait", "pull", "data", "compute", "push", "skip"]
Span = tuple[SpanKind, float, float]
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LineType = TypeVar("LineType", bound=msgspec.Struct)


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """One training step of one worker.

    first, samples: the claimed range of sample positions.
    batch: the planned batch.
    round, plan, version: the store's counters; version 0: its round had not closed yet.
    sources: the gradients that went into the version; 0: not known yet, or none.
    loss: the mean over the worker's samples.
    spans: (kind, begin, end) in seconds of CLOCK_MONOTONIC, which all processes of the machine share.
    overrun_seconds: how much longer the step took than the emulated device would have needed.
    skipped: the worker pushed no gradient: it was not finite.
    rejected: the store did not apply the gradient: the policy refused it, or the worker was fenced.
    fenced: the worker missed a deadline and was removed, its samples went back, and it joined again.
    lr: the learning rate of the first parameter group, as pushed.
    depth: the worker's steps in flight at once; above 1, pushes and pulls overlap the next step's compute.
    loader_seconds: how long loading the step's samples keeps the loader busy; with several loader processes,
        each does its part. 0 for tensors in memory.
    loader_workers: loader processes; 0: the training thread loads, and all of it is in the data span.
    admitted_at: when the store took the gradient, in seconds of its machine's CLOCK_MONOTONIC; 0: it did not.
    pushes: gradients of the rank that the store has taken, with this one; 0: it did not take it.
    mode: codecs and depth of the step's transfer, where these may change while the run trains.
    """

    rank: int
    pid: int
    step: int
    round: int
    plan: int
    first: int
    samples: int
    batch: int
    version: int
    staleness: int
    sources: int
    loss: float | None
    spans: list[Span]
    overrun_seconds: float = 0.0
    skipped: bool = False
    rejected: bool = False
    fenced: bool = False
    depth: int = 1
    loader_seconds: float = 0.0
    loader_workers: int = 0
    lr: float | None = None
    admitted_at: float = 0.0
    pushes: int = 0
    mode: Mode | None = None

    def seconds(self, kind: SpanKind) -> float:
        """The sum of the step's spans of one kind."""
        return sum(end - begin for name, begin, end in self.spans if name == kind)


def split_spans(record: StepRecord) -> tuple[list[Span], list[Span]]:
    """A step's spans in order: those of the worker itself, and those that overlap its next step's compute."""
    computed = [k for k, (kind, _, _) in enumerate(record.spans) if kind == "compute"]
    if record.depth == 1 or not computed:
        return list(record.spans), []
    return list(record.spans[: computed[-1] + 1]), list(record.spans[computed[-1] + 1 :])


def record_path(run_dir: Path, rank: int, pid: int) -> Path:
    """The file of one worker process; a restarted worker has a new pid and so a new file."""
    return run_dir / f"worker-{rank}-{pid}.jsonl"


def drop_undone(run_dir: Path, rank: int, pushes: int) -> None:
    """Drop a rank's records from the first step on that is not among its `pushes` in the store, which has
    begun anew from an earlier state. No process of the rank may be alive. Needs no room on the disk.
    """
    for path in run_dir.glob(f"worker-{rank}-*.jsonl"):
        records = read_records(path)
        kept = next((k for k, record in enumerate(records) if record.pushes > pushes), len(records))
        if kept < len(records):
            lines = path.read_bytes().splitlines(keepends=True)
            os.truncate(path, sum(map(len, lines[:kept])))


def append_whole(file: FileIO, data: bytes) -> bool:
    """Append lines, entirely or not at all; False if the disk has no room for them. Raises OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(data) == len(data):
            return True
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
    os.ftruncate(file.fileno(), size)
    return False


def drop_half_line(path: Path) -> None:
    """Cut what a kill has left of a last line: what is appended would be read as its rest. Needs no room."""
    whole, newline, half = path.read_bytes().rpartition(b"\n")
    if half:
        os.truncate(path, len(whole) + len(newline))


class RecordWriter:
    """Appends records to a file; each line reaches the kernel in one write, so a kill loses at most one.

    While the disk is full, records are left out, with one warning.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._warned = path, False
        self.file = path.open("ab", buffering=0)
        drop_half_line(path)  # of an earlier process with this pid, as in a container
        self._encoder = msgspec.json.Encoder()

    def write(self, record: StepRecord) -> None:
        if append_whole(self.file, self._encoder.encode(record) + b"\n") or self._warned:
            return
        self._warned = True
        warnings.warn(f"{self._path}: the disk is full: records of steps are left out", stacklevel=2)

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()


class LineReader:
    """Reads a file of JSON lines while it grows: `new` returns the lines completed since the last call."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._bytes = self._lines = 0

    def new(self, kind: type[LineType]) -> list[LineType]:
        """The new values. Raises InputError, naming the line that is not of the kind, or for the file."""
        with open_plain(self._path) as file:
            file.seek(self._bytes)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._bytes += len(complete) + len(newline)
        decoder = msgspec.json.Decoder(learnt(kind))
        values = []
        for line in complete.splitlines():
            self._lines += 1
            try:
                values.append(decoder.decode(line))
            except (msgspec.DecodeError, RecursionError) as error:
                expected = f"a {kind.__name__}"
                raise InputError(str(self._path), f"line {self._lines}", str(error), expected) from error
        return values


class RunReader:
    """Reads the records of all worker processes of a run, also while they train."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = Path(run_dir)
        self._files: dict[Path, LineReader] = {}

    def new(self) -> list[StepRecord]:
        """The records written since the last call. Raises InputError as LineReader."""
        found = []
        for path in sorted(self._run_dir.glob("worker-*.jsonl")):
            found += self._files.setdefault(path, LineReader(path)).new(StepRecord)
        return found


def read_records(path: str | os.PathLike[str]) -> list[StepRecord]:
    """The records of one file, in order. Raises InputError, naming a line that is not a record."""
    return LineReader(path).new(StepRecord)


def read_run(run_dir: str | os.PathLike[str]) -> list[StepRecord]:
    """The records of every worker process of a run, ordered by the time their steps began."""
    records = RunReader(run_dir).new()
    return sorted(records, key=lambda r: (r.spans[0][1] if r.spans else 0.0, r.rank))
