"""The trace of a run: trace.json in the Chrome trace event format, for ui.perfetto.dev.

Each rank has a track with its compute, push, pull and wait slices. In a pipeline it has further ones for the
transfers that overlap its compute: as many as travel at once. Events of processes are instant events.
Times are microseconds since the first event. The format: "Trace Event Format" (Duvall and others, Google).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyps.formats.events import RunEvent
from pyps.formats.options import MAX_DEPTH
from pyps.formats.records import Span, StepRecord, split_spans
from pyps.formats.setup import RankSpec
from pyps.report.steps import by_rank

MICROSECONDS = 1e6
TRACKS = 100_000  # of one process; counted from 1, since Perfetto keeps thread 0 for the idle task
LAUNCHER_TRACK = TRACKS - 1
TRANSFERS = TRACKS // 2  # rank r's transfers are tracks TRANSFERS + TRANSFER_TRACKS * r + 1 and after
TRANSFER_TRACKS = MAX_DEPTH - 1


def make_trace(
    ranks: Sequence[RankSpec],
    records: Sequence[StepRecord],
    events: Sequence[RunEvent],
    *,
    process: int = 1,
    title: str = "pyps run",
) -> dict[str, Any]:
    """The trace as plain data, ready for JSON.

    ranks, records, events: what ran and what happened.
    process, title: number (from 1) and name of the run, for several runs whose traceEvents share a file.
    """
    begins = [r.spans[0][1] for r in records if r.spans] + [e.monotonic_seconds for e in events]
    origin = min(begins, default=0.0)
    first = (process - 1) * TRACKS  # viewers need track numbers that are unique over processes
    rows = [_metadata("process_name", 0, title), *_named(LAUNCHER_TRACK, "launcher", -1)]
    for spec in ranks:
        rows += _named(spec.rank + 1, f"rank {spec.rank}: {spec.name}, b = {spec.batch}", spec.rank)
    for rank, mine in by_rank(records, [spec.rank for spec in ranks]).items():
        rows += _rank_rows(rank, mine, origin)
    rows += [_instant_event(event, origin) for event in events]
    for row in rows:
        row["pid"] = process
        row["tid"] += first
    return {"displayTimeUnit": "ms", "traceEvents": rows}


def _rank_rows(rank: int, records: Sequence[StepRecord], origin: float) -> list[dict[str, Any]]:
    """The slices of one rank, and the names of its transfers' tracks."""
    rows: list[dict[str, Any]] = []
    ends: list[float] = []  # of each track of transfers
    first = TRANSFERS + TRANSFER_TRACKS * rank + 1
    for record in sorted(records, key=lambda r: r.spans[0][1] if r.spans else 0.0):
        own, transfer = split_spans(record)
        rows += _slices(record, own, rank + 1, origin)
        if transfer:
            track = _free_track(ends, transfer[0][1])
            ends[track] = transfer[-1][2]
            rows += _slices(record, transfer, first + track, origin)
    for track in range(len(ends)):
        number = f" {track + 1}" if len(ends) > 1 else ""
        rows += _named(first + track, f"rank {rank}: transfers{number}", rank)
    return rows


def _free_track(ends: list[float], begin: float) -> int:
    """The first track that is free at a time; one more if none is, as long as there may be more."""
    for track, end in enumerate(ends):
        if end <= begin:
            return track
    if len(ends) < TRANSFER_TRACKS:
        ends.append(begin)
        return len(ends) - 1
    return min(range(len(ends)), key=ends.__getitem__)


def _slices(record: StepRecord, spans: Sequence[Span], track: int, origin: float) -> list[dict[str, Any]]:
    arguments = {
        "step": record.step,
        "round": record.round,
        "version": record.version,
        "staleness": record.staleness,
        "samples": record.samples,
        "loss": record.loss,
        "pid": record.pid,
    }
    return [
        {
            "ph": "X",
            "name": kind,
            "cat": "rejected" if record.rejected else "step",
            "tid": track,
            "ts": (begin - origin) * MICROSECONDS,
            "dur": max(0.0, end - begin) * MICROSECONDS,
            "args": arguments,
        }
        for kind, begin, end in spans
    ]


def _instant_event(event: RunEvent, origin: float) -> dict[str, Any]:
    """An instant event, on the rank's track or, for the whole run, on the launcher's."""
    return {
        "ph": "i",
        "s": "t",
        "name": event.kind,
        "cat": "process",
        "tid": LAUNCHER_TRACK if event.rank is None else event.rank + 1,
        "ts": (event.monotonic_seconds - origin) * MICROSECONDS,
        "args": {"pid": event.pid, "version": event.version, "detail": event.detail},
    }


def _metadata(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "tid": track, "args": {"name": name}}


def _named(track: int, name: str, index: int) -> list[dict[str, Any]]:
    """A track's name, and its place among the others."""
    place = {"ph": "M", "name": "thread_sort_index", "tid": track, "args": {"sort_index": index}}
    return [_metadata("thread_name", track, name), place]
