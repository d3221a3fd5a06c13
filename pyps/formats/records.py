"""What a worker says about each of its steps: one JSON line a step, appended in one write.

A killed worker can leave half a line, always the last one; `read_records` passes over it. Everything that is
drawn or reported about a run (trace, report, progress) is computed from these records.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from pyps.errors import InputError

SpanKind = Literal["wait", "pull", "compute", "push", "skip"]
Span = tuple[SpanKind, float, float]


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """One training step of one worker.

    `first` and `samples` are the claimed range of sample positions, `batch` the planned batch, `round`,
    `plan` and `version` the store's counters, `sources` the gradients that went into the version. `loss` is
    the mean over the worker's samples. `spans` are (kind, begin, end) in seconds of CLOCK_MONOTONIC, which
    every process of the machine shares. `overrun_seconds` is how much later than asked the throttle ended.
    `skipped`: the worker gave no gradient (a GradScaler found inf); `rejected`: the store did not take it
    (the policy refused it, or the worker was fenced). In both cases the parameters did not change by it.
    `depth`: steps of the worker in flight at once; above 1, pushes and pulls ran beside the next compute.
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
    depth: int = 1


def apart(record: StepRecord) -> tuple[list[Span], list[Span]]:
    """A step's spans: the worker's own, and in a pipeline those of the transfer beside its next compute."""
    computed = [k for k, (kind, _, _) in enumerate(record.spans) if kind == "compute"]
    if record.depth == 1 or not computed:
        return list(record.spans), []
    return list(record.spans[: computed[-1] + 1]), list(record.spans[computed[-1] + 1 :])


def record_path(run_dir: Path, rank: int, pid: int) -> Path:
    """The file of one worker process; a restarted worker has a new pid and so a new file."""
    return run_dir / f"worker-{rank}-{pid}.jsonl"


class RecordWriter:
    """Appends records to a file; each line reaches the kernel in one write, so a kill loses at most one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def write(self, record: StepRecord) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()


def read_records(path: str | os.PathLike[str]) -> list[StepRecord]:
    """The records of one file, in order; a last line without its newline is a killed worker's and is left
    out.

    Raises InputError, naming the line, if any other line is not a record.
    """
    decoder = msgspec.json.Decoder(StepRecord)
    whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
    records = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise InputError(str(path), f"line {number}", str(error), "a step record") from error
    return records


def read_run(run_dir: str | os.PathLike[str]) -> list[StepRecord]:
    """The records of every worker process of a run, ordered by the time their steps began."""
    records = [r for path in sorted(Path(run_dir).glob("worker-*.jsonl")) for r in read_records(path)]
    return sorted(records, key=lambda r: (r.spans[0][1] if r.spans else 0.0, r.rank))
