"""The noise of measurements: recovered from its own model, not moved by outliers, and quantiles of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pyps.formats import Point
from pyps.solver.costs import Line, Table
from pyps.solver.noise import Noise, noise_of

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
