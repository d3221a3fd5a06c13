"""A run as a picture to walk about in: trace.json in the Chrome trace event format, for ui.perfetto.dev.

One track a rank, with its compute, push, pull and wait slices, and one for the transfers that run beside
the next compute in a pipeline; what happened to processes stands as marks.
Times are microseconds from the first event on. The format: "Trace Event Format" (Duvall and others, Google).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyps.formats.records import StepRecord, apart
from pyps.run.events import Event
from pyps.run.ranks import Place

MICROSECONDS = 1e6
TRACKS = 100_000  # of one process; counted from 1, for Perfetto keeps thread 0 for the idle task
SUPERVISOR_TRACK = TRACKS - 1
TRANSFERS = TRACKS // 2  # the transfers of rank r are track TRANSFERS + r + 1


def make_trace(
    places: Sequence[Place],
    records: Sequence[StepRecord],
    events: Sequence[Event],
    *,
    process: int = 1,
    title: str = "pyps run",
) -> dict[str, Any]:
    """The trace as plain data, ready for JSON.

    `process` (from 1) and `title` tell runs apart whose traceEvents are put into one file.
    """
    begins = [r.spans[0][1] for r in records if r.spans] + [e.seconds for e in events]
    origin = min(begins, default=0.0)
    rows = [_name("process_name", 0, title), _name("thread_name", SUPERVISOR_TRACK, "supervisor")]
    rows.append(_sort_index(SUPERVISOR_TRACK, -1))
    for place in places:
        label = f"rank {place.rank}: {place.name}, b = {place.batch}"
        rows.append(_name("thread_name", place.rank + 1, label))
        rows.append(_sort_index(place.rank + 1, place.rank))
    piped = {record.rank for record in records if record.depth > 1}
    for place in places:
        if place.rank in piped:
            rows.append(_name("thread_name", TRANSFERS + place.rank + 1, f"rank {place.rank}: transfers"))
            rows.append(_sort_index(TRANSFERS + place.rank + 1, place.rank))
    for record in records:
        rows += _slices(record, origin)
    rows += [_mark(event, origin) for event in events]
    first = (process - 1) * TRACKS  # viewers want track numbers that no other process has
    rows = [{**row, "pid": process, "tid": first + row["tid"]} for row in rows]
    return {"displayTimeUnit": "ms", "traceEvents": rows}


def _slices(record: StepRecord, origin: float) -> list[dict[str, Any]]:
    about = {
        "step": record.step,
        "round": record.round,
        "version": record.version,
        "staleness": record.staleness,
        "samples": record.samples,
        "loss": record.loss,
        "pid": record.pid,
    }
    own, beside = apart(record)
    track = record.rank + 1
    return [
        {
            "ph": "X",
            "name": kind,
            "cat": "rejected" if record.rejected else "step",
            "tid": tid,
            "ts": (begin - origin) * MICROSECONDS,
            "dur": max(0.0, end - begin) * MICROSECONDS,
            "args": about,
        }
        for tid, spans in ((track, own), (TRANSFERS + track, beside))
        for kind, begin, end in spans
    ]


def _mark(event: Event, origin: float) -> dict[str, Any]:
    """An instant event, on the rank's track or, for the whole run, on the supervisor's."""
    return {
        "ph": "i",
        "s": "t",
        "name": event.kind,
        "cat": "process",
        "tid": SUPERVISOR_TRACK if event.rank is None else event.rank + 1,
        "ts": (event.seconds - origin) * MICROSECONDS,
        "args": {"pid": event.pid, "version": event.version, "detail": event.detail},
    }


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "tid": track, "args": {"name": name}}


def _sort_index(track: int, index: int) -> dict[str, Any]:
    about = {"sort_index": index}
    return {"ph": "M", "name": "thread_sort_index", "tid": track, "args": about}
