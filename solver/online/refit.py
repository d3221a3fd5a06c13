"""OnlineCost estimates the cost of this device's steps from few measurements, with the profile as the prior.

    T(b) = d + f P(b)      P: the cost known before; at first the profile's, or proportional to b

At first the level f is free, and d, the error of the profile's fixed part, is kept small (ridge):
measurements of a single batch change the level and keep the profile's shape.

A different time at a batch that was measured before means that the device has changed. A small change may be
noise, so only a part of it is taken. A large change starts anew, with the current cost as P. One batch cannot
separate slope from intercept. Now d is adjusted first and f is kept near 1, because a co-tenant that takes
time once a step is as likely as one that takes time once a sample. The next, different batch corrects a wrong
guess, since two different batches determine both d and f.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pyps.solver.costs import Cost, Line, Table

CHANGE = 0.10  # relative, of a window's median: a larger change is not noise
FOLLOW = 0.3  # the part of a smaller change that is taken
NOISE = 0.01  # relative error of a window's median
FIXED = 0.3  # relative to T(b): how wrong the profile's fixed part may be
REMEMBERED, AGING = 6, 0.7  # batches, and the weight of each older batch relative to the next newer one
LEAST_SECONDS = 1e-9

PROPORTIONAL = Line(0.0, 1e-3)


class OnlineCost:
    """Takes in the median seconds of windows; plan with `cost`."""

    def __init__(self, prior: Cost | None = None) -> None:
        self.prior = PROPORTIONAL if prior is None else prior  # or the cost before the last change
        self.changed = False
        self.known: dict[int, float] = {}  # seconds by batch since then, the latest measured last
        self.level = 1.0  # how many times longer steps take than when they were first measured

    @property
    def cost(self) -> Cost:
        """The current estimate: the prior itself before the first measurement."""
        return refit(self.prior, self.known, self.changed)

    def observe(self, batch: int, seconds: float) -> None:
        """Take in one window: `seconds` of a step of `batch` samples."""
        if batch not in self.known:
            self.known[batch] = seconds
        elif abs(math.log(change := seconds / self.known[batch])) > CHANGE:
            self.prior, self.changed, self.known = self.cost, True, {batch: seconds}
            self.level *= change
        else:
            step = change**FOLLOW
            self.known = {b: s * step for b, s in self.known.items() if b != batch} | {
                batch: self.known[batch] * step
            }
            self.level *= step
        while len(self.known) > REMEMBERED:
            del self.known[next(iter(self.known))]

    @property
    def proportional(self) -> Cost:
        """The estimate if the last change takes time for each sample: as likely, until another batch is
        timed.
        """
        if not self.changed or len(self.known) != 1:
            return self.cost
        ((batch, seconds),) = self.known.items()
        return stretched(self.prior, 0.0, seconds / self.prior.seconds(batch))

    def renew(self, batch: int, seconds: float) -> None:
        """Take in a step after a time without any.

        Where it is none of what was expected, the device is another one: each batch's cost changes as this
        one's.
        """
        expected = (self.cost.seconds(batch), self.proportional.seconds(batch))
        if (1 - CHANGE) * min(expected) <= seconds <= (1 + CHANGE) * max(expected):
            self.observe(batch, seconds)
            return
        self.level *= seconds / self.cost.seconds(batch)
        self.prior = stretched(self.prior, 0.0, seconds / self.prior.seconds(batch))
        self.changed, self.known = True, {}


def refit(prior: Cost, known: Mapping[int, float], changed: bool = False) -> Cost:
    """The d + f P(b), f > 0, nearest to the known seconds by batch, the latest last: ridge least squares.

    changed: keep f near 1, because the prior's level was right; otherwise keep d near 0.
    """
    points = [(b, s) for b, s in known.items() if math.isfinite(prior.seconds(b))]
    if not points:
        return prior
    seconds = np.array([s for _, s in points])
    shape = np.array([prior.seconds(b) for b, _ in points])
    weight = np.sqrt(AGING ** np.arange(len(points))[::-1])
    rigid = NOISE / FIXED
    ridge = [0.0, rigid, rigid] if changed else [rigid / seconds[-1], 0.0, 0.0]
    rows = np.vstack([np.column_stack([weight / seconds, weight * shape / seconds, weight]), ridge])
    d, f = np.linalg.lstsq(rows[:, :2], rows[:, 2], rcond=None)[0]
    if not f > 0:  # a larger batch was faster: keep the profile's shape at the latest level
        d, f = 0.0, seconds[-1] / shape[-1]
    return stretched(prior, float(d), float(f))


def at_least(cost: Cost, seconds: float) -> Cost:
    """The cost, but never less than so many seconds."""
    if isinstance(cost, Table):
        return Table(tuple((b, max(seconds, s)) for b, s in cost.points))
    return replace(cost, floor_seconds=max(seconds, cost.floor_seconds))


def stretched(cost: Cost, fixed_seconds: float, factor: float) -> Cost:
    """fixed_seconds + factor * cost, never below a nanosecond."""
    if isinstance(cost, Table):
        points = ((b, max(fixed_seconds + factor * s, LEAST_SECONDS)) for b, s in cost.points)
        return Table(tuple(points))
    floor = max(fixed_seconds + factor * cost.floor_seconds, LEAST_SECONDS)
    c, a = fixed_seconds + factor * cost.fixed_seconds, factor * cost.per_sample_seconds
    return replace(cost, fixed_seconds=c, per_sample_seconds=a, floor_seconds=floor)
