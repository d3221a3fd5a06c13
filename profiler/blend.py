"""Blends a fitted form with the points: the curve follows them near measured batches, and the form far away.

The second of three files: pyps.profiler.curve calls it with what pyps.profiler.fit fitted.

The measured times over the fitted ones, in logarithms, are taken as a random walk along log b plus noise:

    log(measured / fitted) = level + walk(log b) + noise

How far the walk goes in an e-fold of b, and how large the noise is, are estimated from the points together
(the most probable pair, with broad priors). Points that are few, or agree, are passed through; many scattered
ones are smoothed. Between two points the curve is straight; or, where that proves better or few points prove
nothing, of the form's shape, its ratio moving evenly from one to the other. Past the last point the ratio
stays, so that noise in the last points cannot tilt the curve. (The model is kriging with a trend, as
geostatistics uses it; its application to step times is ours.)

A batch that takes longer than both neighbours say counts as disturbed and is smoothed away. On both sides of
a cliff the neighbours contradict each other instead, and no disturbance saves time: both are believed. One at
an end has only one neighbour, and is believed, too.

Below the smallest measured batch a device may be faster or may be not. The curve counts on a small part of
what the form promises there (HEDGE): a plan that relies on an unmeasured gain loses much if it is wrong.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import needed
from pyps.profiler.fit import Fitted, Form, Vector, soft_l1
from pyps.profiler.statistics import SIGMA_PER_MAD

HEDGE = 0.15  # of a gain below the smallest measured batch, the part that is counted on
BETWEEN = 3  # knots between two measured batches, where the curve is no straight line there
BELOW = 5  # knots below the first measured batch
WALKS = np.geomspace(1e-4, 3.0, 14)  # variances of the walk in an e-fold of b
NOISES = np.geomspace(1e-3, 0.3, 12)  # standard deviations of the noise
FEW, LITTLE_NOISE = 12, 0.01  # so few points cannot tell noise from a curve's own shape: they are believed
USUAL_WALK, WALK_SPREAD = 0.02, 2.0  # prior: log-normal
USUAL_NOISE, NOISE_SPREAD = 0.02, 0.8
LEVEL = 0.1  # prior standard deviation of the level
DISTURBED = 6.0  # standard deviations from what both neighbours say
ALONE = 1.5  # times its neighbours' own distance: a disturbed point is twice as far off, a cliff's as far
LEAST_DISTURBANCE = 0.03  # relative: the least scatter that is taken as ordinary
JUDGED_FROM = 5  # points: with fewer, none can be called disturbed
SHAPE_GAIN = 0.8  # of the loss of straight lines between the points: the form's shape must reduce it to this


@dataclass(frozen=True)
class Walk:
    """An estimated walk: its variance in an e-fold, the noise, and which points count little."""

    variance: float
    noise: float
    discount: Vector  # by how much each point's noise variance is multiplied

    def without(self, index: int) -> Walk:
        """The same walk for the points but one."""
        return replace(self, discount=np.delete(self.discount, index))

    @property
    def doubling_error(self) -> float:
        """The standard deviation of log T at twice the last batch."""
        return math.sqrt(self.noise**2 + self.variance * math.log(2))


@dataclass(frozen=True)
class Blend:
    """A form blended with measured ratios at the logarithms `at` of their batches. ratio: of the curve."""

    form: Form
    at: Vector
    walk: Walk
    weights: Vector

    @staticmethod
    def of(form: Form, batches: Vector, seconds: Vector, walk: Walk) -> Blend:
        """The blend of points with ascending batches."""
        at = np.log(batches)
        ratios = np.log(seconds / form(batches))
        covariance = _covariance(at, at, walk.variance) + np.diag(walk.noise**2 * walk.discount)
        weights: Vector = np.linalg.solve(covariance, ratios).astype(np.float64)
        return Blend(form, at, walk, weights)

    def ratio(self, batches: Vector) -> Vector:
        """The curve over the form, at batches of at least 1."""
        where = np.clip(np.log(batches), self.at[0], self.at[-1])
        return np.exp(_covariance(where, self.at, self.walk.variance) @ self.weights)

    def seconds(self, batches: Vector) -> Vector:
        """The curve at batches of at least 1."""
        return self.form(batches) * self.ratio(batches)


@dataclass(frozen=True)
class Blended:
    """A form blended with the points that it was fitted to.

    shaped: between two points the curve has the form's shape, as that errs clearly less than a straight line,
    or points are few. misses: relative errors at the batches left out.
    """

    fitted: Fitted
    blend: Blend
    shaped: bool
    misses: Vector

    @staticmethod
    def of(fitted: Fitted, usual_noise: float) -> Blended:
        """Blend, and judge the blend by each point that was left out."""
        walk = estimated(fitted.form, fitted.batches, fitted.seconds, usual_noise)
        curved, straight, last = [], [], len(fitted.batches) - 1
        for k, form in zip(fitted.left_out, fitted.others, strict=True):
            x, y = np.delete(fitted.batches, k), np.delete(fitted.seconds, k)
            here, seconds = fitted.batches[[k]], fitted.seconds[k]
            blend = Blend.of(form, x, y, walk.without(int(k)))
            curved.append(float(blend.seconds(here)[0]) / seconds - 1)
            ends = x[max(0, k - 1) : k + 1]
            line = float(np.interp(here[0], ends, blend.seconds(ends))) / seconds - 1
            straight.append(line if 0 < k < last else curved[-1])
        of_form, of_lines = np.array(curved), np.array(straight)
        few = len(fitted.batches) < JUDGED_FROM
        shaped = few or soft_l1(of_form) < SHAPE_GAIN * soft_l1(of_lines)
        whole = Blend.of(fitted.form, fitted.batches, fitted.seconds, walk)
        return Blended(fitted, whole, shaped, of_form if shaped else of_lines)

    def knots(self, corners: Vector) -> list[tuple[int, float]]:
        """A nondecreasing polygon from batch 1 to the last measured one, through these batches too."""
        form, measured = self.fitted.form, self.fitted.batches
        inside = _between(measured) if self.shaped else measured
        batches = np.unique(np.concatenate([measured, inside, corners]))
        seconds = monotone_polygon(self.blend.seconds(batches))
        below = np.unique(np.geomspace(1, measured[0], BELOW + 1).round()[:-1])
        below = below[below < measured[0]]
        share = np.minimum(1.0, form(below) / form(measured[:1]))
        hedged = seconds[0] * (1 - HEDGE * (1 - share))
        both = zip([*below, *batches], [*hedged, *seconds], strict=True)
        return [(int(batch), float(time)) for batch, time in both]


def _between(measured: Vector) -> Vector:
    """Some batches between each two measured ones, evenly on a log scale."""
    gaps = [np.geomspace(low, high, BETWEEN + 2) for low, high in itertools.pairwise(measured)]
    return np.unique(np.concatenate(gaps).round())


def estimated(form: Form, batches: Vector, seconds: Vector, usual_noise: float) -> Walk:
    """The most probable walk and noise of points about a form. usual_noise: the prior's middle."""
    at, ratios = np.log(batches), np.log(seconds / form(batches))
    discount = _discounts(at, ratios)
    noises = NOISES if len(at) >= FEW else NOISES[NOISES <= LITTLE_NOISE]
    best, found = -math.inf, Walk(WALKS[0], noises[0], discount)
    for variance in WALKS:
        covariance = _covariance(at, at, variance)
        for noise in noises:
            factor = np.linalg.cholesky(covariance + np.diag(noise**2 * discount))
            white = np.linalg.solve(factor, ratios)
            odds = -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum())
            odds -= 0.5 * (math.log(noise / usual_noise) / NOISE_SPREAD) ** 2
            odds -= 0.5 * (math.log(variance / USUAL_WALK) / WALK_SPREAD) ** 2
            if odds > best:
                best, found = odds, Walk(float(variance), float(noise), discount)
    return found


