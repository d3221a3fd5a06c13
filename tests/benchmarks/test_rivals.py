"""benchmarks/papers/rivals.py: each rival's rounds are those of its definition."""

from __future__ import annotations

from itertools import islice

import papers_rivals
import pytest
import rivals
import tuning
from digits_mlp import Digits

from pyps import Hyper
from pyps.formats import Jitter
from pyps.simulate import Result, Scenario, SimWorker, simulate

TIMES = 1.0, 1.5, 3.0, 4.0
JITTER = Jitter(sigma=0.4)


def cluster(jitter: Jitter = JITTER) -> Scenario:
    costs = [lambda b, t=t: t * (0.02 + 0.005 * b) for t in TIMES]
    return Scenario(tuple(SimWorker(f"w{k}", 12, cost, jitter) for k, cost in enumerate(costs)))


def devices(jitter: Jitter = JITTER) -> list[rivals.Device]:
    return [rivals.Device(worker, 1, k) for k, worker in enumerate(cluster(jitter).workers)]


def trained(policy: str, *, rival: bool) -> Result:
    train = rivals.train if rival else simulate
    return train(
        cluster(),
        policy,
        iterations=12,
        seed=3,
        seconds=1e9,
        objective=Digits(3),
        lr=Hyper(lr=1.0),
        optimizer="sgd",
        target_loss=0.0,
        measure_every=48,
    )


def test_k_async_with_one_gradient_is_asp() -> None:
    """But for the worker that has the first samples."""
    ours, theirs = trained("k-async:k=1", rival=True), trained("asp", rival=False)
    assert ours.staleness == theirs.staleness
    assert [(n, pytest.approx(at, rel=1e-6)) for at, n, _ in theirs.curve] == [
        (n, at) for at, n, _ in ours.curve
    ]


def test_coding_for_no_straggler_is_bsp() -> None:
    ours, theirs = trained("coded:k=0", rival=True), trained("bsp", rival=False)
    assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-6)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)


def test_coding_waits_for_all_but_k_who_compute_k_plus_one_times_as_much() -> None:
    one = next(rivals.coded(devices(Jitter()), 2))
    takes = sorted(t * (0.02 + 0.005 * 36) for t in TIMES)
    assert (one.seconds, one.samples, one.left_out) == (pytest.approx(takes[1]), 48, 2)


def test_an_anytime_round_has_what_fits_in_it() -> None:
    one = next(rivals.anytime(devices(Jitter()), 0.5))
    assert one.seconds == pytest.approx(0.16)
    assert one.samples == sum(int((0.16 / t - 0.02) / 0.005 + 1e-9) for t in TIMES)


def test_reassigned_samples_end_sooner_and_nearly_together() -> None:
    """No round is longer than the slowest worker's own share, nor shorter than perfectly divided work."""
    helped, alone, saved = devices(), devices(), 0.0
    for one in islice(rivals.flexrr(helped, 0.0), 20):
        factors = [d.factor() for d in alone]
        shares = [f * d.cost(d.batch) for f, d in zip(factors, alone, strict=True)]
        rates = [1 / (f * t * 0.005) for f, t in zip(factors, TIMES, strict=True)]
        assert 48 / sum(rates) <= one.seconds <= max(shares)
        saved += 1 - one.seconds / max(shares)
    assert saved > 0.25 * 20


def test_each_rival_can_wait_for_a_worker() -> None:
    for rival in papers_rivals.RIVALS:
        assert rival.ladder(4)
        assert tuning.Competitor.ladder(rival, 4)[-1] not in ("coded:k=4", "k-async:k=4")
