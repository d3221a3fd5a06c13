"""Medians of repeated measurements, with standard errors that outliers do not move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

SIGMA_PER_MAD = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
MEDIAN_EFFICIENCY = 1.2533  # standard error of a normal sample's median over that of its mean


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The median and its relative standard error, from the median absolute deviation.

    The error is that of a normal sample, 1.2533 sigma / sqrt(n) with sigma = 1.4826 MAD. values: one or more,
    with a median that is not 0.
    """
    middle = median(values)
    sigma = robust_sigma(values, middle)
    return middle, MEDIAN_EFFICIENCY * sigma / math.sqrt(len(values)) / middle


def robust_sigma(values: Sequence[float], middle: float) -> float:
    """The standard deviation about `middle`, from the median absolute deviation."""
    return SIGMA_PER_MAD * median(abs(value - middle) for value in values)


def spread(values: Sequence[float]) -> float:
    """The interquartile range, relative to the median; 0 for a single value."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / middle)