def _covariance(one: Vector, other: Vector, variance: float) -> Vector:
    """Return the covariance at two sets of places: that of a random walk with an unknown start."""
    span = max(float(other[-1] - other[0]), 0.0) + 1.0
    apart = np.abs(one[:, None] - other[None, :])
    found: Vector = variance * (span - apart) / 2 + LEVEL**2
    return found


def _discounts(at: Vector, ratios: Vector) -> Vector:
    """1 for a point that counts in full; much more for one that takes longer than both neighbours say."""
    discount = np.ones(len(at))
    if len(at) < JUDGED_FROM:
        return discount
    part = (at[1:-1] - at[:-2]) / (at[2:] - at[:-2])
    away = ratios[1:-1] - ((1 - part) * ratios[:-2] + part * ratios[2:])
    ordinary = max(SIGMA_PER_MAD * float(np.median(np.abs(away))), LEAST_DISTURBANCE)
    for k in np.flatnonzero(away > DISTURBED * ordinary):
        near = np.abs(np.concatenate([away[max(0, k - 1) : k], away[k + 1 : k + 2]]))
        if away[k] >= ALONE * near.max():
            discount[k + 1] = 1e4
    return discount


def monotone_polygon(seconds: Vector) -> Vector:
    """The nondecreasing values nearest to the measured ones in relative terms: pool adjacent violators."""
    isotonic_regression = needed("scipy.optimize", "plan").isotonic_regression

    pooled: Vector = np.exp(isotonic_regression(np.log(seconds)).x)
    return pooled
