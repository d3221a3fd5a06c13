"""The policies' decisions in C against small models in Python, event by event, in orders that are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_drive import COMMITTED, POLICIES, REFUSED, STEP, Drive, orders, partition
from sampled import examples

from pyps.errors import InvalidArgument
from pyps.native.core import Core
from pyps.native.decisions import EventKind
from pyps.native.status import MemberState
from pyps.native.values import Config, Optimizer
from pyps.store.policies import (
    ASP,
    DSSP,
    SSP,
    Backup,
    DynSGD,
    Policy,
    Softsync,
)

NEED_NO_MEMBER = (EventKind.JOIN, EventKind.TICK, EventKind.REPLAN, EventKind.SCHEDULE)

# What holds under every policy.


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=examples(10, 25), deadline=None)
@given(order=orders)
def test_every_sample_is_trained_once_and_all_end(policy: Policy, order: list[int]) -> None:
    drive = Drive(policy, [5, 3, 2, 7], samples=100)
    for k in order:
        drive.turn(k)
    drive.finish()
    assert partition(drive.trained) == [(0, 100)]
    assert sum(r.samples for r in drive.core.ranks()) == 100


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    order=orders,
    batches=st.lists(st.integers(3, 9), min_size=4, max_size=4),
    samples=st.integers(2, 90),
    death=st.booleans(),
)
def test_no_claim_is_of_one_sample(
    policy: Policy, order: list[int], batches: list[int], samples: int, death: bool
) -> None:
    """Batch normalization cannot train on one."""
    drive = Drive(policy, batches, samples)
    for k in order:
        drive.turn(k)
        assert all(count >= 2 for _, count in drive.claims.values())
    if death:  # what worker 1 holds is assigned again
        drive.claims.pop(1, None)
        drive.ended.add(1)
        drive.core.step(EventKind.LEAVE, 1, drive.now, state=int(MemberState.DEAD))
        drive.see()
    drive.finish()
    assert all(count >= 2 for _, count in drive.trained)
    assert partition(drive.trained) == [(0, samples)]


@pytest.mark.parametrize("kind", [m for m in EventKind if m not in NEED_NO_MEMBER])
def test_who_has_not_joined_is_refused(kind: EventKind) -> None:
    policy = ASP()
    core = Core(Config((), (), (4, 4), 1, Optimizer.SGD, policy.number, 1.0, 8, 0, 0, 0, 2, policy.params()))
    with pytest.raises(InvalidArgument, match="which has no member"):
        core.step(kind, 1, 1, state=int(MemberState.LEFT), next=1)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=15, deadline=None)
@given(order=orders, at=st.integers(0, 25), death=st.booleans())
def test_a_death_or_a_fence_stops_no_other_worker(
    policy: Policy, order: list[int], at: int, death: bool
) -> None:
    drive = Drive(policy, [5, 3, 2, 7], samples=100)
    for k in order[:at]:
        drive.turn(k)
    lost = drive.claims.pop(1, None)
    drive.ended.add(1)
    if death:
        drive.core.step(EventKind.LEAVE, 1, drive.now, state=int(MemberState.DEAD))
        drive.see()
    else:
        for k in (0, 2, 3):  # they go on as far as they can without it
            for _ in range(4):
                drive.turn(k)
        drive.tick()
    for k in order[at:]:
        drive.turn(k)
    drive.finish()
    assert partition(drive.trained) == [(0, 100)], f"{lost} was lost or doubled"


# BSP, backup, softsync.


@settings(max_examples=examples(10, 25), deadline=None)
@given(order=orders, k=st.integers(0, 3))
def test_backup_closes_with_all_but_k_and_the_late_never_enter(order: list[int], k: int) -> None:
    drive = Drive(Backup(k=k), [5, 3, 2, 7])
    staged: set[int] = set()
    in_round: dict[int, int] = {}
    for worker in order:
        if worker in drive.claims:
            late = in_round[worker] != drive.round
            before = drive.round
            verdict = drive.push(worker)
            assert (verdict == REFUSED) == late
            if verdict == COMMITTED:
                staged.add(worker)
                assert (drive.round > before) == (len(staged) == max(1, 4 - k))
            if drive.round > before:
                assert {s[0] for s in drive.sources[-1]} == staged
                staged = set()
        elif worker not in drive.waiting and drive.start(worker):
            in_round[worker] = drive.round


@settings(max_examples=examples(10, 25), deadline=None)
@given(order=orders, k=st.integers(1, 2))
def test_samples_handed_out_again_leave_rounds_their_size(order: list[int], k: int) -> None:
    """A late worker's few samples go to a rank that is planned no more, not to one that could do many."""
    planned = [20, 9, 2, 20]
    drive = Drive(Backup(k=k), planned)
    for worker in order:
        drive.turn(worker)
        for rank, (_, count) in drive.claims.items():
            assert count >= planned[rank] - 1, "one less, where one sample would be left alone"


