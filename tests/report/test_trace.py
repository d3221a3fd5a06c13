"""pyps.report.trace: what trace viewers demand of the format, and that no slice is lost or covered."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from run_tools import make_record

from pyps.formats import encode
from pyps.formats.events import RunEvent
from pyps.formats.options import MAX_DEPTH
from pyps.formats.records import RecordWriter, Span, StepRecord, read_records
from pyps.formats.setup import RankSpec
from pyps.report.trace import make_trace

RANKS = [RankSpec(0, "v100", 20, 0.1), RankSpec(1, "t4", 8, 0.1)]
EVENTS = [
    RunEvent("started", 99.0, 1.7e9, 0, 4001),
    RunEvent("died", 101.5, 1.7e9, 1, 4002, detail="killed by SIGKILL"),
    RunEvent("snapshot", 101.0, 1.7e9, version=2, detail="000000002.npz"),
    RunEvent("ended", 102.0, 1.7e9, detail="finished"),
]


def record(rank: int, step: int, begin: float, loss: float | None = 0.5) -> StepRecord:
    spans: list[Span] = [
        ("wait", begin, begin + 0.1),
        ("pull", begin + 0.1, begin + 0.2),
        ("compute", begin + 0.2, begin + 0.7),
        ("push", begin + 0.7, begin + 0.9),
    ]
    return make_record(rank, step, 20, spans, loss)


RECORDS = [record(rank, step, 100.0 + step) for step in (1, 2) for rank in (0, 1)]


def trace() -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(encode(make_trace(RANKS, RECORDS, EVENTS)))
    return whole


def check_format(whole: dict[str, Any]) -> None:
    """The Trace RunEvent Format's demands on the events that are used here."""
    assert whole["displayTimeUnit"] in ("ms", "ns")
    for event in whole["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            assert event["args"]
            continue
        assert event["ph"] in ("X", "i")
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0.0
        if event["ph"] == "X":
            assert event["dur"] >= 0.0
        else:
            assert event["s"] in ("g", "p", "t")


def slices(whole: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    return [e for e in whole["traceEvents"] if e["ph"] == "X" and e["tid"] == rank + 1]


def test_format() -> None:
    check_format(trace())


def test_every_span_is_a_slice_on_its_ranks_track() -> None:
    for rank in (0, 1):
        found = [(s["name"], s["ts"], s["dur"]) for s in slices(trace(), rank)]
        expected = [
            (kind, (begin - 99.0) * 1e6, (end - begin) * 1e6)
            for r in RECORDS
            if r.rank == rank
            for kind, begin, end in r.spans
        ]
        assert len(found) == len(expected) == 8
        for (kind, ts, dur), (kind2, ts2, dur2) in zip(found, expected, strict=True):
            assert kind == kind2
            assert math.isclose(ts, ts2, abs_tol=0.5)
            assert math.isclose(dur, dur2, abs_tol=0.5)


def test_slices_of_a_track_do_not_overlap() -> None:
    for rank in (0, 1):
        ordered = sorted(slices(trace(), rank), key=lambda s: s["ts"])
        for one, next_one in pairwise(ordered):
            assert one["ts"] + one["dur"] <= next_one["ts"] + 0.5


def test_tracks_have_names_and_none_is_track_zero() -> None:
    names = {e["tid"]: e["args"]["name"] for e in trace()["traceEvents"] if e["name"] == "thread_name"}
    assert names[1] == "rank 0: v100, b = 20"
    assert names[2] == "rank 1: t4, b = 8"
    assert {e["tid"] for e in trace()["traceEvents"] if e["ph"] != "M"} <= names.keys()


def test_events_are_marks_on_the_right_track() -> None:
    marks = {e["name"]: e for e in trace()["traceEvents"] if e["ph"] == "i"}
    assert marks["died"]["tid"] == 2
    assert marks["died"]["args"]["detail"] == "killed by SIGKILL"
    assert marks["snapshot"]["args"]["version"] == 2
    assert marks["snapshot"]["tid"] == marks["ended"]["tid"] not in (1, 2)


def test_a_loss_that_is_not_a_number_does_not_spoil_the_file(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "worker-0-1.jsonl") as writer:
        writer.write(record(0, 1, 100.0, loss=math.nan))
    check_format(json.loads(encode(make_trace(RANKS, read_records(tmp_path / "worker-0-1.jsonl"), []))))


def test_runs_in_one_file_share_no_track() -> None:
    one, other = (make_trace(RANKS, RECORDS, EVENTS, process=p, title=f"run {p}") for p in (1, 2))
    tracks = [{e["tid"] for e in whole["traceEvents"] if e["ph"] != "M"} for whole in (one, other)]
    assert len(tracks[0]) == len(tracks[1]) == 3
    assert not tracks[0] & tracks[1]
    assert {e["pid"] for e in other["traceEvents"]} == {2}


@given(st.lists(st.tuples(st.floats(0.0, 0.4), st.floats(0.01, 2.5)), min_size=1, max_size=40))
@settings(derandomize=True, deadline=None)
def test_transfers_that_travel_at_once_have_tracks_of_their_own(steps: list[tuple[float, float]]) -> None:
    """No two slices of a track overlap, and no more tracks are used than transfers were under way at once."""
    records, begin = [], 100.0
    for k, (idle, seconds) in enumerate(steps):
        sent = begin + 0.5
        middle, end = sent + seconds / 2, sent + seconds
        spans: list[Span] = [("compute", begin, sent), ("push", sent, middle), ("pull", middle, end)]
        records.append(replace(make_record(0, k, 20, spans), depth=MAX_DEPTH))
        begin = sent + idle
    rows = make_trace(RANKS, records, [])["traceEvents"]
    tracks: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row["ph"] == "X" and row["name"] != "compute":
            tracks.setdefault(row["tid"], []).append((row["ts"], row["ts"] + row["dur"]))
    assert sum(map(len, tracks.values())) == 2 * len(steps)
    for slices_ in tracks.values():
        for (_, end), (following, _) in pairwise(sorted(slices_)):
            assert end <= following + 0.5
    transfers = [(r.spans[1][1], r.spans[2][2]) for r in records]
    assert len(tracks) == max(sum(b <= at < e for b, e in transfers) for at, _ in transfers)
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert all(names[track].startswith("rank 0: transfers") for track in tracks)


def test_nothing_happened() -> None:
    check_format(json.loads(encode(make_trace(RANKS, [], []))))
