"""Models how a worker's step times scatter about its fit, and forecasts a plan for a quantile of them.

The noise is log-normal: mu is the median of log(measured / fitted seconds), sigma the median distance from
mu, scaled to a standard deviation. A few outliers move neither. The q-quantile of a worker's time at any
batch is then its fitted time multiplied by exp(mu + sigma * z_q), so a plan for a quantile solves the same
problem with longer times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np

from pyps.formats import Forecast, Point
from pyps.solver.constrained import ConstrainedProblem, evaluate
from pyps.solver.costs import Cost, Ints

FEWEST_TIMES = 3  # measured seconds without which there is no noise estimate
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
    """Whether there are too few timings to estimate noise."""
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


def forecast(
    nominal: ConstrainedProblem, robust: ConstrainedProblem, batches: Ints, noise: Sequence[Noise]
) -> Forecast:
    """The seconds of a split by the fitted times and at the quantile, and its chance to finish by the latter.

    nominal: the problem with fitted times. robust: the same problem with every time at the quantile. noise:
    of each worker, assumed independent.
    """
    fitted, at_quantile = evaluate(nominal, batches), evaluate(robust, batches)
    left = at_quantile.longest_seconds - at_quantile.sync_seconds
    overlap = robust.problem.costs.overlap
    overlapped = np.zeros(len(batches), bool) if overlap is None else overlap > 0
    chance = 1.0
    for k in np.flatnonzero(batches > 0).tolist():
        added = 0.0 if overlapped[k] else float(fitted.link_seconds[k])
        chance *= noise[k].chance((left - added) / float(fitted.seconds[k]))
    return Forecast(
        batches=batches.tolist(),
        seconds=fitted.iteration_seconds,
        quantile_seconds=at_quantile.iteration_seconds,
        chance=chance,
    )
