"""The noise of measurements: recovered from its own model, not moved by outliers, and quantiles of it."""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec
import numpy as np
import pytest

from pyps.formats import Cluster, Device, Fit, ModelInfo, Plan, Point, Profile
from pyps.solver.constrained import ConstrainedProblem
from pyps.solver.costs import Costs, Line, Table
from pyps.solver.exact.minmax import Problem
from pyps.solver.noise import Noise, iteration_quantile, noise_of
from pyps.solver.plan import make_plan
from pyps.solver.sync import Sync

LINE = Line(0.01, 0.001)


def measured(sigma: float, count: int = 400) -> list[Point]:
    luck = np.random.default_rng(0)
    return [
        Point(batch=b, seconds=(LINE.seconds(b) * np.exp(sigma * luck.standard_normal(count))).tolist())
        for b in (8, 64)
    ]


def test_the_noise_comes_back() -> None:
    found = noise_of(measured(0.1), LINE)
    assert found.sigma == pytest.approx(0.1, rel=0.1)
    assert found.mu == pytest.approx(0.0, abs=0.01)


def test_outliers_do_not_move_it() -> None:
    points = [*measured(0.1), Point(batch=8, seconds=[50.0] * 20)]
    assert noise_of(points, LINE).sigma == pytest.approx(0.1, rel=0.15)


def test_a_quantile_is_met_as_often_as_it_says() -> None:
    noise = noise_of(measured(0.2), LINE)
    seconds = [s for p in measured(0.2) for s in np.atleast_1d(p.seconds) / LINE.seconds(p.batch)]
    for quantile in (0.1, 0.5, 0.9, 0.99):
        share = float(np.mean(np.array(seconds) <= noise.factor(quantile)))
        assert share == pytest.approx(quantile, abs=0.03)
        assert noise.chance(noise.factor(quantile)) == pytest.approx(quantile)


def test_too_few_times_have_no_noise() -> None:
    assert noise_of([Point(batch=8, seconds=1.0), Point(batch=9, seconds=2.0)], LINE) == Noise()
    assert Noise().factor(0.99) == 1.0
    assert (Noise().chance(1.0), Noise().chance(0.99), Noise().chance(0.0)) == (1.0, 0.0, 0.0)


def test_points_past_a_tables_end_say_nothing() -> None:
    points = [Point(batch=b, seconds=[1.0, 1.1, 1.2]) for b in (1, 50)]
    assert math.isfinite(noise_of(points, Table(((1, 1.0), (2, 1.5)))).sigma)


def noisy(seconds_a_sample: float, sigma: float) -> Profile:
    """A profile of a line whose times scatter by sigma, at even quantiles of a normal distribution."""
    scatter = np.exp(sigma * np.array([NormalDist().inv_cdf((k + 0.5) / 99) for k in range(99)]))
    points = [Point(batch=b, seconds=((0.01 + seconds_a_sample * b) * scatter).tolist()) for b in (1, 8, 64)]
    fit = Fit(
        kind="affine",
        fixed_seconds=0.01,
        per_sample_seconds=seconds_a_sample,
        trusted_min_batch=1,
        trusted_max_batch=64,
    )
    return Profile(device=Device(name="d"), model=ModelInfo(name="m"), points=points, fit=fit)


def at_95(profiles: list[Profile], count: int, global_batch: int) -> Plan:
    """The plan for the 0.95 quantile, of `count` workers with each profile."""
    groups = [{"name": f"g{k}", "count": count, "profile": "p"} for k in range(len(profiles))]
    raw = {"job": {"global_batch": global_batch, "quantile": 0.95}, "worker": groups}
    return make_plan(msgspec.convert(raw, Cluster), profiles)


def test_a_quantile_is_of_the_iteration_however_many_workers_there_are() -> None:
    sigma = np.repeat([0.1, 0.02], 32)
    plan = at_95([noisy(0.001, 0.1), noisy(0.002, 0.02)], 32, 4096)
    batches = np.array([worker.batch for worker in plan.workers])
    fitted = 0.01 + np.repeat([0.001, 0.002], 32) * batches
    drawn = fitted * np.exp(sigma * np.random.default_rng(0).standard_normal((10_000, 64)))
    assert np.mean(drawn.max(1) <= plan.iteration_seconds) == pytest.approx(0.95, abs=0.01)
    assert plan.noise is not None
    assert plan.noise.robust.chance == pytest.approx(0.95)
    assert plan.noise.nominal.chance < 0.8


@pytest.mark.parametrize("sigmas", [(0.3, 0.05, 0.0), (0.1, 0.1, 0.1), (0.02, 0.4, 0.2)])
def test_the_split_is_nearly_the_best_for_the_quantile(sigmas: tuple[float, ...]) -> None:
    profiles = [noisy(a, sigma) for a, sigma in zip((0.001, 0.002, 0.004), sigmas, strict=True)]
    noise = [noise_of(p.points, Line(0.01, a)) for p, a in zip(profiles, (0.001, 0.002, 0.004), strict=True)]
    problem = Problem.of(Costs.lines(0.01, [0.001, 0.002, 0.004]), 60)
    nominal = ConstrainedProblem(problem, Sync.of("none", 3))
    best = min(
        iteration_quantile(nominal, np.array([a, b, 60 - a - b]), noise, 0.95)
        for a in range(20, 46, 2)
        for b in range(8, 61 - a, 2)
    )
    assert at_95(profiles, 1, 60).noise.robust.quantile_seconds <= 1.03 * best  # type: ignore[union-attr]
