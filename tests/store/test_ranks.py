"""Ranks that rest, that get samples again, and that join beyond the planned ones: the store's part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyps.errors import Ended, InvalidArgument, PlanChanged, PushRejected, StoreError, TimedOut
from pyps.native.status import MemberState
from pyps.native.values import CostModel, Hyper
from pyps.simulate.run import replay
from pyps.store.store import Store

POLICIES = (
    "bsp",
    "backup:k=1",
    "hps",
    "asp",
    "ssp:bound=1",
    "dssp:bound=1,extra=1",
    "r2sp",
    "softsync:n=1",
    "saps",
)
SAMPLES = 400
Claims = list[tuple[int, int]]


def make(name: str, policy: str = "bsp", samples: int = SAMPLES) -> Store:
    tensors = {"w": np.zeros(8, np.float32)}
    return Store.create(name, tensors, batches=[4, 4], policy=policy, samples=samples, max_participants=8)


def work(name: str, rank: int, role: str, trained: Claims, failed: list[BaseException]) -> None:
    try:
        with Store.open(name) as store:
            store.join(rank, role)  # type: ignore[arg-type]
            turns, out = store.policy_needs().uses_turns, np.empty(store.layout.flat_elements, np.float32)
            while True:
                claim, staging = store.start(60.0), store.stage(60.0)
                staging.flat[:] = 1.0
                trained.append((claim.first, claim.count))
                cost = {"cost_seconds": 0.01 * claim.count, "data_seconds": 0.002}
                try:
                    if turns:
                        store.exchange(staging, claim.count, Hyper(lr=0.1), out, **cost)
                    else:
                        store.push(staging, claim.count, Hyper(lr=0.1), **cost)
                except PushRejected:
                    trained.remove((claim.first, claim.count))
    except Ended:
        pass
    except BaseException as error:
        failed.append(error)


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_come_and_rest_and_every_sample_is_trained_once(policy: str, shm: Path, tmp_path: Path) -> None:
    trained: Claims = []
    failed: list[BaseException] = []
    with make("grow", policy) as watched, Store.open("grow") as planner:
        planner.journal(tmp_path / "journal")
        planner.join(role="observer")
        threads = [
            threading.Thread(target=work, args=("grow", rank, role, trained, failed))
            for rank, role in enumerate(("worker", "worker", "new_worker"))
        ]
        for thread in threads[:2]:
            thread.start()
        until(lambda: planner.status().samples_assigned >= 40 or bool(failed))
        threads[2].start()
        until(lambda: planner.status().ranks == 3 or bool(failed))
        assert [rank.batch for rank in planner.ranks()] == [4, 4, 0]
        plan = planner.status().plan
        planner.replan([2, 3, 3], plan)
        with pytest.raises(PlanChanged, match="1"):
            planner.replan([8, 0, 0], plan)
        until(lambda: planner.status().samples_assigned >= 160 or bool(failed))
        planner.replan([0, 4, 4])
        for thread in threads:
            thread.join(60.0)
        assert not failed
        assert sum(rank.samples for rank in planner.ranks()) == SAMPLES
        positions = sorted(p for first, count in trained for p in range(first, first + count))
        assert positions == list(range(SAMPLES))
        assert watched.status().active == 0
        planner.journal(None)
        assert replay(tmp_path / "journal").differences == 0


def test_a_resting_rank_holds_nobody_up_and_its_worker_waits(shm: Path) -> None:
    with make("rest") as first, Store.open("rest") as second, Store.open("rest") as planner:
        planner.join(role="observer")
        planner.replan([8, 0])
        first.join(0)
        second.join(1)
        for _ in range(3):
            assert first.start(60.0).count == 8
            assert first.push(first.stage(60.0), 8, Hyper(lr=0.1), timeout=60.0).sources == 1
        with pytest.raises(TimedOut):
            second.start(0.05)
        assert planner.status().active == 1
        claims = {member.rank: member.claim_count for member in planner.members()}
        assert claims[1] == 0
        planner.replan([4, 4])
        assert planner.status().active == 2


def test_only_a_new_worker_may_have_a_rank_that_was_not_planned(shm: Path) -> None:
    with make("new") as store, Store.open("new") as other:
        with pytest.raises(InvalidArgument, match="rank: found 2; expected 0 to 1"):
            store.join(2)
        with pytest.raises(InvalidArgument, match="rank: found 8; expected 0 to 7"):
            store.join(8, "new_worker")
        store.join(4, "new_worker")
        store.set_cost_model(CostModel(0.1, 0.2, 0.3, 16))
        assert [rank.batch for rank in store.ranks()] == [4, 4, 0, 0, 0]
        assert store.costs()[4].model == CostModel(0.1, 0.2, 0.3, 16)
        assert store.costs()[0].model is None
        with pytest.raises(InvalidArgument, match="nan"):
            store.set_cost_model(CostModel(float("nan"), 1.0))
        assert not store.status().all_joined, "the planned ranks are still to come"
        other.join(role="observer")
        for wrong in ([4, 4], [4] * 9, [0] * 5):
            with pytest.raises(InvalidArgument, match="batches"):
                other.replan(wrong)


def test_whole_steps_are_timed_after_the_first_two(shm: Path) -> None:
    with Store.create("timed", {"w": np.zeros(8, np.float32)}, batches=[4], samples=0) as store:
        store.join(0)
        for step in range(13):
            claim = store.start()
            seconds = {"cost_seconds": float(step), "data_seconds": 0.5}
            store.push(store.stage(), claim.count, Hyper(lr=0.0), **seconds)
        found = store.costs()[0]
        assert found.steps == 11
        assert found.seconds == tuple(range(5, 13))
        assert found.data_seconds == 0.5
        store.replan([6])
        assert store.costs()[0].steps == 0


def test_a_state_has_ranks_that_came_later(shm: Path) -> None:
    with make("before", samples=0) as store, Store.open("before") as late:
        store.join(0)
        late.join(3, "new_worker")
        store.replan([4, 0, 0, 4])
        assert store.status().all_joined, "a rank without samples need not come"
        state = store.state()
        assert [rank.total.batch for rank in state.header.ranks] == [4, 0, 0, 4]
    with Store.create("after", state=state) as again:
        assert [rank.batch for rank in again.ranks()] == [4, 0, 0, 4]
        again.join(0)
        assert not again.status().all_joined
        with Store.open("after") as other:
            other.join(3)
            assert again.status().all_joined


def test_a_dead_new_worker_is_inherited(shm: Path) -> None:
    with make("heir") as store:
        with Store.open("heir") as late:
            late.join(2, "new_worker")
        store.join(2)
        found = [member for member in store.members() if member.rank == 2]
        assert {member.state for member in found} >= {MemberState.ACTIVE}
        with Store.open("heir") as third, pytest.raises(StoreError, match="held by live process"):
            third.join(2, "new_worker")
