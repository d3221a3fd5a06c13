"""pyps.report.live and activity: rates, losses and stalls, from records whose answers are known.

Every view of a run shows the same figures.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from run_tools import make_record, make_setup
from test_page import CLOCK, make_run, setup_of, steps

from pyps.cli.progress import figures
from pyps.cli.top import heading
from pyps.formats.records import StepRecord
from pyps.native.status import Member, MemberState, PushCounts, Status, WaitKind
from pyps.native.values import Role
from pyps.report.live import LiveRun, Tracker
from pyps.report.page import limit
from pyps.report.run_data import load_run
from pyps.report.steps import PHASES
from pyps.report.top import StoreTop
from pyps.store import Store
from pyps.store.activity import StoreActivity, activities, explain

BATCHES = (7, 3)
B = sum(BATCHES)
NAMES = {0: "slow", 1: "fast"}
SETUP = make_setup(dict(enumerate(BATCHES)), ("slow", "fast"), samples=200, predicted_iteration_seconds=1.6)


def rounds(first: int, count: int, seconds: float = 2.0) -> list[StepRecord]:
    """Rounds k from `first` on, that end at `seconds` times k + 1; the loss of round k is 10 / (k + 1)."""
    found = []
    for k in range(first, first + count):
        for rank in (0, 1):
            begin = seconds * k
            spans = [("compute", begin, begin + 1.0), ("wait", begin + 1.0, begin + seconds)]
            found.append(make_record(rank, k + 1, BATCHES[rank], spans, 10.0 / (k + 1)))  # type: ignore[arg-type]
    return found


def member(rank: int, **changes: object) -> Member:
    common = {"id": rank + 1, "state": MemberState.ACTIVE, "role": Role.WORKER, "rank": rank, "pid": 0}
    numbers = dict.fromkeys(
        ("clock", "pulled_version", "claim_first", "claim_count", "bytes_pushed", "bytes_pulled"), 0
    )
    times = ("joined_seconds", "waited_seconds", "wait_seconds", "claim_seconds", "step_seconds")
    rest = {"staged": False, "waits_for": WaitKind.NOT, **dict.fromkeys(times, 0.0)}
    return Member(**{**common, **numbers, **rest, **changes})  # type: ignore[arg-type]


def state(*members: Member, samples: tuple[int, ...] = (0, 0), all_joined: bool = True) -> StoreActivity:
    status = Status(9, 5, 5, 0, sum(samples), 0, len(members), all_joined)
    ranks = tuple(PushCounts(b, 5, n, 0, 0, 0, 0) for b, n in zip(BATCHES, samples, strict=True))
    return StoreActivity(status, members, ranks)


COMPUTES = member(0, claim_count=7, claim_seconds=13.2, step_seconds=1.0)
WAITS = member(1, staged=True, waits_for=WaitKind.ROUND, wait_seconds=12.0)


def test_a_run_that_goes_on_is_measured_from_then_on() -> None:
    """Its earlier steps count, but not the time since them."""
    tracker = Tracker(SETUP, 500.0)
    now = tracker.update(rounds(0, 6), None, now=505.0)
    assert (now.samples, now.iteration_seconds, now.samples_per_second, now.loss) == (60, None, None, None)
    assert not now.stalled
    now = tracker.update(rounds(251, 3), None, now=508.0)
    assert now.samples == 90
    assert now.iteration_seconds == pytest.approx(2.0)


def test_the_first_rate_is_of_whole_rounds() -> None:
    """The ranks of a round end one after another."""
    later = [
        msgspec.structs.replace(r, spans=[(kind, b, e + 0.01 * r.rank) for kind, b, e in r.spans])
        for r in rounds(0, 2)
    ]
    tracker = Tracker(SETUP, 0.0)
    assert tracker.update(later[:3], None, now=4.0).iteration_seconds is None
    assert tracker.update(later[3:], None, now=4.1).iteration_seconds == pytest.approx(2.0)


def test_the_rate_of_a_run_that_has_ended_stays() -> None:
    tracker = Tracker(SETUP, 0.0)
    assert tracker.update(rounds(0, 6), None, now=60.0).stalled
    stopped = tracker.update([], None, now=60.0, ended=True)
    assert stopped.iteration_seconds == pytest.approx(2.0)
    assert not stopped.stalled
    done = tracker.update(rounds(6, 14), None, now=100.0)
    assert done.samples == done.requested
    assert done.iteration_seconds == pytest.approx(2.0)


def test_rate_loss_and_what_is_left() -> None:
    now: LiveRun = Tracker(SETUP, 0.0).update(rounds(0, 6), None, now=12.0)
    assert (now.samples, now.requested, now.iterations, now.versions) == (60, 200, 6, 6)
    assert now.samples_per_second == pytest.approx(B / 2.0)
    assert now.iteration_seconds == pytest.approx(2.0)
    assert now.eta_seconds == pytest.approx(140 / (B / 2.0))
    assert now.loss == pytest.approx(10.0 / 6)
    assert now.ranks[1].phases["wait"] == pytest.approx(1.0)
    assert now.ranks[0].idle_share == pytest.approx(0.5)
    assert not now.stalled


def test_rates_are_of_the_last_seconds() -> None:
    tracker = Tracker(msgspec.structs.replace(SETUP, samples=0), 0.0)
    tracker.update(rounds(0, 40, seconds=0.5), None, now=20.0)
    late = [
        msgspec.structs.replace(
            r, spans=[(k, b + 20.0, e + 20.0) for k, b, e in r.spans], version=r.version + 40
        )
        for r in rounds(0, 10, seconds=4.0)
    ]
    now = tracker.update(late, None, now=60.0)
    assert now.iteration_seconds == pytest.approx(4.0)
    assert now.samples == 500


def test_nothing_is_known_before_the_first_step() -> None:
    now = Tracker(SETUP, 0.0).update([], None, now=100.0)
    assert (now.samples, now.loss, now.samples_per_second, now.eta_seconds, now.stalled) == (
        0,
        None,
        None,
        None,
        "",
    )


def test_rejected_and_skipped_steps_do_not_count() -> None:
    kept = rounds(0, 3)
    lost = [msgspec.structs.replace(r, rejected=True) for r in rounds(3, 1)]
    lost += [msgspec.structs.replace(r, skipped=True) for r in rounds(4, 1)]
    assert Tracker(SETUP, 0.0).update(kept + lost, None, now=10.0).samples == 30


def test_samples_of_other_hosts_are_counted_by_the_store() -> None:
    here = msgspec.structs.replace(SETUP, ranks=SETUP.ranks[:1])
    tracker = Tracker(here, 0.0)
    for k in range(1, 7):
        counted = state(member(0), member(1), samples=(7 * k, 3 * k))
        now = tracker.update([r for r in rounds(k - 1, 1) if r.rank == 0], counted, now=2.0 * k)
    assert now.samples == 60
    assert now.iteration_seconds == pytest.approx(2.0)


def test_a_stall_lowers_the_rate_bit_by_bit() -> None:
    tracker = Tracker(msgspec.structs.replace(SETUP, samples=0), 0.0)
    tracker.update(rounds(0, 40, seconds=0.5), None, now=20.0)
    rates = [tracker.update([], None, now=20.0 + k).samples_per_second or 0.0 for k in range(30)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(20.0)
    assert rates[-1] == pytest.approx(390 / (19.5 + 29.0))


def test_a_killed_workers_last_record_may_be_missing() -> None:
    now = Tracker(SETUP, 0.0).update(rounds(0, 2), state(member(0), samples=(21, 6)), now=4.0)
    assert now.samples == 27


def test_a_stalled_run_says_who_waits_for_whom() -> None:
    tracker = Tracker(SETUP, 0.0)
    tracker.update(rounds(0, 6), state(COMPUTES, WAITS), now=12.0)
    assert tracker.update([], state(COMPUTES, WAITS), now=20.0).stalled == ""
    assert tracker.update([], state(COMPUTES, WAITS), now=25.0).stalled == (
        "no step for 13 s: rank 0 (slow) has been computing for 13.2 s; rank 1 waits for the round"
    )
    assert tracker.update(rounds(12, 1), state(COMPUTES, WAITS), now=26.0).stalled == ""


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((COMPUTES, WAITS), "rank 0 (slow) has been computing for 13.2 s; rank 1 waits for the round"),
        ((member(0, state=MemberState.DEAD), WAITS), "rank 0 (slow) is dead; rank 1 waits for the round"),
        ((WAITS,), "rank 0 (slow) is away: it has left or died; rank 1 waits for the round"),
        (
            (member(0, waits_for=WaitKind.TURN), member(1, state=MemberState.FENCED)),
            "rank 1 (fast) is fenced; rank 0 waits for its turn",
        ),
        (
            (member(0, waits_for=WaitKind.START), member(1, waits_for=WaitKind.START)),
            "ranks 0 and 1 wait to start",
        ),
    ],
)
def test_reasons(members: tuple[Member, ...], expected: str) -> None:
    assert explain(activities(state(*members)), NAMES) == expected


def test_a_straggler_is_late_by_its_own_measure_and_waited_for() -> None:
    assert [a.straggler for a in activities(state(COMPUTES, WAITS))] == [True, False]
    usual = member(0, claim_count=7, claim_seconds=1.5, step_seconds=1.0)
    assert not any(a.straggler for a in activities(state(usual, WAITS)))
    assert not any(a.straggler for a in activities(state(COMPUTES, member(1, claim_count=3))))


def test_a_rank_that_joined_again_is_its_newest_member() -> None:
    again = member(0, id=9, claim_count=7, claim_seconds=0.1, step_seconds=1.0)
    found = activities(state(member(0, state=MemberState.DEAD), again, WAITS))
    assert found[0].doing == "computing"


def eventful() -> list[StepRecord]:
    """A run with a step that was skipped, one that was fenced, gradients that were late, and no even pace."""
    found = []
    for record in steps(30):
        late = 0.01 * (record.step % 7)
        spans = [(k, b + late * (k == "push"), e + late * (k == "push")) for k, b, e in record.spans]
        key, changes = (record.step, record.rank), {"spans": spans, "staleness": record.step % 3}
        changes |= {(5, 1): {"skipped": True}, (9, 0): {"rejected": True, "fenced": True}}.get(key, {})
        found.append(msgspec.structs.replace(record, **changes))
    return found


def test_every_view_of_a_run_shows_the_same_figures(shm: Path, tmp_path: Path) -> None:
    setup = setup_of(store="viewed", samples=1000, predicted_iteration_seconds=0.1)
    folder = make_run(tmp_path / "run", eventful(), setup)
    run = load_run([folder])
    report = run.report
    now = Tracker(setup, CLOCK - 1.0).update(run.records, None, CLOCK + 4.0, run.events)
    with (
        Store.create("viewed", {"w": np.zeros(10)}, batches=[7, 3]),
        closing(StoreTop("viewed", folder)) as top,
    ):
        shown = top.look()
    for view in (now, shown.run):
        assert view.loss == pytest.approx(report.loss_last)
        assert view.iteration_seconds == pytest.approx(report.iteration_seconds.median)
        assert view.predicted_seconds == report.predicted_iteration_seconds
        assert (view.samples, view.versions) == (report.samples.trained, report.versions)
        assert (view.restarts, view.limit) == (report.restarts, limit(run))
        for rank, said in zip(view.ranks, report.ranks, strict=True):
            assert (rank.name, rank.batch, rank.samples, rank.steps) == (
                said.name,
                said.batch,
                said.samples,
                said.steps,
            )
            assert list(rank.phases.values()) == pytest.approx([getattr(said, p).mean for p in PHASES])
            assert rank.idle_share == pytest.approx(said.idle_share)
            assert rank.staleness == pytest.approx(said.staleness_mean)
    assert all(text in heading(shown).plain for text in figures(now) if "samples/s" not in text)
