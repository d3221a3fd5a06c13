"""SaPS in the decision core against models in Python."""

from __future__ import annotations

import heapq
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_drive import COMMITTED, REFUSED, SECOND, Drive, orders
from sampled import examples

from pyps.errors import InvalidArgument, PushRejected
from pyps.native.core import Core
from pyps.native.decisions import Advice, EventKind
from pyps.native.values import Config, Optimizer
from pyps.store.policies import ASP, SaPS


@settings(max_examples=examples(10, 25), deadline=None)
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


@settings(max_examples=examples(10, 25), deadline=None)
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


@pytest.mark.parametrize("threshold", ["measured", "quantile", "ringmaster"])
def test_a_worker_whose_gradients_are_all_late_is_heard_now_and_then(threshold: str) -> None:
    drive = Drive(SaPS(threshold=threshold, late="drop", noise=0.0), [4, 4])  # type: ignore[arg-type]
    for _ in range(40):
        assert drive.start(0)
        for _ in range(20):
            drive.start(1)
            drive.push(1)
        drive.push(0)
    late = [scale for k, staleness, scale in drive.pushes if k == 0 and staleness == 20]
    assert 4 <= len(late) <= 5, "each eighth"
    assert all(0 < scale < 0.5 for scale in late[1:])


def test_a_worker_that_has_no_time_for_one_sample_does_not_make_others_late() -> None:
    drive = Drive(SaPS(threshold="fixed", bound=3), [8, 8])
    for _ in range(6):
        assert drive.start(0)
        assert drive.claims[0][1] == 8
        for _ in range(80):
            drive.start(1)
            drive.push(1)
        assert drive.push(0) == REFUSED


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
    drive = Drive(SaPS(threshold="ringmaster"), batches)
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


# The measured bound.


def by_times(times: list[float], batches: list[int], noise: float) -> int:
    """The bound, from its definition, of workers without pipelines."""
    mean = sum(batches) / len(batches)
    least, bound = math.inf, 0
    for m in range(1, len(times) + 1):
        fastest = sorted(zip(times, batches, strict=True))[:m]
        rate = sum(b / mean / t for t, b in fastest)
        seconds = (sum(b / mean for _, b in fastest) + noise) / rate
        if seconds <= least * (1 + 1e-9):
            least, bound = seconds, math.ceil(1.5 * fastest[-1][0] * rate * (1 - 1e-9))
    return bound


def mean_weight(workers: list[tuple[float, int, bool]], bound: float) -> float:
    """Return gradients' mean weight under a bound: workers' seconds so far, batches, whether each pushed."""
    mean = sum(b for _, b, _ in workers) / len(workers)
    times = [t if pushed else 3 * t for t, _, pushed in workers]
    rates = [b / mean / t for t, (_, b, _) in zip(times, workers, strict=True)]
    late = [t * sum(rates) - b / mean for t, (_, b, _) in zip(times, workers, strict=True)]
    weighed = sum(r * (min(1.0, bound / x) if x > 0 else 1.0) for r, x in zip(rates, late, strict=True))
    return weighed / sum(rates)


class Measured:
    """Workers of fixed times under SaPS, and the bound and the weights that it should find."""

    def __init__(self, times: list[int], batches: list[int], noise: float) -> None:
        self.times, self.batches, self.noise = times, batches, noise
        policy = SaPS(noise=noise)
        config = Config(
            (), (), tuple(batches), 1, Optimizer.SGD, policy.number, 60.0, 0, 0, 0, 0, 2, policy.params()
        )
        self.core = Core(config)
        self.means = [0.0] * len(times)
        self.since, self.pulled = [0] * len(times), [0] * len(times)  # when it claimed; samples then
        self.samples = self.pushes = self.interval = self.bound = 0
        self.mean = 1.0
        self.late: list[tuple[float, float]] = []  # scale found, expected
        for k in range(len(times)):
            self.core.step(EventKind.JOIN, k, SECOND, rank=k)

    def run(self, events: int) -> None:
        queue = [(SECOND, k) for k in range(len(self.times))]
        for k in range(len(self.times)):
            self.claim(k, SECOND)
        queue = [(SECOND + t, k) for k, t in enumerate(self.times)]
        heapq.heapify(queue)
        for _ in range(events):
            now, k = heapq.heappop(queue)
            self.push(k, now)
            self.claim(k, now)
            heapq.heappush(queue, (now + self.times[k], k))

    def claim(self, k: int, now: int) -> None:
        self.core.step(EventKind.START, k, now)
        self.core.pull(k, now, self.core.last.version)
        self.since[k], self.pulled[k] = now, self.samples

    def push(self, k: int, now: int) -> None:
        self.means[k] = (now - self.since[k]) * 1e-9
        under_way = [
            max(mean, (now - since) * 1e-9) for mean, since in zip(self.means, self.since, strict=True)
        ]
        self.pushes += 1
        if not self.bound or self.pushes >= self.interval:
            self.interval = min(2 * self.interval or 1, len(self.times) // 4)
            known = [(t, b) for t, b in zip(under_way, self.batches, strict=True) if t > 0]
            self.bound = by_times([t for t, _ in known], [b for _, b in known], self.noise)
            pushed = [mean > 0 for t, mean in zip(under_way, self.means, strict=True) if t > 0]
            self.mean = mean_weight([(*w, p) for w, p in zip(known, pushed, strict=True)], self.bound)
            self.pushes = 0
        staleness = (self.samples - self.pulled[k]) * len(self.batches) / sum(self.batches)
        d = self.core.push(k, now, 0, self.batches[k], 0, 0.0)
        self.late.append((d.scale, (min(1.0, self.bound / staleness) if staleness else 1.0) / self.mean))
        self.samples += self.batches[k]


@settings(max_examples=examples(12, 40), deadline=None)
@given(
    workers=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=14),
    noise=st.sampled_from([0.0, 2.0, 8.0, 100.0]),
)
def test_the_measured_bound_is_that_of_its_definition(workers: list[tuple[int, int]], noise: float) -> None:
    """Times are powers, so that no two sums of them are nearly equal."""
    times = [round(1e9 * 1.37**power) for power, _ in workers]
    measured = Measured(times, [batch for _, batch in workers], noise)
    measured.run(120)
    for found, expected in measured.late:
        assert found == pytest.approx(expected, rel=1e-6)


