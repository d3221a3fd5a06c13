"""pyps.report.report: iteration times, phases and samples from records whose answers are known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_tools import make_record, make_setup

from pyps.cli.run import summary
from pyps.errors import InputError
from pyps.formats import write_json
from pyps.formats.events import RunEvent
from pyps.formats.mode import Mode
from pyps.formats.plan import TurnSchedule
from pyps.formats.records import Span, StepRecord
from pyps.formats.setup import RankSpec
from pyps.report.report import (
    Report,
    StoreTotals,
    absences,
    crowding,
    loading_advice,
    make_report,
    prediction_advice,
    rank_report,
    read_report,
    straggler_lines,
)
from pyps.report.ring import turns_report
from pyps.report.steps import (
    absent_seconds,
    between,
    distribution,
    iteration_times,
    pauses,
    version_times,
    without_startup_wait,
)

B = 10
BATCHES = (7, 3)
ROUND_SECONDS = 2.0
PREDICTED_SECONDS = 1.6
SETUP = make_setup(
    dict(enumerate(BATCHES)), seed=3, samples=100, predicted_iteration_seconds=PREDICTED_SECONDS
)


def record(rank: int, step: int, version: int, begin: float, **changes: object) -> StepRecord:
    """A step of 2 s: rank 0 computes for 1.5 s, rank 1 for 1 s; 0.1 s of pull, 0.25 s of push, else wait."""
    compute = (1.5, 1.0)[rank]
    spans: list[Span] = [
        ("wait", begin, begin),
        ("pull", begin, begin + 0.1),
        ("compute", begin + 0.1, begin + 0.1 + compute),
        ("wait", begin + 0.1 + compute, begin + 1.75),
        ("push", begin + 1.75, begin + ROUND_SECONDS),
    ]
    whole = make_record(rank, step, BATCHES[rank], spans, loss=1.0)
    return msgspec.structs.replace(whole, version=version, **changes)


def rounds(count: int) -> list[StepRecord]:
    """A synchronous run of that many rounds."""
    return [record(rank, k + 1, k + 1, k * ROUND_SECONDS) for k in range(count) for rank in (0, 1)]


def report_of(
    records: list[StepRecord], totals: StoreTotals | None = None, events: list[RunEvent] | None = None
) -> Report:
    return make_report(SETUP, records, events or [], totals or StoreTotals(), "finished")


def test_synchronous_iteration_is_the_round() -> None:
    assert iteration_times(rounds(6), B) == pytest.approx([ROUND_SECONDS] * 5)


def test_asynchronous_iteration_is_the_global_batch() -> None:
    """Two workers of 5 samples, one push a second in turn: B = 10 samples every 2 s."""
    records = [
        record(k % 2, k // 2 + 1, k + 1, float(k), samples=5, spans=[("push", float(k), k + 1.0)])
        for k in range(12)
    ]
    assert iteration_times(records, B) == pytest.approx([2.0] * 5)


@given(
    st.lists(st.integers(1, 25), min_size=1, max_size=60),
    st.lists(st.floats(0.0, 3.0), min_size=60, max_size=60),
)
@settings(derandomize=True, deadline=None)
def test_iterations_cover_the_time_between_the_first_and_the_last_multiple(
    samples: list[int], gaps: list[float]
) -> None:
    records, now = [], 0.0
    for k, (count, gap) in enumerate(zip(samples, gaps, strict=False)):
        now += gap
        records.append(record(0, k + 1, k + 1, 0.0, samples=count, spans=[("push", 0.0, now)]))
    times = iteration_times(records, B)
    assert len(times) == max(0, sum(samples) // B - 1)
    assert all(seconds >= 0.0 for seconds in times)
    ends = [r.spans[-1][2] for r in records]
    totals = [sum(samples[: k + 1]) for k in range(len(samples))]
    first = next((e for e, t in zip(ends, totals, strict=True) if t >= B), 0.0)
    last = next((e for e, t in zip(ends, totals, strict=True) if t >= sum(samples) // B * B), 0.0)
    assert sum(times) == pytest.approx(last - first if times else 0.0, abs=1e-9)


def test_a_gradient_that_softsync_collects_is_of_the_version_made_next() -> None:
    """Its push ends before there is one: of each two, rank 1's makes the version."""
    records = []
    for k in range(6):
        collected = record(0, k + 1, 0, 2.0 * k, admitted_at=2.0 * k + 1.5)
        records += [collected, record(1, k + 1, k + 1, 2.0 * k, sources=2, admitted_at=2.0 * k + 1.8)]
    assert version_times(records) == {k + 1: (2.0 * k + 2.0, B) for k in range(6)}
    report = report_of(records)
    assert report.iteration_seconds.median == pytest.approx(ROUND_SECONDS)
    assert report.short_rounds == 0
    assert [point.samples for point in report.loss] == [B * (k + 1) for k in range(6)]


