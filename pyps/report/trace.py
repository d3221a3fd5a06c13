"""The trace of a run: trace.json in the Chrome trace event format, for ui.perfetto.dev.

Each rank has a track with its compute, push, pull and wait slices, and in a pipeline a second one for the
transfers that overlap the next step's compute. Events of processes are instant events.
Times are microseconds since the first event. The format: "Trace Event Format" (Duvall and others, Google).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyps.formats.events import RunEvent
from pyps.formats.records import StepRecord, split_spans
from pyps.formats.setup import RankSetup

MICROSECONDS = 1e6
TRACKS = 100_000  # of one process; counted from 1, since Perfetto keeps thread 0 for the idle task
LAUNCHER_TRACK = TRACKS - 1
TRANSFERS = TRACKS // 2  # the transfers of rank r are track TRANSFERS + r + 1


def make_trace(
    ranks: Sequence[RankSetup],
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
    rows = [_metadata("process_name", 0, title), _metadata("thread_name", LAUNCHER_TRACK, "launcher")]
    rows.append(_sort_index(LAUNCHER_TRACK, -1))
    for spec in ranks:
        label = f"rank {spec.rank}: {spec.name}, b = {spec.batch}"
        rows.append(_metadata("thread_name", spec.rank + 1, label))
        rows.append(_sort_index(spec.rank + 1, spec.rank))
    pipelined = {record.rank for record in records if record.depth > 1}
    for spec in ranks:
        if spec.rank in pipelined:
            rows.append(_metadata("thread_name", TRANSFERS + spec.rank + 1, f"rank {spec.rank}: transfers"))
            rows.append(_sort_index(TRANSFERS + spec.rank + 1, spec.rank))
    for record in records:
        rows += _step_slices(record, origin)
    rows += [_instant_event(event, origin) for event in events]
    first = (process - 1) * TRACKS  # viewers need track numbers that are unique over processes
    rows = [{**row, "pid": process, "tid": first + row["tid"]} for row in rows]
    return {"displayTimeUnit": "ms", "traceEvents": rows}


def _step_slices(record: StepRecord, origin: float) -> list[dict[str, Any]]:
    arguments = {
        "step": record.step,
        "round": record.round,
        "version": record.version,
        "staleness": record.staleness,
        "samples": record.samples,
        "loss": record.loss,
        "pid": record.pid,
    }
    own, overlapped = split_spans(record)
    track = record.rank + 1
    return [
        {
            "ph": "X",
            "name": kind,
            "cat": "rejected" if record.rejected else "step",
            "tid": tid,
            "ts": (begin - origin) * MICROSECONDS,
            "dur": max(0.0, end - begin) * MICROSECONDS,
            "args": arguments,
        }
        for tid, spans in ((track, own), (TRANSFERS + track, overlapped))
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


def _sort_index(track: int, index: int) -> dict[str, Any]:
    arguments = {"sort_index": index}
    return {"ph": "M", "name": "thread_sort_index", "tid": track, "args": arguments}
