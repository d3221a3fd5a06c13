"""How much a worker's times scatter about its fit, and a plan for a quantile of them.

The noise is fitted as log-normal: of the logarithms of measured by fitted seconds, the median and, scaled to
a standard deviation, the median distance from it, which a few outliers do not move. Then the q-quantile of a
worker's time at any batch is its fitted time multiplied by exp(shift + spread * z_q), and planning for it is
the same program with longer times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np

from pyps.formats import Forecast, Point
from pyps.solver.costs import Cost, Ints
from pyps.solver.milp.constrained import Coupled, valued

FEWEST_TIMES = 3  # measured seconds that say anything about noise
NORMAL_MAD = 0.6745  # the median distance from the median of a standard normal variable


@dataclass(frozen=True)
class Noise:
    """Median and standard deviation of log(measured / fitted)."""

    shift: float = 0.0
    spread: float = 0.0

    def factor(self, quantile: float) -> float:
        """What a fitted time is multiplied by to be this quantile, 0 < quantile < 1."""
        return math.exp(self.shift + self.spread * NormalDist().inv_cdf(quantile))

    def chance(self, ratio: float) -> float:
        """The probability that a time is at most `ratio` times the fitted one."""
        if ratio <= 0:
            return 0.0
        away = math.log(ratio) - self.shift
        return NormalDist().cdf(away / self.spread) if self.spread > 0 else float(away >= 0)


def too_few(points: Sequence[Point]) -> bool:
    """Whether there are too few timings to say anything about noise."""
    return sum(len(p.seconds) if isinstance(p.seconds, list) else 1 for p in points) < FEWEST_TIMES


def noise_of(points: Sequence[Point], cost: Cost) -> Noise:
    """The noise of measured points about a fitted cost; none where there are too few seconds to tell."""
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


def forecast(nominal: Coupled, robust: Coupled, batches: Ints, noise: Sequence[Noise]) -> Forecast:
    """What a split takes by the fitted times and by the quantile's; how likely all are done by the latter.

    Workers' noise is taken as independent. robust: the same program with every time at the quantile.
    """
    fitted, at_quantile = valued(nominal, batches), valued(robust, batches)
    left = at_quantile.iteration_seconds - at_quantile.sync_seconds
    chance = 1.0
    for k in np.flatnonzero(batches > 0).tolist():
        chance *= noise[k].chance((left - float(fitted.link_seconds[k])) / float(fitted.seconds[k]))
    return Forecast(
        batches=batches.tolist(),
        seconds=fitted.iteration_seconds,
        quantile_seconds=at_quantile.iteration_seconds,
        chance=chance,
    )
