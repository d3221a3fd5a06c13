"""A schedule of turns in the decision core, against a small model of the ring in Python."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.errors import InputError, InvalidArgument
from pyps.formats.plan import TurnSchedule
from pyps.native.core import Core
from pyps.native.decisions import EventKind
from pyps.native.status import MemberState
from pyps.native.values import Config, Hyper, Optimizer
from pyps.simulate import replay
from pyps.store import Store
from pyps.store.policies import ASP, BSP, R2SP, Policy

SECOND = 10**9
WAIT = 2
TOLERANCE = 0.05  # of the planned period: within it the planned gaps hold


class Ring:
    """Workers that compute for a constant time, push in their turn and pull at once, in virtual time.

    pushes: (rank, seconds) of each. seconds: of each worker's next step.
    """

    def __init__(
        self, schedule: TurnSchedule | None, seconds: list[float], policy: Policy | None = None
    ) -> None:
        chosen = policy or R2SP(patience=3.0)
        n = len(seconds)
        self.core = Core(
            Config((), (), (4,) * n, 1, Optimizer.SGD, chosen.number, 60.0, 0, 0, 0, 0, 2, chosen.params())
        )
        self.seconds, self.now = list(seconds), SECOND
        self.pushes: list[tuple[int, float]] = []
        self.ready: dict[int, int] = {}  # when each present worker's gradient is
        self.asked: dict[int, int] = {}  # when each waiting worker first asked for its turn
        self.counts, self.computed = [0] * n, [0] * n  # of each worker's step: samples, nanoseconds
        if schedule is not None:
            self.core.set_schedule(self.now, schedule)
        for k in range(n):
            self.join(k)
        for k in range(n):
            self.begin(k)

    def join(self, k: int) -> None:
        self.core.step(EventKind.JOIN, k, self.now, rank=k)

    def leave(self, k: int) -> None:
        self.core.step(EventKind.LEAVE, k, self.now, state=int(MemberState.LEFT))
        self.ready.pop(k, None)
        self.asked.pop(k, None)

    def begin(self, k: int) -> None:
        self.counts[k] = self.core.step(EventKind.START, k, self.now).count
        self.computed[k] = round(self.seconds[k] * SECOND)
        self.ready[k] = self.now + self.computed[k]

    def push(self, k: int) -> bool:
        """Return whether it is worker k's turn; then it pushes, pulls and begins its next step."""
        since = self.asked.setdefault(k, self.now)
        for _ in range(3):  # a skipped worker is asked again
            d = self.core.push(k, self.now, 0, self.counts[k], self.computed[k], 0.0, 0, self.now - since)
            if d.verdict != WAIT or d.at > self.now or not d.at:
                break
        if d.verdict == WAIT:
            self.wake = min(self.wake, d.at) if d.at > self.now else self.wake
            return False
        self.pushes.append((k, self.now / SECOND))
        del self.asked[k], self.ready[k]
        self.core.pull(k, self.now, d.version)
        self.begin(k)
        return True

    def until(self, count: int) -> None:
        """Go on until so many pushes have been taken."""
        for _ in range(100 * count):
            if len(self.pushes) >= count:
                return
            self.wake = 2**63
            if any(self.push(k) for k in sorted(self.ready) if self.ready[k] <= self.now):
                continue
            due = self.core.last.next_deadline
            later = [at for at in self.ready.values() if at > self.now]
            if due and due <= self.now:
                before = due
                self.core.step(EventKind.TICK, 0, self.now, waited=0)
                assert self.core.last.next_deadline != before, "a tick that does nothing"
                continue
            self.now = min([*later, self.wake, due or 2**63])
        raise AssertionError(f"{len(self.pushes)} of {count} pushes: the ring stands still")

    def gaps(self, last: int) -> list[float]:
        return [b - a for (_, a), (_, b) in pairwise(self.pushes[-last:])]


def even(order: list[int], period: float) -> TurnSchedule:
    return TurnSchedule(tuple(order), (period / len(order),) * len(order), period)