@pytest.mark.parametrize(
    ("policy", "short"), [("bsp", 1), ("hps", 1), ("backup", None), ("quorum", None), ("softsync", None)]
)
def test_a_round_is_short_where_it_waits_for_all(policy: str, short: int | None) -> None:
    """Rank 1 is not in the second of three rounds."""
    records = [record(rank, k + 1, k + 1, 2.0 * k, sources=2 - (k == 1)) for k in range(3) for rank in (0, 1)]
    del records[3]
    setup = msgspec.structs.replace(SETUP, policy=policy)
    report = make_report(setup, records, [], StoreTotals(), "finished")
    assert (report.short_rounds, report.short_versions) == (short, [2] if short else [])
    said = "1 of 3 rounds (version 2) had fewer samples than the global batch of 10"
    assert [line.startswith(said) for line in absences(report)] == [True] * bool(short)


def test_a_round_is_not_short_by_the_record_that_a_killed_worker_did_not_write() -> None:
    """Its gradient is in the parameters, as the other's record says: two sources."""
    records = [record(rank, k + 1, k + 1, 2.0 * k, sources=2) for k in range(3) for rank in (0, 1)]
    del records[3]
    report = report_of(records)
    assert (report.short_rounds, list(absences(report))) == (0, [])


@pytest.mark.parametrize(
    ("policy", "plan", "short"), [("bsp", 0, 2), ("bsp", 1, None), ("hps", 0, None), ("hps", 1, None)]
)
def test_a_hosts_part_of_a_round_is_not_short_by_what_others_got(
    policy: str, plan: int, short: int | None
) -> None:
    """A re-plan, or hps in each round, gives samples of its ranks to those of another host."""
    records = [
        record(rank, k + 1, k + 1, 2.0 * k, sources=2, samples=B // 2 - (k > 0), plan=plan * (k > 0))
        for k in range(4)
        for rank in (0, 1)
    ]
    for ranks, found in (([0, 1], short), (None, 2)):
        setup = msgspec.structs.replace(SETUP, policy=policy, options={"ranks": ranks})
        assert make_report(setup, records, [], StoreTotals(), "finished").short_rounds == found


def test_skipped_and_rejected_steps_are_not_in_the_versions() -> None:
    records = [
        *rounds(2),
        record(0, 3, 2, 4.0, rejected=True),
        record(1, 3, 0, 4.0, skipped=True),
    ]
    assert version_times(records) == {1: (2.0, B), 2: (4.0, B)}


def test_a_stopped_worker_was_away_and_its_transfer_was_not_slow() -> None:
    """Rank 1 is stopped in its push of round 6 and is fenced; rank 0 trains on."""
    stopped = [("compute", 12.0, 13.0), ("push", 13.0, 31.0)]
    away = [record(0, k, k, 2.0 * k, spans=[("compute", 2.0 * k - 2, 2.0 * k)]) for k in range(7, 17)]
    report = report_of([*rounds(6), record(1, 7, 6, 31.0, spans=stopped, rejected=True, fenced=True), *away])
    usual = report_of(rounds(6)).ranks[1]
    fenced = report.ranks[1]
    assert (fenced.fenced, fenced.push) == (1, usual.push)
    assert fenced.absent_seconds == pytest.approx(20.0)
    assert [*absences(report)] == [
        f"rank 1 ({fenced.name}) was absent for 20.0 s while others trained; "
        "it missed a deadline, and its samples went to others"
    ]


def test_phases_idle_share_and_ratio() -> None:
    report = report_of(rounds(5))
    slow, fast = report.ranks
    assert slow.compute.median == pytest.approx(1.5)
    assert slow.push.median == pytest.approx(0.25)
    assert slow.pull.mean == pytest.approx(0.1)
    assert slow.wait.median == pytest.approx(0.15)
    assert fast.idle_share == pytest.approx(0.65 / 2.0)
    assert report.idle_share == pytest.approx((0.15 + 0.65) / 4.0)
    assert report.iteration_seconds.median == pytest.approx(ROUND_SECONDS)
    assert report.measured_over_predicted == pytest.approx(ROUND_SECONDS / PREDICTED_SECONDS)
    assert (report.versions, report.samples.trained) == (5, 50)


def test_what_overlaps_compute_does_not_hold_the_rank_up() -> None:
    """A transfer took 1.6 s, most of it a wait for the round, while the training thread waited for 0.1 s."""
    own = [("wait", 0.0, 0.0), ("wait", 0.0, 0.1), ("compute", 0.1, 1.0)]
    travels = [("push", 1.0, 1.2), ("wait", 1.2, 2.4), ("pull", 2.4, 2.6)]
    report = report_of([record(0, 2, 1, 0.0, depth=2, spans=[*own, *travels])])
    rank = report.ranks[0]
    found = [d.mean for d in (rank.compute, rank.push, rank.pull, rank.wait, rank.overlapped)]
    assert found == pytest.approx([0.9, 0.0, 0.0, 0.1, 0.4])
    assert rank.idle_share == pytest.approx(0.1)


def test_waiting_for_all_to_join_is_not_idleness() -> None:
    late = [record(0, 1, 1, 0.0, spans=[("wait", -30.0, 0.0), ("compute", 0.0, 2.0)])]
    assert without_startup_wait(late)[0].spans == [("compute", 0.0, 2.0)]
    assert report_of(late).idle_share == 0.0


def test_a_later_process_may_have_a_smaller_pid_or_the_same() -> None:
    """After a reboot, or in a container. Each waits for the others before its first step."""
    wide, narrow = Mode(), Mode(push="int8")
    records = [record(0, 1, 1, 0.0, mode=wide, pid=9), record(0, 2, 2, 2.0, mode=narrow, pid=9)]
    for k, pid in enumerate((4, 9)):
        begin = 30.0 * (k + 1)
        spans: list[Span] = [("wait", begin - 20.0, begin), ("compute", begin, begin + 2.0)]
        records.append(record(0, 1, 3 + k, begin, mode=narrow, pid=pid, spans=spans))
    report = report_of(records[::-1])
    assert report.idle_share == pytest.approx(0.3 / 8.0)
    assert [line.partition(":")[0] for line in report.replans] == ["rank 0's transfers from step 2"]


def test_the_stores_counters_go_before_the_records() -> None:
    """The last record of a killed worker may be missing although its gradient was taken."""
    totals = StoreTotals(versions=6, dropped=0, samples=(42, 18), skipped=(0, 0), returned=(7, 0))
    report = report_of(rounds(5), totals)
    assert report.samples.trained == 60
    assert report.samples.returned == 7
    assert report.versions == 6


def test_one_hosts_samples_are_told_from_the_runs() -> None:
    """The versions are the whole run's."""
    report = report_of(
        rounds(5), StoreTotals(6, 0, samples=(42, 18, 30), skipped=(0,) * 3, returned=(0,) * 3)
    )
    assert any(line.startswith("60 samples here, of 90 in 6 versions: ") for line in summary(report))
    alone = report_of(rounds(5), StoreTotals(6, 0, samples=(42, 18), skipped=(0, 0), returned=(0, 0)))
    assert any(line.startswith("60 samples in 6 versions: ") for line in summary(alone))


def test_the_time_between_two_parts_of_a_run_is_no_training() -> None:
    """Also not what ended the first part, and the start of the next, which may train nothing."""
    later = [
        msgspec.structs.replace(r, spans=[(kind, b + 100.0, e + 100.0) for kind, b, e in r.spans])
        for r in rounds(5)
    ]
    events = [
        RunEvent("started", 1.0, 0.0, 0, 100),
        RunEvent("ended", 40.0, 0.0),
        RunEvent("resumed", 60.0, 0.0),
        RunEvent("ended", 70.0, 0.0),
        RunEvent("resumed", 80.0, 0.0),
    ]
    once = report_of(rounds(5)).training_seconds
    assert report_of([*rounds(5), *later], events=events).training_seconds == pytest.approx(2 * once)


def test_processes_and_restarts() -> None:
    events = [
        RunEvent("started", 1.0, 0.0, 0, 100),
        RunEvent("started", 1.5, 0.0, 1, 101),
        RunEvent("died", 2.0, 0.0, 1, 101, detail="killed by SIGKILL"),
        RunEvent("restarted", 3.0, 0.0, 1, 102),
        RunEvent("undone", 4.0, 0.0, version=10, pushes=7),
        RunEvent("undone", 5.0, 0.0, version=20, pushes=3),
        RunEvent("ended", 9.0, 0.0),
    ]
    report = report_of(rounds(3), events=events)
    assert (report.restarts, report.undone) == (1, 10)
    assert [rank.processes for rank in report.ranks] == [1, 2]
    assert report.wall_seconds == pytest.approx(8.0)


def test_a_run_that_never_began() -> None:
    report = report_of([])
    assert list(summary(report)) == ["trained 0 of 100 samples: the script left its loop before the end"]
    assert report.iteration_seconds == distribution([])
    assert report.measured_over_predicted is None
    assert report.samples.trained == 0


def test_written_and_read_again(tmp_path: Path) -> None:
    report = report_of(rounds(4))
    write_json(tmp_path / "report.json", report)
    assert read_report(tmp_path / "report.json") == report


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "outcome"),
        ('{"schema": "pyps.report/1"}', "pyps.report/1.1"),
        ('{"schema": "pyps.report/2"}', "pyps.report"),
        ("{", "truncated"),
    ],
)
def test_damaged_reports_are_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_report(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


def test_a_missing_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_report(tmp_path / "report.json")


def test_what_the_table_does_not_say() -> None:
    assert next(iter(summary(report_of(rounds(1))))).startswith("too short")
    fine = list(summary(report_of(rounds(5))))
    assert fine[0].startswith("iteration 2000.0 ms (2000.0 to 2000.0), 1.25 times the predicted")
    busy = [msgspec.structs.replace(r, overrun_seconds=0.3) for r in rounds(5)]
    assert any("too busy" in line for line in summary(report_of(busy)))
    assert not any("too busy" in line for line in fine)


@pytest.mark.parametrize(
    ("data", "loader", "workers", "says"),
    [
        (0.002, 0.039, 2, ""),
        (0.0009, 0.0009, 0, ""),  # less than a loader process would cost
        (0.08, 0.0, 0, ""),  # tensors in memory
        (0.08, 0.08, 0, "use batches(..., num_workers=2)"),
        (0.04, 0.08, 2, "its 2 loader processes need 80.0 ms a step, its compute 40.0 ms; use num_workers=4"),
        (0.02, 0.03, 2, "raise batches(..., prefetch=2)"),
        (0.02, 0.005, 2, "load a step in 10.0 ms in all, less than the wait: use num_workers=0"),
    ],
)
def test_a_slow_loader_is_named_with_what_to_change(
    data: float, loader: float, workers: int, says: str
) -> None:
    records, compute = [], 0.04 if data > 0.001 else 0.004
    for step in range(4):
        spans: list[Span] = [("data", step, step + data), ("compute", step + data, step + data + compute)]
        made = make_record(0, step, 8, spans)
        records.append(msgspec.structs.replace(made, loader_seconds=loader, loader_workers=workers))
    advice = loading_advice(rank_report(RankSpec(0, "old", 8), records, [], StoreTotals(), (0.0, 1.0)))
    assert says in advice
    assert bool(says) == advice.startswith(f"rank 0 (old) waits {data * 1e3:.1f} ms a step for data")


@pytest.mark.parametrize(
    ("ratio", "predicted", "transfer", "says"),
    [
        (1.9, 0.01, 0.0, ""),
        (
            2.1,
            0.01,
            0.0,
            "rank 0 (old) computes 40.0 ms a step, where the plan has 10.0 ms: profile it again",
        ),
        (
            0.4,
            0.16,
            0.0,
            "rank 0 (old) computes 40.0 ms a step, where the plan has 160.0 ms: profile it again",
        ),
        (
            2.1,
            0.04,
            0.05,
            "rank 0 (old) pushes and pulls for 50.0 ms a step: state the bandwidth and latency",
        ),
        (2.1, 0.04, 0.01, ""),
        (None, None, 0.0, ""),
    ],
)
def test_a_run_far_from_its_prediction_says_what_to_measure(
    ratio: float | None, predicted: float | None, transfer: float, says: str
) -> None:
    spans: list[Span] = [("compute", 0.0, 0.04), ("push", 0.04, 0.04 + transfer)]
    records = [make_record(0, step, 8, spans) for step in range(4)]
    setup = RankSpec(0, "old", 8, predicted_seconds=predicted, compute_seconds=predicted)
    rank = rank_report(setup, records, [], StoreTotals(), (0.0, 1.0))
    advice = list(prediction_advice(ratio, [setup], [rank]))
    assert [line.startswith(says) for line in advice] == [True] * bool(says)


@pytest.mark.parametrize(
    ("planned_link", "transfer", "says"),
    [
        (0.15, 0.15, []),
        (0.05, 0.35, ["350.0 ms a step, where the plan has 50.0 ms: state"]),
        (0.35, 0.05, ["50.0 ms a step, where the plan has 350.0 ms: state"]),
    ],
)
def test_planned_transfers_are_no_compute_that_is_missing(
    planned_link: float, transfer: float, says: list[str]
) -> None:
    """A step's prediction has its transfers: its compute alone is compared with that of the plan."""
    spans: list[Span] = [("compute", 0.0, 0.04), ("push", 0.04, 0.04 + transfer)]
    records = [make_record(0, step, 8, spans) for step in range(4)]
    setup = RankSpec(0, "old", 8, 0.04 + planned_link, compute_seconds=0.04, link_seconds=planned_link)
    rank = rank_report(setup, records, [], StoreTotals(), (0.0, 1.0))
    for ratio in (0.4, 2.1):
        advice = list(prediction_advice(ratio, [setup], [rank]))
        assert [line.split(" for ")[1].split(" the bandwidth")[0] for line in advice] == says


def test_gaps_are_compared_while_the_batches_are_those_planned() -> None:
    """After a re-plan the store finds gaps of its own."""
    schedule = TurnSchedule((0, 1), (1.0, 1.0), 2.0)
    at, pushes = 1.0, []
    for version in range(1, 13):
        at += 1.0 if version <= 6 else 1.5
        of = record((version - 1) % 2, version, version, at)
        pushes.append(msgspec.structs.replace(of, admitted_at=at, plan=int(version > 6)))
    found = turns_report(schedule, pushes)
    assert (found.turns, found.out_of_order) == (11, 0)
    assert (found.gap_seconds, found.gap_deviation, found.period_seconds) == (1.0, 0.0, 2.0)
    assert turns_report(schedule, pushes[6:]).gap_seconds == 1.5, "a run that begins with another plan"


def test_a_starved_cpu_is_named_as_the_cause() -> None:
    """Not the number of loader processes alone, which would be fewer or more of the same."""
    spans: list[Span] = [("data", 0.0, 0.02), ("compute", 0.02, 0.06)]
    record = msgspec.structs.replace(make_record(0, 0, 8, spans), loader_seconds=0.005, loader_workers=2)
    rank = rank_report(RankSpec(0, "old", 8), [record], [], StoreTotals(), (0.0, 1.0))
    assert "num_workers=0" in loading_advice(rank, crowding(make_setup({0: 8}, cpus=3), [rank]))
    crowd = crowding(make_setup({0: 8}, cpus=2), [rank])
    assert crowd == "3 processes share 2 CPU cores"
    advice = loading_advice(rank, crowd)
    assert advice.startswith(f"rank 0 (old) waits 20.0 ms a step for data: {crowd}; use fewer")


def test_pauses_are_not_absences() -> None:
    """A run stopped at 3 s and resumed at 100 s; rank 1 was away from 1 s to 3 s, and from 101 s to 102 s."""
    begins = {0: (0.0, 1.0, 2.0, 101.0, 102.0), 1: (0.0, 102.0)}
    records = [make_record(k, 0, 4, [("compute", t, t + 1.0)]) for k in begins for t in begins[k]]
    paused = pauses(records, [100.0])
    assert paused == [(3.0, 101.0)]
    assert between(0.0, 103.0, paused) == 5.0
    mine = [r for r in records if r.rank == 1]
    assert absent_seconds(mine, 0.0, 103.0) == 101.0
    assert absent_seconds(mine, 0.0, 103.0, paused) == 0.0  # three seconds are as a gap of its steps


def test_a_rank_that_died_is_in_the_terminals_summary() -> None:
    died = RunEvent("died", 1.0, 1.0, rank=1, pid=3, detail="killed by SIGKILL")
    report = make_report(make_setup({0: 4, 1: 4}), rounds(5), [died], StoreTotals(), "finished")
    assert "rank 1 (device-1) died: killed by SIGKILL" in list(summary(report))


@pytest.mark.parametrize(
    ("late", "seconds", "kind"),
    [(7, 1.0, "static straggler by version"), (1, 4.0, "static straggler by time")],
)
def test_static_stragglers_are_named(late: int, seconds: float, kind: str) -> None:
    (line,) = stragglers_of([(1, 1.0)] * 30, [(late, seconds)] * 30)
    assert line.startswith(f"rank 1 (w1): {kind}: its gradients are {late}.0 versions late")


def test_dynamic_stragglers_are_named() -> None:
    usual = [(1, 1.0)] * 30
    (line,) = stragglers_of(usual, [(1, 1.0)] * 27 + [(9, 5.0)] * 3)
    assert line.startswith("rank 1 (w1): dynamic straggler by version and time")
    assert not stragglers_of(usual, [(1, 5.0), *usual]), "a slow first step"
    assert not stragglers_of(usual, usual)


def stragglers_of(*ranks: list[tuple[int, float]]) -> list[str]:
    """Return the stragglers of a run whose ranks took steps of so many versions' staleness and seconds."""
    records = {
        rank: [
            msgspec.structs.replace(
                make_record(rank, k + 1, 5, [("compute", 0.0, seconds)]), staleness=versions
            )
            for k, (versions, seconds) in enumerate(steps)
        ]
        for rank, steps in enumerate(ranks)
    }
    return [*straggler_lines([RankSpec(k, f"w{k}", 5) for k in records], records)]
