"""SaPS, R2SP and H-PS in the decision core against models in Python, and the policies as values."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_drive import COMMITTED, POLICIES, REFUSED, SECOND, WAIT, Drive, orders

from pyps.errors import InputError, InvalidArgument
from pyps.native.core import Core
from pyps.native.values import Advice, Config, EventKind, Optimizer, PolicyParams
from pyps.store.policies import (
    ASP,
    HPS,
    R2SP,
    Policy,
    SaPS,
    Softsync,
    policy_named,
)

# SaPS.


@settings(max_examples=25, deadline=None)
@given(order=orders, bound=st.integers(0, 4))
def test_saps_keeps_its_bound_without_waits(order: list[int], bound: int) -> None:
    drive = Drive(SaPS(threshold="fixed", bound=bound), [5, 3, 2, 7])
    for k in order:
        if k in drive.claims:
            staleness = drive.version - drive.pulled[k]
            assert drive.push(k) == (REFUSED if staleness > bound else COMMITTED)
        else:
            assert drive.start(k)
    assert all(staleness <= bound for _, staleness, _ in drive.pushes)


@settings(max_examples=25, deadline=None)
@given(order=orders)
def test_saps_without_a_bound_is_asp(order: list[int]) -> None:
    drives = [Drive(policy, [5, 3, 2, 7], 100) for policy in (SaPS(threshold="fixed"), ASP())]
    for k in order:
        for drive in drives:
            drive.turn(k)
    assert drives[0].pushes == drives[1].pushes
    assert drives[0].trained == drives[1].trained


def test_a_rejected_worker_gets_what_it_could_have_done_in_time() -> None:
    drive = Drive(SaPS(threshold="fixed", bound=3), [8, 8])
    counts = []
    for _ in range(6):
        assert drive.start(0)
        counts.append(drive.claims[0][1])
        for _ in range(counts[-1]):  # the other one pushes once for each of its samples
            drive.start(1)
            drive.push(1)
        drive.push(0)
    assert counts == [8, 2, 2, 2, 2, 2], "0.8 of a bound of 3, at a staleness of 1 for each sample"


def test_saps_with_a_bound_of_its_own_hears_a_worker_that_can_never_be_in_time() -> None:
    drive = Drive(SaPS(), [4, 4])
    heard = 0
    for _ in range(10):
        assert drive.start(0)
        for _ in range(20):
            drive.start(1)
            drive.push(1)
        heard += drive.push(0) == COMMITTED
    assert heard >= 6


def test_saps_pushes_what_is_done_before_it_is_too_late() -> None:
    drive = Drive(SaPS(threshold="fixed", bound=4, abort=True), [8, 1])
    drive.start(0)
    for done in (2, 4, 6):
        drive.start(1)
        drive.push(1)  # staleness is now done / 2
        advice = drive.core.step(EventKind.CHECK, 0, drive.now, done=done, next=2).advice
        staleness = done // 2
        late = Fraction(staleness * (done + 2), done) > 4
        assert advice == (Advice.PUSH_NOW if late else Advice.CONTINUE)
    for _ in range(3):
        drive.start(1)
        drive.push(1)
    assert drive.core.step(EventKind.CHECK, 0, drive.now, done=6, next=2).advice == Advice.ABORT
    with pytest.raises(InvalidArgument):
        drive.push(0)
    assert drive.core.ranks()[0].returned == 8


class Quantile:
    """The threshold of SaPS(threshold="quantile") in Python."""

    def __init__(self, q: float, workers: int) -> None:
        self.q, self.workers, self.tracked = q, workers, 0.0

    def see(self, staleness: int) -> int:
        step = 0.05 * max(1.0, self.tracked)
        self.tracked += step * self.q if staleness > self.tracked else -step * (1 - self.q)
        self.tracked = max(0.0, self.tracked)
        return max(self.workers, int(self.tracked))


@settings(max_examples=20, deadline=None)
@given(order=st.lists(st.integers(0, 3), min_size=100, max_size=400), q=st.sampled_from([0.5, 0.8, 0.95]))
def test_saps_tracks_a_quantile(order: list[int], q: float) -> None:
    drive, model = Drive(SaPS(threshold="quantile", quantile=q), [50] * 4), Quantile(q, 4)
    for k in order:
        if k in drive.claims:
            staleness = drive.version - drive.pulled[k]
            bound = model.see(staleness)
            held = drive.claims[k][1]
            if held > 1:
                assert drive.push(k) == (REFUSED if staleness > bound else COMMITTED)
            else:
                drive.push(k)
        else:
            drive.start(k)


def test_ringmasters_bound_follows_the_noise() -> None:
    """|g|^2 = signal + noise / b with unlike batches: the bound is max(N, noise / (b signal))."""
    noise, signal, batches = 400.0, 1.0, [4, 16]
    drive = Drive(SaPS(), batches)
    for _ in range(40):
        for k, b in enumerate(batches):
            drive.start(k)
            drive.push(k, norm=signal + noise / b)
    mean_inverse = sum(1 / b for b in batches) / 2
    bound = min(math.ceil(noise * mean_inverse / signal), 16 * 2)  # at most 16 N
    drive.start(0)
    for _ in range(bound):
        drive.start(1)
        drive.push(1, norm=signal + noise / batches[1])
    assert drive.push(0, norm=signal + noise / batches[0]) == COMMITTED
    drive.start(0)
    for _ in range(bound + 4):
        drive.start(1)
        drive.push(1, norm=signal + noise / batches[1])
    assert drive.push(0) == REFUSED


# R2SP.


@settings(max_examples=25, deadline=None)
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


@settings(max_examples=40, deadline=None)
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
    if sum(room) >= 100 and min(shares) > 1:
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
        ("ssp:slack=1", "key=value with one of scaling, bound"),
        ("asp:x=1", "key=value with one of scaling"),
        ("asp:scaling=twice", "one of samples, none"),
        ("saps:threshold=sometimes", "one of fixed, quantile, ringmaster"),
        ("saps:bound=4", "threshold=fixed"),
        ("saps:abort=maybe", "true or false"),
        ("saps:quantile=1.5", "0.01 to 0.999"),
        ("r2sp:slack=-1", "at least 0"),
        ("softsync:n=0", "at least 1"),
        ("dssp:extra=100000", "at most 10000"),
        ("dcasgd:lambda=nan", "at least 0"),
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
    made = core(ASP.number, PolicyParams())
    with pytest.raises(InvalidArgument, match="slot"):
        made.step(EventKind.START, 7, 1)