@st.composite
def rings(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """An order, and each rank's seconds of a step."""
    n = draw(st.integers(2, 6))
    return draw(st.permutations(range(n))), draw(st.lists(st.floats(0.05, 1.0), min_size=n, max_size=n))


@settings(max_examples=examples(18, 60), deadline=None)
@given(ring=rings(), off=st.floats(0.2, 4.0))
def test_order_holds_and_gaps_follow_the_plan_while_measurements_agree(
    ring: tuple[list[int], list[float]], off: float
) -> None:
    order, seconds = ring
    n, slowest = len(order), max(seconds)
    drive = Ring(even(order, slowest * off), seconds)
    drive.until(12 * n)
    assert [k for k, _ in drive.pushes] == [order[k % n] for k in range(12 * n)]
    first, later = drive.gaps(12 * n)[: n - 1], drive.gaps(4 * n)
    planned = slowest * off / n
    assert all(gap >= planned * (1 - 1e-6) for gap in first), "the first cycle has the planned gaps"
    agrees = 1 - TOLERANCE <= 1 / off <= 1 + TOLERANCE
    expected = planned if agrees else slowest / n
    assert min(later) == pytest.approx(expected, rel=0.01)
    assert fmean(later) == pytest.approx(max(expected, slowest / n), rel=0.1)


@settings(max_examples=examples(12, 40), deadline=None)
@given(ring=rings(), slack=st.floats(1.0, 2.0))
def test_slack_divides_the_planned_gaps(ring: tuple[list[int], list[float]], slack: float) -> None:
    order, seconds = ring
    n, slowest = len(order), max(seconds)
    drive = Ring(even(order, slowest), seconds, R2SP(slack=slack, patience=3.0))
    drive.until(10 * n)
    assert [k for k, _ in drive.pushes] == [order[k % n] for k in range(10 * n)]
    assert min(drive.gaps(6 * n)) >= 0.99 * slowest / n / slack  # a worker that is ready later comes later
    assert drive.pushes[-1][1] - drive.pushes[-1 - n][1] == pytest.approx(slowest, rel=0.01)


def passes_over(order: list[int], present: set[int], before: int, after: int) -> bool:
    """Return whether `after` is the next of those present in the ring."""
    n, place = len(order), order.index(before)
    return next(order[(place + k) % n] for k in range(1, n + 1) if order[(place + k) % n] in present) == after


@settings(max_examples=examples(12, 40), deadline=None)
@given(ring=rings(), data=st.data())
def test_present_workers_keep_the_order_while_others_come_and_go(
    ring: tuple[list[int], list[float]], data: st.DataObject
) -> None:
    order, seconds = ring
    drive = Ring(even(order, max(seconds)), seconds, R2SP(patience=1e6))
    present = set(order)
    for _ in range(6):
        drive.until(len(drive.pushes) + 1)
        count = len(drive.pushes)
        drive.until(count + 3 * len(present))
        ranks = [k for k, _ in drive.pushes[count - 1 :]]
        assert all(passes_over(order, present, a, b) for a, b in pairwise(ranks))
        k = data.draw(st.sampled_from(order))
        if k not in present:
            drive.join(k)
            drive.begin(k)
            present.add(k)
        elif len(present) > 1:
            drive.leave(k)
            present.remove(k)


def test_a_worker_that_is_away_leaves_its_share_of_the_cycle_to_the_others() -> None:
    drive = Ring(even([2, 0, 1, 3], 0.8), [0.8] * 4)
    drive.until(24)
    drive.leave(0)
    drive.until(60)
    assert drive.gaps(20) == pytest.approx([0.8 / 3] * 19, rel=0.01)
    drive.join(0)
    drive.begin(0)
    drive.until(100)
    assert drive.gaps(20) == pytest.approx([0.2] * 19, rel=0.01)
    assert [k for k, _ in drive.pushes[-8:]] in [
        [2, 0, 1, 3] * 2,
        [0, 1, 3, 2] * 2,
        [1, 3, 2, 0] * 2,
        [3, 2, 0, 1] * 2,
    ]


def test_a_late_worker_is_passed_over_and_comes_back_at_its_place() -> None:
    order = [1, 2, 0]
    drive = Ring(even(order, 0.3), [0.3] * 3)
    drive.until(15)
    drive.ready[2] = drive.now + 5 * SECOND
    drive.until(40)
    away = [k for k, _ in drive.pushes[18:30]]
    assert 2 not in away
    assert all(a != b for a, b in pairwise(away))
    drive.until(90)
    back = [k for k, _ in drive.pushes[-12:]]
    assert all(order[(order.index(a) + 1) % 3] == b for a, b in pairwise(back))
    assert drive.gaps(10) == pytest.approx([0.1] * 9, rel=0.01), "its time away is no cycle"


def test_a_slow_first_step_does_not_change_the_planned_gaps() -> None:
    drive = Ring(even([0, 1, 2], 0.3), [3.0] * 3)
    drive.seconds = [0.3] * 3
    drive.until(30)
    assert drive.gaps(26) == pytest.approx([0.1] * 25, rel=0.01)


def test_gaps_follow_a_worker_that_becomes_slower_and_then_faster() -> None:
    drive = Ring(even([1, 0], 0.2), [0.2, 0.2])
    drive.until(20)
    drive.seconds[0] = 0.4
    drive.until(120)
    assert fmean(drive.gaps(20)) == pytest.approx(0.2, rel=0.05)
    assert min(drive.gaps(20)) == pytest.approx(0.2, rel=0.1), "even, with the slower period"
    drive.seconds[0] = 0.2
    drive.until(420)
    assert drive.gaps(20) == pytest.approx([0.1] * 19, rel=0.01), "the planned ones again"


def test_uneven_gaps_keep_their_proportions() -> None:
    uneven = TurnSchedule((1, 0, 2), (0.3, 0.1, 0.2), 0.6)
    for period in (0.6, 0.3):
        drive = Ring(uneven, [period] * 3)
        drive.until(30)
        found = {k: b - a for (k, a), (_, b) in pairwise(drive.pushes[-10:])}
        gaps = {1: 0.3, 0: 0.1, 2: 0.2}
        assert found == pytest.approx({k: gap * period / 0.6 for k, gap in gaps.items()}, rel=0.01)


def test_a_replan_ends_the_planned_period_and_keeps_the_order() -> None:
    order = [2, 1, 0]
    drive = Ring(even(order, 0.3), [0.3] * 3)
    drive.until(18)
    drive.core.replan(drive.now, (4, 4, 4))
    drive.until(30)
    assert drive.gaps(9) == pytest.approx([0.1] * 8, rel=0.01), "the same batches change nothing"
    drive.core.replan(drive.now, (2, 4, 6))
    drive.seconds = [0.29] * 3
    drive.until(90)
    assert drive.gaps(9) == pytest.approx([0.29 / 3] * 8, rel=0.005), "measured, though within the tolerance"
    assert [k for k, _ in drive.pushes] == [order[k % 3] for k in range(90)]


def test_a_new_schedule_takes_over_at_once() -> None:
    drive = Ring(even([0, 1, 2], 0.3), [0.3] * 3)
    for order in ([2, 0, 1], [1, 0, 2], [0, 1, 2]):
        for more in (1, 2, 3):
            drive.until(len(drive.pushes) + more)
            before = len(drive.pushes)
            drive.core.set_schedule(drive.now, even(order, 0.3))
            drive.until(before + 7)
            assert [k for k, _ in drive.pushes[before:]] == [order[k % 3] for k in range(7)]


def test_without_a_schedule_ranks_take_turns_in_their_order() -> None:
    drive = Ring(None, [0.3, 0.2, 0.1])
    drive.until(30)
    assert [k for k, _ in drive.pushes] == [k % 3 for k in range(30)]
    assert drive.gaps(12) == pytest.approx([0.1] * 11, rel=0.01)


# What is refused.


@pytest.mark.parametrize(
    ("order", "gaps", "period"),
    [
        ((), (), 1.0),
        ((0, 0), (0.1, 0.1), 1.0),
        ((0, 2), (0.1, 0.1), 1.0),
        ((1, 0), (0.1,), 1.0),
        ((1, 0), (0.1, -0.1), 1.0),
        ((1, 0), (0.1, math.nan), 1.0),
        ((1, 0), (0.1, math.inf), 1.0),
        ((1, 0), (0.1, 0.1), 0.0),
        ((1, 0), (0.1, 0.1), math.nan),
        ((1, 0), (0.1, 0.1), 1e9),
    ],
)
def test_impossible_schedules_are_refused(
    order: tuple[int, ...], gaps: tuple[float, ...], period: float
) -> None:
    with pytest.raises(InputError, match="schedule"):
        TurnSchedule(order, gaps, period)


class Unchecked:
    """A schedule as a C caller may give it."""

    def __init__(self, order: tuple[int, ...], gaps: tuple[float, ...], period: float) -> None:
        self.order, self.gaps_seconds, self.period_seconds = order, gaps, period


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Unchecked((0, 0), (0.1, 0.1), 1.0), r"turns\[1\].rank: found 0 a second time"),
        (Unchecked((0, 7), (0.1, 0.1), 1.0), r"turns\[1\].rank: found 7; expected each of 0 to 1 once"),
        (Unchecked((0,), (0.1,), 1.0), "turns: found 1; expected one for each of 2 ranks"),
        (Unchecked((0, 1), (0.1, math.nan), 1.0), r"turns\[1\].gap_seconds: found nan"),
        (Unchecked((0, 1), (0.1, math.inf), 1.0), r"turns\[1\].gap_seconds: found inf"),
        (Unchecked((0, 1), (-0.1, 0.1), 1.0), r"turns\[0\].gap_seconds: found -0.1"),
        (Unchecked((0, 1), (0.1, 0.1), 0.0), "period_seconds: found 0"),
        (Unchecked((0, 1), (0.1, 0.1), math.nan), "period_seconds: found nan"),
    ],
)
def test_the_core_checks_a_schedule_itself(schedule: TurnSchedule, message: str, shm: Path) -> None:
    with (
        Store.create("checked", {"w": np.zeros(4)}, batches=[1, 1], policy="r2sp") as store,
        pytest.raises(InvalidArgument, match=message),
    ):
        store.set_schedule(schedule)


