"""Rounds that close with a quorum after a grace, and late gradients that are merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from policy_drive import SECOND, Drive, orders, partition
from sampled import examples

from pyps.errors import TimedOut
from pyps.native.decisions import EventKind
from pyps.native.status import MemberState
from pyps.native.values import Hyper
from pyps.simulate import Fault, Scenario, SimWorker, simulate
from pyps.store import Store
from pyps.store.policies import Policy, Quorum

BATCHES = [4, 4, 4, 4]
ROUND = 10 * SECOND


class Timed(Drive):
    """Workers that begin and push at given times."""

    def at(self, now: int, k: int) -> None:
        self.now = now
        self.turn(k)

    def tick_at(self, now: int) -> None:
        self.now = now
        self.core.step(EventKind.TICK, 0, now, waited=0)
        self.see()

    def begin_all(self) -> None:
        for k in range(self.n):
            if k not in self.claims:
                self.start(k)

    def close(self) -> None:
        """The grace passes; all that may begin the next round."""
        self.tick_at(self.core.last.next_deadline)
        self.begin_all()


def all_but_one(grace: float, samples: int = 0) -> tuple[Timed, int]:
    """Four workers in their first round, of which three have pushed; when it was opened."""
    drive = Timed(Quorum(k=1, grace=grace), BATCHES, samples)
    opened = drive.now
    drive.begin_all()
    for k in (0, 1, 2):
        drive.at(opened + ROUND, k)
    return drive, opened


def test_a_round_closes_when_the_grace_has_passed() -> None:
    drive, opened = all_but_one(0.1)
    assert drive.round == 0
    due = drive.core.last.next_deadline
    assert due == pytest.approx(opened + 1.1 * ROUND, rel=0.001)
    drive.tick_at(due - 1)
    assert drive.round == 0
    drive.tick_at(due)
    assert drive.round == 1
    assert [(slot, samples) for slot, _, samples, _ in drive.sources[-1]] == [(0, 4), (1, 4), (2, 4)]


def test_one_that_comes_within_the_grace_is_in_the_round() -> None:
    drive, opened = all_but_one(0.1)
    drive.at(opened + ROUND + ROUND // 20, 3)
    assert [slot for slot, *_ in drive.sources[-1]] == [0, 1, 2, 3]


def test_late_work_is_merged_whole_and_once() -> None:
    """It takes part in the round that is open when it comes, and its worker in the round after that."""
    drive, opened = all_but_one(0.1, samples=60)
    late = drive.claims[3]
    drive.close()
    for k in (0, 1, 2):
        drive.at(opened + 3 * ROUND, k)
    drive.begin_all()
    assert drive.round == 2
    assert drive.claims[3] == late
    for k in (3, 0, 1, 2):
        drive.at(opened + 4 * ROUND, k)
    assert [(slot, samples, scale) for slot, _, samples, scale in drive.sources[-1]] == [
        (0, 4, 1.0), (1, 4, 1.0), (2, 4, 1.0), (3, 4, 1.0)
    ]  # fmt: skip
    assert drive.pushes[-4] == (3, 2, 1.0), "two versions late, at full weight"
    drive.begin_all()
    assert len(drive.claims) == 4
    drive.finish()
    assert partition(drive.trained) == [(0, 60)]


def test_a_worker_that_is_late_already_has_no_second_grace() -> None:
    drive, opened = all_but_one(0.5)
    drive.close()
    for k in (0, 1, 2):
        assert drive.round == 1
        drive.at(opened + 3 * ROUND, k)
    assert drive.round == 2, "closed by the push that made the quorum"


def test_one_that_comes_while_a_round_is_open_makes_it_wait_for_none() -> None:
    drive = Timed(Quorum(k=1, grace=0.0), BATCHES)
    drive.begin_all()
    for k in (0, 1, 2):
        drive.turn(k)
    drive.begin_all()
    assert (drive.round, sorted(drive.claims)) == (1, [0, 1, 2, 3])
    drive.core.step(EventKind.LEAVE, 0, drive.now, state=int(MemberState.DEAD))
    drive.core.step(EventKind.JOIN, 0, drive.now, rank=0)
    for k in (1, 2):
        drive.turn(k)
    assert drive.round == 2, "closed without the late worker, of which there is one"


def test_what_is_late_at_the_end_is_a_part_of_a_step() -> None:
    drive = Timed(Quorum(k=1, grace=0.0), BATCHES, samples=16)
    drive.begin_all()
    for k in (0, 1, 2, 3):
        drive.turn(k)
    assert [sum(source[2] for source in sources) for sources in drive.sources] == [12, 4]
    assert drive.core.last.part == 0.25


def test_others_take_over_what_a_late_worker_had_when_it_died() -> None:
    drive, _ = all_but_one(0.1, samples=60)
    first, count = drive.claims.pop(3)
    drive.close()
    drive.core.step(EventKind.LEAVE, 3, drive.now, state=int(MemberState.DEAD))
    drive.ended.add(3)
    drive.finish()
    assert (first, count) in drive.trained
    assert partition(drive.trained) == [(0, 60)]
    assert sum(samples for _, samples in drive.trained) == 60


@settings(max_examples=examples(10, 25), deadline=None)
@given(order=orders)
def test_every_sample_counts_once(order: list[int]) -> None:
    drive = Drive(Quorum(k=2), [5, 3, 2, 7], samples=150)
    for k in order:
        drive.turn(k)
    drive.finish()
    assert partition(drive.trained) == [(0, 150)]
    assert sum(source[2] for sources in drive.sources for source in sources) == 150


def test_a_store_closes_its_round_without_the_late_worker_and_merges_it_later(shm: Path) -> None:
    policy, sgd = Quorum(k=1, grace=0.05), Hyper(lr=1.0)
    with (
        Store.create("late", {"w": np.zeros(4)}, batches=[2, 2], policy=policy, samples=6) as first,
        Store.open("late") as second,
    ):
        stores = [first, second]
        for rank, store in enumerate(stores):
            store.join(rank)
        for store in stores:
            store.start()
            store.pull()

        def push(store: Store, value: float) -> int:
            staging = store.stage()
            staging.flat[:] = value
            return store.push(staging, 2, sgd).version

        assert push(first, -1.0) == 1
        assert first.start().count == 2
        first.pull()
        np.testing.assert_array_equal(first.pull()[0][:4], 1.0)
        assert push(first, -3.0) == 2, "no grace for the worker that is late already"
        assert push(second, -5.0) == 3
        np.testing.assert_array_equal(first.pull()[0][:4], 1.0 + 3.0 + 5.0)
        assert first.status().samples_assigned == 6


def test_a_push_that_wakes_after_the_next_round_reports_its_own(shm: Path) -> None:
    sgd, w = Hyper(lr=1.0), {"w": np.zeros(4)}
    with (
        Store.create("late", w, batches=[2, 2, 3], policy=Quorum(k=1, grace=0.0), samples=14) as first,
        Store.open("late") as second,
        Store.open("late") as third,
    ):
        for rank, store in enumerate((first, second, third)):
            store.join(rank)
        for store in (first, second, third):
            store.start()
        asleep = first.stage()
        with pytest.raises(TimedOut):
            first.push(asleep, 2, sgd, timeout=0.0)
        assert second.push(second.stage(), 2, sgd).sources == 2
        second.start()
        late = third.stage()
        with pytest.raises(TimedOut):
            third.push(late, 3, sgd, timeout=0.0)
        assert second.push(second.stage(), 2, sgd).version == 2
        woken = first.push(asleep, 2, sgd)
        assert (woken.version, woken.sources, woken.samples) == (1, 2, 4)
        found = third.push(late, 3, sgd)
        assert (found.version, found.sources, found.samples) == (2, 2, 5)


@pytest.mark.parametrize(("policy", "seconds"), [("bsp", 100.0), ("quorum:k=1,grace=0.1", 52.5)])
def test_rounds_go_on_while_a_worker_stands_still(policy: str | Policy, seconds: float) -> None:
    workers = tuple(SimWorker(f"w{k}", 10, lambda n: 0.1 * n) for k in range(4))
    scenario = Scenario(workers, faults=(Fault(rank=3, at=0.5, kind="stop", seconds=50.0),), local=True)
    result = simulate(scenario, policy, iterations=50, seed=0)
    assert result.samples == 2000
    assert result.rejected == result.aborted == result.fenced == 0
    assert result.seconds == pytest.approx(seconds, rel=0.3)
