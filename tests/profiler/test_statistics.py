"""The median and its error: of a normal sample, and where outliers are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pyps.profiler.statistics import median_and_error, robust_sigma


def test_the_error_is_that_of_a_normal_samples_median() -> None:
    luck = np.random.default_rng(0)
    medians, errors = zip(
        *(median_and_error(luck.normal(10.0, 1.0, 101).tolist()) for _ in range(500)), strict=True
    )
    assert float(np.mean(medians)) == pytest.approx(10.0, abs=0.02)
    assert float(np.mean(errors)) == pytest.approx(float(np.std(medians)) / 10.0, rel=0.1)


def test_outliers_do_not_move_it() -> None:
    values = [1.0, 1.1, 0.9, 1.05, 0.95]
    middle, error = median_and_error([*values, 50.0, 0.01])
    assert middle == 1.0
    assert error == pytest.approx(1.2533 * 1.4826 * 0.1 / math.sqrt(7))
    assert robust_sigma(values, 1.0) == pytest.approx(1.4826 * 0.05)


def test_a_single_value_has_no_error() -> None:
    assert median_and_error([2.0]) == (2.0, 0.0)
