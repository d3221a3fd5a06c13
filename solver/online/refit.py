"""OnlineCost: what this device's steps take now, from few measurements and the profile as the prior.

    T(b) = d + f P(b)      P the cost as it was known before; at first the profile's, or in proportion to b

At first the level f is free, and d, what the profile has wrong in its fixed part, is kept small (ridge): one
batch alone changes the level and leaves the shape to the profile.

A change at a batch that was measured before is the device's. A large one (a small one may be noise, and is
taken in part) begins anew: P is then the cost before it. One sample cannot tell slope from intercept, and now
the intercept d is charged first, f being kept near 1: who shares a device asks for its time once a step as
often as once a sample, and if that was wrong, the next batch, an unlike one, says so. Two unlike batches
determine both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pyps.solver.costs import Cost, Line, Table

CHANGE = 0.10  # of a window's median: more is no noise
FOLLOW = 0.3  # the part of a smaller change that is taken
NOISE, FIXED = (
    0.01,
    0.3,
)  # relative: of a window's median; of T(b), how far off the profile's fixed part may be
REMEMBERED, AGING = 6, 0.7  # batches, and the weight of each next older one
LEAST_SECONDS = 1e-9

PROPORTIONAL = Line(0.0, 1e-3)


class OnlineCost:
    """Fed with the median seconds of windows; `cost` is what to plan with."""

    def __init__(self, prior: Cost | None = None) -> None:
        self.prior = PROPORTIONAL if prior is None else prior  # or the cost before the last change
        self.changed = False
        self.known: dict[int, float] = {}  # seconds by batch since then, the latest measured last
        self.level = 1.0  # how many times longer steps take than when they were first measured

    @property
    def cost(self) -> Cost:
        """The cost as it is believed now: the prior itself before anything was measured."""
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


def refit(prior: Cost, known: Mapping[int, float], changed: bool = False) -> Cost:
    """The d + f P(b), f > 0, nearest to the known seconds by batch, the latest last: ridge least squares.

    changed: the prior's level was right, so that f is kept near 1; otherwise d is kept near 0.
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
    if not f > 0:  # longer for less: the shape is the profile's, the level of the latest
        d, f = 0.0, seconds[-1] / shape[-1]
    return stretched(prior, float(d), float(f))


def stretched(cost: Cost, fixed_seconds: float, factor: float) -> Cost:
    """fixed_seconds + factor * cost, never below a nanosecond."""
    if isinstance(cost, Table):
        points = ((b, max(fixed_seconds + factor * s, LEAST_SECONDS)) for b, s in cost.points)
        return Table(tuple(points))
    floor = max(fixed_seconds + factor * cost.floor_seconds, LEAST_SECONDS)
    c, a = fixed_seconds + factor * cost.fixed_seconds, factor * cost.per_sample_seconds
    return replace(cost, fixed_seconds=c, per_sample_seconds=a, floor_seconds=floor)
