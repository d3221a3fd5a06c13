"""Selects a device's cost model: the simplest one that predicts batches left out of the fit.

    affine   T(b) = c + a b
    knee     T(b) = max(t0, c + a b)
    convex   a convex, nondecreasing polygon through the measured batches: devices that get less efficient
    table    a nondecreasing polygon: any other device

Each model is judged by leaving out every batch in turn. A richer model replaces a simpler one only if it
clearly reduces that loss: with ten points a table explains everything and predicts little. (The forms other
than the line, and this rule, are ours.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.formats import Fit, Point, Profile
from pyps.profiler.fit import (
    KNEE_GAIN,
    NOISE_CEILING,
    fit_points,
    medians_of,
    point_seconds,
    predict_seconds,
    r2_of,
    refitted,
    soft_l1,
    trusted_range,
)

GOOD_ENOUGH = 0.02  # a line or a knee with a smaller error at batches left out is kept
RICH_MIN_BATCHES = 6  # a polygon needs more evidence than a line
RESAMPLES = 200
CONFIDENCE = 0.90

Vector = NDArray[np.float64]
Polygon = Callable[[Vector, Vector], Vector]  # batches, seconds -> seconds at those batches


@dataclass(frozen=True)
class _Candidate:
    kind: str
    misses: Vector  # relative errors at batches left out
    fitted: Vector


def select_fit(points: Sequence[Point]) -> Fit:
    """Fits a profile's points with the model that predicts best, and adds a band of its uncertainty.

    `band` has (batch, low, high) for each measured batch: 90 % of the fits to measurements resampled from
    those of each batch lie between low and high seconds (percentile bootstrap, seeded). It is None if every
    batch was measured once. Raises InputError as fit_points does.
    """
    measured = [(p.batch, s) for p in points for s in point_seconds(p)]
    fit = fit_points(measured)
    batches, seconds = medians_of(measured)
    if len(batches) >= RICH_MIN_BATCHES and (fit.leave_one_out_error or 0.0) > GOOD_ENOUGH:
        fit = _richer(fit, batches, seconds)
    return _with_band(fit, points)


def fit_of(profile: Profile) -> Fit:
    """The profile's fit, or else the fit of its points. Raises InputError if these cannot be fitted."""
    return profile.fit or select_fit(profile.points)


def _richer(fit: Fit, batches: Vector, seconds: Vector) -> Fit:
    """A polygon if it predicts batches left out clearly better, else `fit`."""
    simple = np.array([_simple_miss(fit.kind, batches, seconds, i) for i in range(len(batches))])
    best, loss = None, KNEE_GAIN * soft_l1(simple, NOISE_CEILING)
    for kind, polygon in (("convex", convex_polygon), ("table", monotone_polygon)):
        misses = np.array([_left_out(polygon, batches, seconds, i) for i in range(len(batches))])
        if (found := soft_l1(misses, NOISE_CEILING)) < loss:
            best, loss = _Candidate(kind, misses, polygon(batches, seconds)), KNEE_GAIN * found
    if best is None:
        return fit
    low, high = trusted_range(batches, np.abs(best.fitted / seconds - 1))
    return Fit(
        kind=best.kind,  # type: ignore[arg-type]
        r2=r2_of(seconds, best.fitted),
        leave_one_out_error=float(np.median(np.abs(best.misses))),
        trusted_min_batch=low,
        trusted_max_batch=high,
        table=[(int(b), float(s)) for b, s in zip(batches, best.fitted, strict=True)],
    )


def _simple_miss(kind: str, batches: Vector, seconds: Vector, index: int) -> float:
    """The relative error of the line or knee at the batch at `index`, fitted without it."""
    without = refitted(kind, np.delete(batches, index), np.delete(seconds, index))
    return without(float(batches[index])) / float(seconds[index]) - 1


def _left_out(polygon: Polygon, batches: Vector, seconds: Vector, index: int) -> float:
    """The relative error of a polygon at the batch at `index`, fitted without it."""
    x, y = np.delete(batches, index), np.delete(seconds, index)
    knots = [(int(b), float(s)) for b, s in zip(x, polygon(x, y), strict=True)]
    table = Fit(kind="table", table=knots, trusted_min_batch=1, trusted_max_batch=1)
    return predict_seconds(table, float(batches[index])) / float(seconds[index]) - 1


def convex_polygon(batches: Vector, seconds: Vector) -> Vector:
    """The convex, nondecreasing values at the batches with the least Huber loss of relative errors."""
    import cvxpy

    cp: Any = cvxpy  # cvxpy's types are incomplete

    x, scale = batches / batches[-1], float(np.median(seconds))
    y = seconds / scale
    values = cp.Variable(len(x))
    slopes = cp.multiply(cp.diff(values), 1 / np.diff(x))
    constraints = [slopes[0] >= 0, cp.diff(slopes) >= 0] if len(x) > 2 else [slopes >= 0]
    loss = cp.sum(cp.huber(cp.multiply(values, 1 / y) - 1, NOISE_CEILING))
    cp.Problem(cp.Minimize(loss), constraints).solve(solver=cp.CLARABEL)
    found: Vector = np.maximum.accumulate(np.asarray(values.value)) * scale  # against the solver's rounding
    return found


def monotone_polygon(batches: Vector, seconds: Vector) -> Vector:
    """The nondecreasing values nearest to the measured ones in relative terms: pool adjacent violators."""
    from scipy.optimize import isotonic_regression

    pooled: Vector = np.exp(isotonic_regression(np.log(seconds)).x)
    return pooled


def _with_band(fit: Fit, points: Sequence[Point]) -> Fit:
    """The fit with the band of its predictions: each resample refits the coefficients of the same kind."""
    import msgspec

    groups = [(p.batch, np.array(point_seconds(p))) for p in sorted(points, key=lambda p: p.batch)]
    if all(len(seconds) == 1 for _, seconds in groups):
        return fit
    luck = np.random.default_rng(0)
    batches = np.array([batch for batch, _ in groups], float)
    curves = []
    for _ in range(RESAMPLES):
        again = [float(np.median(luck.choice(seconds, len(seconds)))) for _, seconds in groups]
        curves.append(_refit(fit, batches, np.array(again)))
    low, high = np.quantile(curves, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    band = [(int(b), float(lo), float(hi)) for b, lo, hi in zip(batches, low, high, strict=True)]
    return msgspec.structs.replace(fit, band=band)


def _refit(fit: Fit, batches: Vector, seconds: Vector) -> Vector:
    """The refitted curve at the batches. A convex polygon is refitted as a monotone one, which is much
    faster.
    """
    if fit.kind in ("convex", "table"):
        return monotone_polygon(batches, seconds)
    again = refitted(fit.kind, batches, seconds)
    return np.array([again(b) for b in batches])