def test_few_fast_workers_among_many_slow_ones() -> None:
    many = Measured([SECOND] * 4 + [10 * SECOND] * 60, [16] * 64, 4.0)
    many.run(1000)
    assert many.bound == 6, "1.5 times the delay of the four fast ones"
    alike = Measured([SECOND] * 64, [16] * 64, 4.0)
    alike.run(1000)
    assert alike.bound == 96
    assert all(found == 1.0 for found, _ in alike.late[64:]), "nothing is late where all are alike"


def test_a_worker_that_stops_does_not_count() -> None:
    policy = SaPS(late="drop")
    drive = Drive(policy, [4] * 4)
    drive.start(3)
    for _ in range(30):
        for k in range(3):
            drive.turn(k)
    drive.now += 1000 * SECOND
    for _ in range(30):
        for k in range(3):
            drive.turn(k)
    with pytest.raises(PushRejected):
        drive.core.push(3, drive.now, 0, 4, 0, 0.0)


def test_a_push_of_a_few_samples_makes_others_less_late_than_a_whole_batch() -> None:
    """Staleness counts samples: sixteen pushes of one are one of sixteen."""

    def scale(samples: int, pushes: int) -> float:
        drive = Drive(SaPS(noise=0.0), [16, 16])
        for _ in range(20):
            for k in range(2):
                drive.start(k)
                drive.push(k)
        drive.start(0)
        for _ in range(pushes):
            drive.start(1)
            drive.push(1, samples)
        drive.push(0)
        return drive.pushes[-1][2]

    assert scale(1, 16) == pytest.approx(scale(16, 1), rel=0.05)
    assert scale(16, 16) < 0.5 * scale(16, 1)


# The measured noise.


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 21, 21), (10.0, 25, 60), (60.0, 90, 90)])
def test_late_gradients_count_as_much_as_there_is_noise(noise: float, least: int, most: int) -> None:
    """Ten fast workers, one whose gradient is 90 steps late, and gradients of known noise over signal."""
    drive, draw = Drive(SaPS(), [4] * 11), np.random.default_rng(1)
    true = draw.standard_normal(500)

    def push(k: int) -> float:
        drive.core.see_gradient(true + math.sqrt(noise) * draw.standard_normal(500))
        drive.push(k)
        return drive.pushes[-1][2]

    for _ in range(12):
        drive.start(10)
        for _ in range(9):
            for k in range(10):
                drive.start(k)
            whole = max(push(k) for k in range(10))
        late = push(10) / whole
    assert least - 0.01 < 90 * late < most + 0.01


@pytest.mark.parametrize("policy", [SaPS(), SaPS(noise=0.0)])
def test_no_known_time_weighs_no_gradient(policy: SaPS) -> None:
    """A rank's samples went to others while it computed; a step took no time."""
    resting = Drive(policy, [4, 4])
    resting.start(0)
    resting.core.replan(resting.now, [0, 8])
    resting.push(0)
    assert resting.pushes[-1][2] == 1.0
    resting.start(1)
    resting.push(1)
    assert resting.pushes[-1][2] == 1.0
    instant = Drive(policy, [4])
    for kind, values in ((EventKind.START, {}), (EventKind.PULL, {"version": 0})):
        instant.core.step(kind, 0, instant.now, **values)
    assert instant.core.push(0, instant.now, 0, 4, 0, 0.0).scale == 1.0