@pytest.mark.parametrize("policy", [ASP(), BSP()], ids=str)
def test_a_policy_without_turns_refuses_a_schedule(policy: Policy, shm: Path) -> None:
    with Store.create("none", {"w": np.zeros(4)}, batches=[1, 1], policy=policy) as store:
        assert (store.status().turn_rank, store.status().scheduled) == (-1, False)
        with pytest.raises(InvalidArgument, match=f"the policy {policy.name} has no turns"):
            store.set_schedule(even([1, 0], 0.2))


# In a store.


def test_a_store_that_has_grown_takes_turns_of_all_its_ranks(shm: Path) -> None:
    made = Store.create("grown", {"w": np.zeros(4)}, batches=[1, 1], policy="r2sp", max_participants=4)
    with made as first, Store.open("grown") as second, Store.open("grown") as third:
        first.set_schedule(even([1, 0], 0.2))
        for rank, store in enumerate((first, second, third)):
            store.join(rank, "new_worker" if rank == 2 else "worker")
        assert (first.status().ranks, first.status().scheduled) == (3, False), "without the new rank's turn"
        for order in ([1, 0], [3, 1, 0, 2], [4, 3, 1, 0, 2]):
            with pytest.raises(InvalidArgument, match="turns: found"):
                first.set_schedule(even(order, 0.2))
        first.set_schedule(even([1, 2, 0], 0.06))
        assert first.status().scheduled


