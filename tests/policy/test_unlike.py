"""R2SP and H-PS in the decision core against models in Python, and the policies as values."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_drive import COMMITTED, POLICIES, SECOND, WAIT, Drive
from sampled import examples

from pyps.errors import InputError, InvalidArgument
from pyps.native.core import Core
from pyps.native.decisions import EventKind, PolicyParams
from pyps.native.values import Config, Optimizer
from pyps.store.policies import (
    ASP,
    HPS,
    R2SP,
    Policy,
    SaPS,
    Softsync,
    policy_named,
)

# R2SP.


@settings(max_examples=examples(10, 25), deadline=None)
@given(order=st.lists(st.integers(0, 3), min_size=200, max_size=400))
def test_r2sp_is_a_fixed_cycle_with_staleness_one_less_than_its_members(order: list[int]) -> None:
    drive = Drive(R2SP(slack=0.0, patience=1e6), [5, 3, 2, 7])
    for k in order:
        drive.turn(k)
    workers = [k for k, _, _ in drive.pushes]
    assert workers == [k % 4 for k in range(len(workers))]
    assert all(staleness == 3 for _, staleness, _ in drive.pushes[4:])
    assert all(staleness <= k for k, (_, staleness, _) in enumerate(drive.pushes[:4]))


def test_r2sp_passes_over_a_late_worker_and_takes_it_back() -> None:
    drive = Drive(R2SP(slack=0.0, patience=1.0), [1, 1, 1])
    for _ in range(3):
        for k in (0, 1, 2):
            if drive.version < 3:
                drive.start(k)
            drive.now += SECOND
            assert drive.push(k, compute_nanoseconds=SECOND) == COMMITTED
            drive.pull(k)
            drive.start(k)
    assert drive.push(1) == WAIT, "it is rank 0's turn"
    drive.now += 4 * SECOND  # past patience: each worker pushes every 3 s
    drive.core.step(EventKind.TICK, 1, drive.now, waited=0)
    before = len(drive.pushes)
    for k in (1, 2, 1, 2):
        assert drive.push(k) == COMMITTED
        drive.pull(k)
        drive.start(k)
    assert [staleness for _, staleness, _ in drive.pushes[before + 2 :]] == [1, 1]
    assert drive.push(0) == WAIT, "it asks for a turn, and gets its own next one"
    for k in (1, 2, 0, 1, 2, 0):
        assert drive.push(k) == COMMITTED
        drive.pull(k)
        drive.start(k)
    assert [staleness for _, staleness, _ in drive.pushes[-3:]] == [2, 2, 2]


def test_r2sp_does_not_wait_for_a_pull_that_never_comes() -> None:
    drive = Drive(R2SP(slack=0.0), [1, 1])
    for k in (0, 1):
        drive.start(k)
    order = []
    for _ in range(20):
        for k in (0, 1):
            if k in drive.claims and drive.push(k) == COMMITTED:
                order.append(k)
                drive.core.step(EventKind.START, k, drive.now)
                drive.claims[k] = (0, 1)
    assert order == [k % 2 for k in range(len(order))]
    assert len(order) > 10


def test_r2sp_keeps_its_gaps() -> None:
    drive = Drive(R2SP(slack=1.0), [1, 1])
    times: list[int] = []
    for k in (0, 1):
        drive.start(k)
    for turn in range(12):
        k = turn % 2
        while drive.push(k, compute_nanoseconds=SECOND) == WAIT:
            drive.now = max(drive.now, drive.core.last.at)
        times.append(drive.now)
        drive.pull(k)
        drive.start(k)
    gaps = [(b - a) / SECOND for a, b in pairwise(times[4:])]
    assert gaps == pytest.approx([0.5] * len(gaps), abs=0.02), "period 1 s, two workers"


# H-PS.


@settings(max_examples=examples(12, 40), deadline=None)
@given(
    speeds=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    limits=st.lists(st.one_of(st.just(0), st.integers(1, 60)), min_size=4, max_size=4),
)
def test_hps_shares_by_speed_within_memory(speeds: list[int], limits: list[int]) -> None:
    batches = [20, 30, 10, 40]
    drive = Drive(HPS(), batches)
    for k, most in enumerate(limits):
        drive.core.step(EventKind.MAX_SAMPLES, k, drive.now, next=most)
    for _ in range(2):
        for k in range(4):
            assert drive.start(k)
        for k in range(4):
            assert drive.push(k, compute_nanoseconds=drive.claims[k][1] * SECOND // speeds[k]) == COMMITTED
    shares = []
    for k in range(4):
        assert drive.start(k)
        shares.append(drive.claims[k][1])
    assert sum(shares) == 100
    room = [most or 100 for most in limits]
    if sum(room) >= 100 and min(shares) > 2:  # two: the least, whatever the speed
        assert all(share <= most for share, most in zip(shares, room, strict=True))
        free = [k for k in range(4) if shares[k] < room[k]]
        ratios = [shares[k] / speeds[k] for k in free]
        slack = sum(1.0 / speeds[k] for k in free)
        assert not free or max(ratios) - min(ratios) <= slack + 1e-9


# The values in Python.


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_is_what_its_text_says(policy: Policy) -> None:
    assert policy_named(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ssp:bound=-1", "ssp: bound: found -1"),
        ("ssp:bound=x", "a number"),
        ("ssp:slack=1", "key=value, where key is one of scaling, lookahead, bound"),
        ("asp:x=1", "key=value, where key is one of scaling, lookahead"),
        ("asp:scaling=twice", "one of samples, none"),
        ("saps:threshold=sometimes", "one of fixed, quantile, ringmaster, measured"),
        ("saps:late=never", "one of drop, weigh, auto"),
        ("saps:late=weigh,abort=true", "late=drop, or no abort"),
        ("saps:noise=-1", "from 0 to 1000000000"),
        ("saps:threshold=fixed,bound=0,late=weigh", "at least 1"),
        ("saps:bound=4", "threshold=fixed"),
        ("saps:abort=maybe", "true or false"),
        ("saps:quantile=1.5", "0.01 to 0.999"),
        ("r2sp:slack=-1", "from 0 to 1000000"),
        ("softsync:n=0", "at least 1"),
        ("dssp:extra=100000", "at most 10000"),
        ("saps:noise=nan", "noise: found nan; expected a number from 0 to"),
    ],
)
def test_bad_numbers_are_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        policy_named(text)


def test_the_core_checks_rules_itself() -> None:
    def core(policy: int, rules: PolicyParams) -> Core:
        return Core(Config((), (), (1,), 1, Optimizer.SGD, policy, 1.0, 0, 0, 0, 0, 0, rules))

    with pytest.raises(InvalidArgument, match="splits: found 0"):
        core(Softsync.number, PolicyParams())
    with pytest.raises(InvalidArgument, match="patience"):
        core(R2SP.number, PolicyParams(slack=1.0))
    with pytest.raises(InvalidArgument, match="quantile"):
        core(SaPS.number, PolicyParams(threshold=1, quantile=math.nan))
    with pytest.raises(InvalidArgument, match="late"):
        core(SaPS.number, PolicyParams(late=2))
    with pytest.raises(InvalidArgument, match="abort"):
        core(SaPS.number, PolicyParams(late=1, abort=1))
    with pytest.raises(InvalidArgument, match="noise"):
        core(SaPS.number, PolicyParams(threshold=3, noise=math.inf))
    made = core(ASP.number, PolicyParams())
    with pytest.raises(InvalidArgument, match="slot"):
        made.step(EventKind.START, 7, 1)
