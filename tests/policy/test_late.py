"""Which workers a tick fences and which it leaves alone, and how far claims ahead reach."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass

import pytest
from policy_drive import COMMITTED, SECOND, Drive

from pyps.errors import Fenced
from pyps.native.decisions import EventKind, PolicyContext
from pyps.native.status import MemberState
from pyps.store.policies import DSSP, R2SP, SSP, Backup, Custom, register_policy

SLICE = SECOND // 20  # how often a waiter looks for something to do


@dataclass(frozen=True, kw_only=True)
class First(Custom):
    """Only rank 0 may begin a step, or, from a time on, all ranks."""

    opens: int = 10**12

    def may_start(self, context: PolicyContext, shared_state: MutableSequence[int]) -> bool:
        return context.rank == 0 or context.now >= self.opens

    def scale(self, context: PolicyContext, shared_state: MutableSequence[int]) -> float | None:
        return 1.0


def fenced(drive: Drive, k: int) -> bool:
    """Return whether worker k is out; it says so when it asks for anything."""
    try:
        drive.core.step(EventKind.CHECK, k, drive.now)
    except Fenced:
        return True
    return False


def test_a_waiter_that_its_own_policy_keeps_waiting_is_not_fenced() -> None:
    policy = First(round_timeout_seconds=10.0)
    register_policy(policy)
    drive = Drive(policy, [4, 4])
    assert drive.start(0)
    assert not drive.start(1), "the policy makes it wait"
    for _ in range(3):
        drive.push(0)
        assert drive.start(0)
        drive.tick()
        assert fenced(drive, 0), "it stands still with samples in hand"
        assert not fenced(drive, 1)
        drive.core.step(EventKind.REJOIN, 0, drive.now)
        assert drive.start(0)


def test_one_that_may_begin_a_step_and_does_not_is_fenced() -> None:
    policy = First(round_timeout_seconds=10.0)
    register_policy(policy)
    drive = Drive(policy, [4, 4])
    assert not drive.start(1)
    drive.tick()
    assert fenced(drive, 0), "others wait for it, between two steps as it is"
    assert not fenced(drive, 1)


def test_a_policy_may_wait_for_a_time() -> None:
    policy = First(opens=5 * SECOND)
    register_policy(policy)
    drive = Drive(policy, [4, 4])
    assert not drive.start(1)
    drive.now = 5 * SECOND
    assert drive.start(1), "though nothing has happened since"


def test_who_waits_for_its_turn_with_a_ready_gradient_is_not_fenced() -> None:
    drive = Drive(R2SP(round_timeout_seconds=10.0), [4, 4, 4])
    for k in range(3):
        assert drive.start(k)
    begun = drive.now  # ranks 0 and 1 stand still from here on
    while drive.now < begun + 30 * SECOND:
        drive.now += SLICE
        if drive.push(2) == COMMITTED:
            break
        waited = drive.now - begun
        if drive.now >= drive.core.last.next_deadline or waited >= 10 * SECOND:
            drive.core.step(EventKind.TICK, 2, drive.now, waited=waited)
    assert drive.pushes[0][0] == 2
    assert fenced(drive, 0), "it kept others waiting, for longer than the round timeout"


@pytest.mark.parametrize("policy", [SSP(bound=0), SSP(bound=2), DSSP(bound=1, extra=2)], ids=str)
def test_claims_ahead_keep_the_bound(policy: SSP | DSSP) -> None:
    most = int(policy.bound) + (policy.extra if isinstance(policy, DSSP) else 0)
    drive = Drive(policy, [4, 4])
    assert drive.start(1), "the slowest, at clock 0"
    begun = 0
    while drive.start(0):
        begun = begun + 1
        while True:
            drive.now += SECOND
            ahead = drive.core.step(EventKind.START_AHEAD, 0, drive.now).count
            assert drive.push(0) == COMMITTED
            if not ahead:
                break
            begun += 1
            drive.claims[0] = (0, 4)
    assert begun <= most + 1


def test_a_round_without_the_slowest_does_not_wait_for_one_that_came_meanwhile() -> None:
    """It has no part in the round: with it, the round would wait for the late worker, too."""
    drive = Drive(Backup(k=1), [4, 4, 4, 4])
    for k in range(4):
        assert drive.start(k)
    drive.core.step(EventKind.LEAVE, 0, drive.now, state=int(MemberState.DEAD))
    drive.core.step(EventKind.JOIN, 0, drive.now, rank=0)
    assert drive.push(1) == COMMITTED
    assert drive.round == 0
    assert drive.push(2) == COMMITTED
    assert drive.round == 1


def test_a_last_round_of_few_workers_drops_none_of_their_work() -> None:
    drive = Drive(Backup(k=1), [4, 4, 4, 4], samples=20)
    for k in range(4):
        assert drive.start(k)
    for k in range(3):
        drive.turn(k)
    assert drive.round == 1
    for k in range(4):
        drive.turn(k)
    held = sorted(drive.claims)
    assert len(held) == 2
    drive.push(held[0])
    assert drive.round == 1, "it waits for the other one"
    drive.push(held[1])
    assert drive.round == 2


def test_one_alone_may_always_work_ahead() -> None:
    drive = Drive(SSP(bound=0), [4])
    assert drive.start(0)
    assert drive.core.step(EventKind.START_AHEAD, 0, drive.now).count == 4
