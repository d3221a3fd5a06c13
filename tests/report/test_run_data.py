"""One report over the folders of several hosts: ranks together, and their clocks brought to one."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples
from test_page import CLOCK, make_run, setup_of, steps

from pyps.errors import InputError
from pyps.formats import write_json
from pyps.formats.events import RunEvent
from pyps.formats.records import StepRecord
from pyps.report.page import findings, limit
from pyps.report.run_data import HostLog, load_run, offset


def shifted(records: list[StepRecord], seconds: float) -> list[StepRecord]:
    return [
        msgspec.structs.replace(r, spans=[(k, b + seconds, e + seconds) for k, b, e in r.spans])
        for r in records
    ]


def of_rank(rank: int, records: list[StepRecord]) -> list[StepRecord]:
    return [r for r in records if r.rank == rank]


@given(st.floats(-1e6, 1e6), st.floats(-0.5, 0.5))
@settings(derandomize=True, deadline=None, max_examples=examples(15, 50))
def test_versions_bound_what_the_times_of_day_say(boot: float, wrong: float) -> None:
    """Clocks since boot that differ by anything, times of day that are off by up to half a second."""
    records = list(steps(20))
    here = HostLog(of_rank(0, records), [RunEvent("started", 10.0, 1e9 + 10.0)])
    there = HostLog(
        shifted(of_rank(1, records), boot), [RunEvent("started", 10.0 + boot, 1e9 + 10.0 + wrong)]
    )
    found = offset(here, there)
    assert abs(found + boot) <= min(0.5, 0.12) + 1e-6 * abs(boot)


def test_without_events_versions_alone_do() -> None:
    records = list(steps(20))
    found = offset(HostLog(of_rank(0, records), []), HostLog(shifted(of_rank(1, records), 5000.0), []))
    assert found == pytest.approx(-5000.0, abs=0.12)


def test_two_hosts_are_one_run(tmp_path: Path) -> None:
    records = list(steps(50))
    whole = load_run([make_run(tmp_path / "whole", records)])
    a = make_run(tmp_path / "a", of_rank(0, records), setup_of((0,), host="a"))
    b = make_run(tmp_path / "b", of_rank(1, records), setup_of((1,), host="b"))
    both = load_run([a, b])
    assert both.setup.host == "a, b"
    assert [r.name for r in both.setup.ranks] == [r.name for r in whole.setup.ranks]
    assert both.report.outcome == "finished"
    assert both.report.global_batch == 10
    assert both.report.samples == whole.report.samples
    assert both.report.iteration_seconds.median == pytest.approx(
        whole.report.iteration_seconds.median, rel=0.01
    )
    assert min(r.spans[0][1] for r in both.records) == pytest.approx(CLOCK, abs=0.2)


def test_parts_of_two_runs_are_refused(tmp_path: Path) -> None:
    records = list(steps(5))
    a = make_run(tmp_path / "a", of_rank(0, records), setup_of((0,)))
    b = make_run(tmp_path / "b", of_rank(1, records), setup_of((1,), seed=7))
    with pytest.raises(InputError, match=r"b: seed: found 7; expected 0 as in .*a: parts of one run"):
        load_run([a, b])
    with pytest.raises(
        InputError, match=r"versions 1 to 5 of rank 0; .*a has 1 to 5; expected folders of one"
    ):
        load_run([a, a])


def test_a_host_whose_launcher_was_started_again(tmp_path: Path) -> None:
    """Its first launcher was killed and left no report."""
    records = list(steps(50))
    whole = load_run([make_run(tmp_path / "whole", records)])
    mine = of_rank(1, records)
    a = make_run(tmp_path / "a", of_rank(0, records), setup_of((0,), host="a"))
    killed = make_run(tmp_path / "killed", mine[:20], setup_of((1,), host="b"))
    again = make_run(tmp_path / "again", mine[20:], setup_of((1,), host="b"))
    (killed / "report.json").unlink()
    for folders in ([a, killed, again], [again, a, killed]):
        found = load_run(folders)
        assert found.report.outcome == "finished"
        assert [r.rank for r in found.setup.ranks] == [0, 1]
        assert len(found.records) == len(whole.records)


def test_a_host_without_a_report_leaves_the_run_unfinished(tmp_path: Path) -> None:
    records = list(steps(5))
    a = make_run(tmp_path / "a", of_rank(0, records), setup_of((0,)))
    b = make_run(tmp_path / "b", of_rank(1, records), setup_of((1,)))
    (b / "report.json").unlink()
    assert load_run([a, b]).report.outcome == "unfinished"


RECORDED = Path(__file__).parent / "killed_resumed_killed"


def test_every_sentence_about_a_killed_resumed_killed_run_is_true() -> None:
    """Recorded: a run is killed after 3.4 s of training, goes on 15 s later, loses a worker, and is killed.

    Each figure here was read from the records and events by hand.
    """
    run = load_run([RECORDED])
    report = run.report
    assert (report.outcome, report.error) == ("unfinished", "it still trains, or its launcher was killed")
    assert list(findings(run)) == [
        "Rank 1 (device-1) was absent for 5.3 s while others trained; it died: killed by SIGKILL.",
        "2 of 62 rounds (version 36, 37) had fewer samples than the global batch of 8: their gradients are "
        "not those of one process with whole batches.",
        "Rank 1 (device-1) computes 201.3 ms a step, where the plan has 100.0 ms: profile it again as it "
        "trains here: same model, precision and CPU threads, and no other work.",
        "Rebalanced: rank 1 is away: [5, 3] -> [8, 0].",
        "Rebalanced: all ranks are back: [8, 0] -> [5, 3].",
    ]
    assert limit(run) == "Compute limits it: 98% of the ranks' time."
    assert (report.resumed_at, report.restarts, report.versions) == ([15], 1, 62)
    assert [(r.steps, r.samples, round(r.absent_seconds, 1)) for r in report.ranks] == [
        (62, 344, 0.0),
        (48, 144, 5.3),
    ]
    ends = {part: max(r.spans[-1][2] for r in run.records if r.pid in pids) for part, pids in PIDS.items()}
    begins = {
        part: min(b for r in run.records if r.pid in pids for kind, b, _ in r.spans if kind == "compute")
        for part, pids in PIDS.items()
    }
    parts = sum(ends[part] - begins[part] for part in PIDS)
    assert report.training_seconds == pytest.approx(parts)
    started, resumed = (
        next(e.monotonic_seconds for e in run.events if e.kind == kind) for kind in ("started", "resumed")
    )
    last = max(ends[1], *(e.monotonic_seconds for e in run.events if e.monotonic_seconds < resumed))
    assert report.wall_seconds == pytest.approx(last - started + ends[2] - resumed)
    assert max(p.seconds for p in report.loss) == pytest.approx(ends[2] - begins[1])


PIDS = {1: (14771, 14772), 2: (15895, 15896, 16192)}


def test_a_report_of_an_earlier_part_is_not_that_of_the_run(tmp_path: Path) -> None:
    """It ended by a signal; then it was resumed, and killed."""
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    old = msgspec.structs.replace(load_run([folder]).report, outcome="interrupted", resumed_at=[])
    write_json(folder / "report.json", old)
    assert load_run([folder]).report.outcome == "unfinished"
