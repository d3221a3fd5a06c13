"""Drift tells a device that drifts from one whose steps only scatter.

A local-level filter of the logarithm of a step's time runs for each of several rates of drift. Each rate is
believed as far as it foretold the windows; no drift is believed first. What is known of the time is the mean
of the filters, weighted by belief. A rate is the variance that a step adds over that of a step's scatter.
"""

from __future__ import annotations

import math

RATES = (0.0, 0.02, 0.1, 0.4)
UNUSUAL = 3.0  # log: how much less likely any drift is than none, before the first window
FORGOTTEN = 60.0  # steps after which what spoke for a rate counts e times less
MOST_ODD = 9.0  # squared standard errors: a window further off speaks no more clearly
CLEAR = 2  # the first of RATES that a few steps show


class Drift:
    """The filters. odds: of each rate, log. at, variances: of the log of the time, from what is believed."""

    def __init__(self) -> None:
        self.odds = [-UNUSUAL if rate else 0.0 for rate in RATES]
        self.at = [0.0] * len(RATES)
        self.variances = [1.0] * len(RATES)

    def begin(self, variance: float) -> None:
        """A time is known anew, with this variance; the rates are believed as before."""
        self.at, self.variances = [0.0] * len(RATES), [variance] * len(RATES)

    @property
    def _shares(self) -> list[float]:
        best = max(self.odds)
        weights = [math.exp(odds - best) for odds in self.odds]
        return [weight / sum(weights) for weight in weights]

    @property
    def rate(self) -> float:
        """The expected one."""
        return sum(share * rate for share, rate in zip(self._shares, RATES, strict=True))

    @property
    def clear(self) -> bool:
        """Return whether the device rather drifts, so that what is known of it is soon out of date."""
        return sum(self._shares[CLEAR:]) > 0.5

    def take(
        self, off: float, steps: float, noise: float, scatter: float, learns: bool
    ) -> tuple[float, float]:
        """By how much the log of the time has moved, and its variance, after a window.

        off: the log of the window's time over what is known. noise, scatter: variances of the window and of a
        step. learns: whether the scatter is known well enough to tell rates from it.
        """
        kept = math.exp(-steps / FORGOTTEN)
        for k, rate in enumerate(RATES):
            predicted = self.variances[k] + rate * scatter * steps
            whole, surprise = predicted + noise, off - self.at[k]
            first = -UNUSUAL if rate else 0.0
            likelihood = -0.5 * (min(surprise**2 / whole, MOST_ODD) + math.log(whole)) if learns else 0.0
            self.odds[k] = first + kept * (self.odds[k] - first) + likelihood
            self.at[k] += predicted / whole * surprise
            self.variances[k] = predicted * noise / whole
        best, shares = max(self.odds), self._shares
        moved = sum(share * at for share, at in zip(shares, self.at, strict=True))
        self.odds, self.at = [odds - best for odds in self.odds], [at - moved for at in self.at]
        each = zip(shares, self.variances, self.at, strict=True)
        return moved, sum(share * (variance + at**2) for share, variance, at in each)