def test_a_store_keeps_its_schedule_and_a_journal_decides_it_again(shm: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Store.create("ring", {"w": np.zeros(4)}, batches=[1, 1, 1], policy="r2sp") as first:
        first.journal(path)
        first.set_schedule(even([2, 0, 1], 0.06))
        status = first.status()
        assert (status.turn_rank, status.scheduled, status.period_nanoseconds) == (2, True, 60_000_000)
        stores = [first, Store.open("ring"), Store.open("ring")]
        for rank, store in enumerate(stores):
            store.journal(path)
            store.join(rank)
        times = []
        for store in stores:
            store.start()
        for k in range(9):
            store = stores[[2, 0, 1][k % 3]]
            result = store.push(store.stage(), 1, Hyper(lr=0.1))
            assert result.version == 1 + k
            times.append(result.admitted_at)
            store.pull()
            store.start()
        assert min(b - a for a, b in pairwise(times[:6])) >= 0.0199, "no cycle is measured yet"
        for store in stores[1:]:
            store.close()
    found = replay(path)
    assert (found.differences, found.missing_events) == (0, 0), found.first
    assert found.events > 12


def test_a_store_that_goes_on_from_a_state_keeps_the_turns(shm: Path) -> None:
    def push(store: Store) -> int:
        store.start()
        version = store.push(store.stage(), 1, Hyper(lr=0.1)).version
        store.pull()
        return version

    with Store.create("old", {"w": np.zeros(4)}, batches=[1, 1, 1], policy="r2sp") as old:
        old.set_schedule(TurnSchedule((2, 0, 1), (0.02, 0.03, 0.01), 0.06))
        stores = [old, Store.open("old"), Store.open("old")]
        for rank, store in enumerate(stores):
            store.join(rank)
        assert [push(stores[rank]) for rank in (2, 0, 1, 2)] == [1, 2, 3, 4]
        state = old.state()
        for store in stores[1:]:
            store.close()
    with Store.create("new", state.parameters, batches=[1, 1, 1], policy="r2sp", state=state) as new:
        status = new.status()
        assert (status.turn_rank, status.scheduled, status.period_nanoseconds) == (0, True, 60_000_000)
        assert new.state().header.ranks[0].turn_gap == 20_000_000
    long = replace(state.header.ranks[1], turn_gap=9 * SECOND)
    header = replace(state.header, ranks=(state.header.ranks[0], long, state.header.ranks[2]))
    with Store.create("long", state=replace(state, header=header)) as store:
        assert store.state().header.ranks[1].turn_gap == 9 * SECOND
    with Store.create("fewer", state.parameters, batches=[1, 1], policy="r2sp", state=state) as fewer:
        assert (fewer.status().turn_rank, fewer.status().scheduled) == (0, False)
    broken = replace(state.header.ranks[0], turn_rank=1)
    header = replace(state.header, ranks=(broken, *state.header.ranks[1:]))
    with pytest.raises(InvalidArgument, match="rank 2: turn_rank: found 1; expected each of 0 to 2 once"):
        Store.create(
            "broken", state.parameters, batches=[1, 1, 1], policy="r2sp", state=replace(state, header=header)
        )
