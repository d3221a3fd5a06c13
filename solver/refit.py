"""OnlineCost: what this device's steps take now, from few measurements and the profile as the prior.

    T(b) = d + f P(b)      P the profile's cost; without one, seconds in proportion to the batch

The level f is free; d, what the profile has wrong in its fixed part, is kept small unless measurements say
otherwise (ridge). One batch alone so changes the level and leaves the shape to the profile; two unlike ones
determine both.

A change at a batch that was measured before is the device's: it is slower or faster, by so much, and
everything known of it with it. A large one is taken at once, a small one, which may be noise, in part.
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
        self.prior = PROPORTIONAL if prior is None else prior
        self.known: dict[int, float] = {}  # seconds by batch, the latest measured last, all at today's level
        self.level = 1.0  # how many times longer steps take than when they were first measured

    @property
    def cost(self) -> Cost:
        """The cost as it is believed now: the prior itself before anything was measured."""
        return refit(self.prior, self.known)

    def observe(self, batch: int, seconds: float) -> None:
        """Take in one window: `seconds` of a step of `batch` samples."""
        if batch in self.known:
            change = seconds / self.known.pop(batch)
            step = change if abs(math.log(change)) > CHANGE else change**FOLLOW
            before = seconds / change
            self.level *= step
            self.known = {b: s * step for b, s in self.known.items()} | {batch: before * step}
        else:
            self.known[batch] = seconds
        while len(self.known) > REMEMBERED:
            del self.known[next(iter(self.known))]


def refit(prior: Cost, known: Mapping[int, float]) -> Cost:
    """The d + f P(b), f > 0, nearest to the known seconds by batch, the latest last: ridge least squares."""
    points = [(b, s) for b, s in known.items() if math.isfinite(prior.seconds(b))]
    if not points:
        return prior
    seconds = np.array([s for _, s in points])
    shape = np.array([prior.seconds(b) for b, _ in points])
    weight = np.sqrt(AGING ** np.arange(len(points))[::-1])
    ridge = NOISE / FIXED / seconds[-1]
    rows = np.column_stack([weight / seconds, weight * shape / seconds])
    d, f = np.linalg.lstsq(np.vstack([rows, [ridge, 0.0]]), np.append(weight, 0.0), rcond=None)[0]
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
