"""Models how a worker's step times scatter about its fit, and forecasts a plan for a quantile of them.

The noise is log-normal: mu is the median of log(measured / fitted seconds), sigma the median distance from
mu, scaled to a standard deviation. A few outliers move neither. The q-quantile of a worker's time at any
batch is then its fitted time multiplied by exp(mu + sigma * z_q), so a plan for a quantile solves the same
problem with longer times.

An iteration ends with its slowest worker, so a quantile of the iteration asks more of each: the probabilities
of the workers in use, assumed independent, multiply to it. `levels` shares it out so that the same loss of
samples buys as much probability on every worker: noisy and fast workers get less, steady and slow ones more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np

from pyps.formats import Forecast, Point
from pyps.solver.constrained import ConstrainedProblem, ConstrainedSolution, evaluate
from pyps.solver.costs import Cost, Floats, Ints

FEWEST_TIMES = 3  # measured seconds without which there is no noise estimate
BISECTIONS = 60
Z_RANGE = (-6.0, 8.0)  # standard deviations from the median
LOG_PRICES = (-20.0, 60.0)
LEAST_WEIGHT = 1e-9  # of the most: a smaller one asks for no more certainty
NORMAL_MAD = 0.6745  # the median distance from the median of a standard normal variable


@dataclass(frozen=True)
class Noise:
    """Median mu and standard deviation sigma of log(measured / fitted)."""

    mu: float = 0.0
    sigma: float = 0.0

    def factor(self, quantile: float) -> float:
        """The factor from a fitted time to this quantile of it, 0 < quantile < 1."""
        return math.exp(self.mu + self.sigma * NormalDist().inv_cdf(quantile))

    def chance(self, ratio: float) -> float:
        """The probability that a time is at most `ratio` times the fitted one."""
        if ratio <= 0:
            return 0.0
        away = math.log(ratio) - self.mu
        return NormalDist().cdf(away / self.sigma) if self.sigma > 0 else float(away >= 0)


def too_few(points: Sequence[Point]) -> bool:
    """Return whether there are too few timings to estimate noise."""
    return sum(len(p.seconds) if isinstance(p.seconds, list) else 1 for p in points) < FEWEST_TIMES


def noise_of(points: Sequence[Point], cost: Cost) -> Noise:
    """The noise of measured points about a fitted cost; no noise if there are too few measurements."""
    ratios = [
        math.log(seconds / cost.seconds(point.batch))
        for point in points
        for seconds in (point.seconds if isinstance(point.seconds, list) else [point.seconds])
        if math.isfinite(cost.seconds(point.batch))
    ]
    if len(ratios) < FEWEST_TIMES:
        return Noise()
    middle = median(ratios)
    return Noise(middle, median(abs(ratio - middle) for ratio in ratios) / NORMAL_MAD)


def levels(quantile: float, noise: Sequence[Noise], samples_per_second: Floats) -> list[float]:
    """The quantile of each worker's times with which all are done with probability `quantile`.

    noise, samples_per_second: of each worker; the latter of more time for a larger batch.
    """
    weights = np.array([one.sigma for one in noise]) * samples_per_second
    noisy = np.flatnonzero(weights > 0)
    found = [quantile ** (1 / max(len(noisy), 1))] * len(noise)
    if len(noisy) < 2:
        return found
    relative = np.maximum(weights[noisy] / weights[noisy].max(), LEAST_WEIGHT).tolist()
    low, high = LOG_PRICES
    for _ in range(BISECTIONS):
        price = (low + high) / 2
        shares = [_level(price - math.log(weight)) for weight in relative]
        low, high = (price, high) if math.prod(shares) < quantile else (low, price)
    for k, weight in zip(noisy.tolist(), relative, strict=True):
        found[k] = _level(high - math.log(weight))
    return found


def _level(log_ratio: float) -> float:
    """The probability P with P / (the normal density there) = exp(log_ratio): the more, the dearer it is."""
    low, high = Z_RANGE
    normal = NormalDist()
    for _ in range(BISECTIONS):
        z = (low + high) / 2
        low, high = (z, high) if math.log(normal.cdf(z) / normal.pdf(z)) < log_ratio else (low, z)
    return normal.cdf(high)


def iteration_quantile(
    nominal: ConstrainedProblem, batches: Ints, noise: Sequence[Noise], quantile: float
) -> float:
    """The seconds within which an iteration of these batches ends with probability `quantile`.

    nominal: the problem with fitted times. noise: of each worker, assumed independent.
    """
    fitted = evaluate(nominal, batches)
    low, high = 0.0, fitted.longest_seconds
    while chance(nominal, fitted, noise, high) < quantile:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(nominal, fitted, noise, middle) < quantile else (low, middle)
    return high


def chance(
    nominal: ConstrainedProblem, fitted: ConstrainedSolution, noise: Sequence[Noise], seconds: float
) -> float:
    """The probability that an iteration of a solution ends within `seconds`.

    nominal: the problem with fitted times; fitted: the solution with them. noise: of each worker.
    """
    overlap = nominal.problem.costs.overlap
    left, found = nominal.sync.compute_by(seconds, nominal.sync.seconds(fitted.batches)), 1.0
    for k in np.flatnonzero(fitted.batches > 0).tolist():
        overlapped = overlap is not None and overlap[k] > 0
        added = 0.0 if overlapped else float(fitted.link_seconds[k])
        found *= noise[k].chance((left - added) / float(fitted.seconds[k]))
    return found


def forecast(
    nominal: ConstrainedProblem, batches: Ints, noise: Sequence[Noise], quantile: float, by: float
) -> Forecast:
    """The seconds of a split by the fitted times and at the iteration's quantile, and its chance to end by
    `by`.

    nominal: the problem with fitted times. noise: of each worker, assumed independent.
    """
    fitted = evaluate(nominal, batches)
    return Forecast(
        batches=batches.tolist(),
        seconds=fitted.iteration_seconds,
        quantile_seconds=iteration_quantile(nominal, batches, noise, quantile),
        chance=chance(nominal, fitted, noise, by),
    )