@pytest.mark.parametrize("k", [1, 2])
def test_what_backup_has_left_over_at_the_end_is_a_part_of_a_step(k: int) -> None:
    """It may be one worker's batch. As a whole step it would undo the rounds before."""
    drive = Drive(Backup(k=k), [4, 4, 4, 4], samples=5 * (16 - 4 * k) + 4)
    parts = []
    while len(drive.ended) < 4:
        rounds = len(drive.sources)
        moved = [drive.turn(worker) for worker in range(4)]
        assert any(moved)
        if len(drive.sources) > rounds:
            parts.append((sum(source[2] for source in drive.sources[-1]), drive.core.last.part))
    assert parts[:5] == [(16 - 4 * k, 1.0)] * 5
    assert parts[5:] == [(4, 0.25)]


@settings(max_examples=examples(10, 25), deadline=None)
@given(order=orders, n=st.integers(1, 5))
def test_softsync_steps_from_every_share_of_the_workers_scaled_by_staleness(order: list[int], n: int) -> None:
    drive = Drive(Softsync(n=n), [5, 3, 2, 7])
    for k in order:
        drive.turn(k)
    gathered = max(1, 4 // n)
    assert all(len(sources) == gathered for sources in drive.sources)
    assert len(drive.pushes) // gathered == len(drive.sources)
    for _, staleness, scale in drive.pushes:
        assert scale == pytest.approx(n / max(1, staleness))
    for sources in drive.sources:
        assert [s[0] for s in sources] == sorted(s[0] for s in sources), "summed in rank order"


# Scales.


@settings(max_examples=examples(10, 25), deadline=None)
@given(order=orders)
@pytest.mark.parametrize(
    ("policy", "scale"),
    [
        (ASP(), lambda tau: 1.0),
        (DynSGD(scaling="none"), lambda tau: 1 / (tau + 1)),
    ],
    ids=lambda value: str(value) if isinstance(value, Policy) else "",
)
def test_asynchronous_policies_take_every_push_at_once(
    policy: Policy, scale: Callable[[int], float], order: list[int]
) -> None:
    drive = Drive(policy, [5, 3, 2, 7])
    for k in order:
        if k in drive.claims:
            assert drive.push(k) == COMMITTED
        else:
            assert drive.start(k), "no worker ever waits"
    assert drive.version == len(drive.pushes)
    for _, staleness, found in drive.pushes:
        assert found == pytest.approx(scale(staleness))


@settings(max_examples=examples(10, 25), deadline=None)
@given(order=orders)
def test_dynsgd_divides_by_the_mean_of_its_weights(order: list[int]) -> None:
    drive, batches = Drive(DynSGD(), [5, 3, 2, 7]), [5, 3, 2, 7]
    for k in order:
        drive.turn(k)
    weights = samples = 0.0
    for k, staleness, found in drive.pushes:
        weights = weights * (1 - 1 / 40) + batches[k] / (staleness + 1)
        samples = samples * (1 - 1 / 40) + batches[k]
        assert found == pytest.approx(samples / weights / (staleness + 1))


# SSP, DSSP.


@settings(max_examples=examples(10, 30), deadline=None)
@given(order=orders, bound=st.one_of(st.integers(0, 4), st.just(math.inf)))
def test_ssp_waits_exactly_when_too_far_ahead(order: list[int], bound: float) -> None:
    drive = Drive(SSP(bound=bound), [5, 3, 2, 7])
    clocks = [0] * 4
    for k in order:
        if k in drive.claims:
            assert drive.push(k) == COMMITTED
            clocks[k] += 1
        else:
            assert drive.start(k) == (clocks[k] - min(clocks) <= bound)
        assert drive.core.last.progress == min(clocks)


def test_ssp_counts_present_workers_and_newcomers_begin_at_the_slowest() -> None:
    drive = Drive(SSP(bound=0), [1, 1, 1])
    for k in (0, 1):
        assert drive.start(k)
        assert drive.push(k) == COMMITTED
        assert not drive.start(k)
    drive.core.step(EventKind.LEAVE, 2, drive.now, state=int(MemberState.DEAD))
    assert drive.start(0)
    assert drive.push(0) == COMMITTED
    drive.core.step(EventKind.JOIN, 2, drive.now, rank=2)
    assert drive.start(1)
    assert drive.push(1) == COMMITTED
    assert not drive.start(1), "the newcomer stands where the slowest stood when it came"
    assert drive.start(2)
    assert drive.push(2) == COMMITTED
    assert drive.start(1)


def least_wait(fast: tuple[int, int], slow: tuple[int, int], most: int) -> int:
    """DSSP's grant by search: (last push, interval) of both; the steps with the shortest predicted wait."""

    def wait(steps: int) -> int:
        done = fast[0] + steps * fast[1]
        pushes = (slow[0] + j * slow[1] for j in range(1, 10_000))
        return next(p - done for p in pushes if p >= done)

    return min(range(most + 1), key=lambda steps: (wait(steps), steps))


@settings(max_examples=examples(12, 40), deadline=None)
@given(fast=st.integers(1, 50), slow=st.integers(30, 400), bound=st.integers(1, 3), extra=st.integers(0, 6))
def test_dssp_grants_the_steps_of_the_shortest_wait(fast: int, slow: int, bound: int, extra: int) -> None:
    drive = Drive(DSSP(bound=bound, extra=extra), [1, 1])
    at = {0: drive.now, 1: drive.now}

    def step(k: int, interval: int) -> None:
        assert drive.start(k)
        at[k] = drive.now = max(drive.now, at[k] + interval * STEP * 10)
        assert drive.push(k) == COMMITTED
        at[k] = drive.now

    before = 0
    for _ in range(3):
        before = at[1]
        step(1, slow)
        step(0, fast)
    slow_pushed, slow_interval = at[1], at[1] - before
    fast_interval = 0
    while True:  # the fast one runs until it is `bound` ahead of the slow one
        previous, ahead = at[0], len([p for p in drive.pushes if p[0] == 0]) - 3
        if ahead > bound:
            break
        step(0, fast)
        fast_interval = at[0] - previous
    expected = least_wait((at[0], fast_interval), (slow_pushed, slow_interval), extra)
    taken = 0
    while drive.start(0) and taken <= extra:
        drive.push(0)
        taken += 1
        if taken == expected:
            break
    assert taken == expected
    assert extra > 0 or taken == 0


@settings(max_examples=examples(10, 25), deadline=None)
@given(order=orders)
def test_dssp_never_passes_its_upper_bound_and_without_extra_is_ssp(order: list[int]) -> None:
    ssp, same, wide = Drive(SSP(bound=2), [1] * 4), Drive(DSSP(bound=2, extra=0), [1] * 4), None
    wide = Drive(DSSP(bound=1, extra=3), [1] * 4)
    clocks = [0] * 4
    for k in order:
        if k in ssp.claims:
            assert ssp.push(k) == same.push(k) == COMMITTED
        else:
            assert ssp.start(k) == same.start(k)
        if k in wide.claims:
            wide.push(k)
            clocks[k] += 1
        elif wide.start(k):
            assert clocks[k] - min(clocks) <= 4
