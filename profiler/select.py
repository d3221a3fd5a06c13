"""Selects a device's cost model: a simple form where that explains the points, else a curve through them.

    affine   T(b) = c + a b
    knee     T(b) = max(t0, c + a b)
    table    a nondecreasing polygon: the form blended with the points (pyps.profiler.blend)

The blend is believed first. A form is kept only if it misses no measured batch by more than 10 %, predicts
batches left out as well as the blend or nearly exactly, and promises little gain below the smallest measured
batch, unless four batches prove it.
(The forms other than the line, and this rule, are ours.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyps.formats import Fit, Point, Profile
from pyps.profiler.blend import USUAL_NOISE, Blend, Form, Walk, estimated, thinned
from pyps.profiler.fit import (
    LEFT_OUT_LIMIT,
    NOISE_CEILING,
    TRUST_TOLERANCE,
    fit_points,
    medians_of,
    point_seconds,
    predict_seconds,
    r2_of,
    refitted,
    soft_l1,
    trusted_range,
)
from pyps.profiler.statistics import median_and_error

GOOD_ENOUGH = 0.02  # a form with a smaller error at batches left out is kept
UNMEASURED_GAIN = 0.25  # of the smallest measured time: a form that promises more below needs proof
CONFIRMING = 4  # batches on a form that prove it, also below the smallest
LEAST_NOISE = 0.003  # relative: repeats of a batch say nothing of what differs from batch to batch
NORMAL_90 = 1.645  # standard deviations to each side of 90 % of normal errors

Vector = NDArray[np.float64]
Kind = Literal["affine", "knee"]


def select_fit(points: Sequence[Point]) -> Fit:
    """Fits a profile's points with the model that predicts best, and adds a band of its uncertainty.

    `band` has (batch, low, high) for each measured batch: where 90 % of the times of batches between these
    lie, by the errors at batches left out; None with two batches. Raises InputError as fit_points does.
    """
    measured = [(p.batch, s) for p in points for s in point_seconds(p)]
    fit = fit_points(measured)
    batches, seconds = _bunched(*medians_of(measured))
    kind: Kind = "knee" if fit.kind == "knee" else "affine"
    form = refitted(kind, batches, seconds)
    walk = estimated(form, batches, seconds, _usual_noise(points))
    alone, followed = _misses(kind, walk, batches, seconds)
    blended = _needs_blend(fit, form, batches, seconds, alone, followed)
    if blended:
        fit = _blended(form, walk, batches, seconds, followed)
    band = _band(fit, followed if blended else alone, points)
    return msgspec.structs.replace(fit, doubling_error=walk.doubling_error, band=band)


def fit_of(profile: Profile) -> Fit:
    """The profile's fit, or else the fit of its points. Raises InputError if these cannot be fitted."""
    return profile.fit or select_fit(profile.points)


def _bunched(batches: Vector, seconds: Vector) -> tuple[Vector, Vector]:
    """The points, or medians of neighbours if they are very many."""
    bunches = thinned(len(batches))
    if len(bunches) == len(batches):
        return batches, seconds
    middles = [int(bunch[len(bunch) // 2]) for bunch in bunches]
    return batches[middles], np.array([np.median(seconds[bunch]) for bunch in bunches])


def _usual_noise(points: Sequence[Point]) -> float:
    """The relative error to expect of a batch's median: by its repeats, where there are any."""
    errors = [median_and_error(times)[1] for p in points if len(times := point_seconds(p)) > 2]
    return max(LEAST_NOISE, float(np.median(errors))) if errors else USUAL_NOISE


def _needs_blend(
    fit: Fit, form: Form, batches: Vector, seconds: Vector, alone: Vector, followed: Vector
) -> bool:
    """Whether the form alone does not do.

    form, fit: the form, and how it was judged. batches, seconds: the points. alone, followed: relative errors
    at batches left out, of the form and of the blend.
    """
    if np.abs(form(batches) / seconds - 1).max() > TRUST_TOLERANCE:
        return True
    good = (fit.leave_one_out_error or 0.0) <= GOOD_ENOUGH
    if good and len(batches) >= CONFIRMING:
        return False
    if 1 - float(form(np.ones(1))[0] / form(batches[:1])[0]) > UNMEASURED_GAIN:
        return True
    return not good and soft_l1(alone, NOISE_CEILING) > soft_l1(followed, NOISE_CEILING)


def _misses(kind: Kind, walk: Walk, batches: Vector, seconds: Vector) -> tuple[Vector, Vector]:
    """Relative errors at batches left out one by one: of the form, and of the blend. None of two batches."""
    alone, blended = [], []
    if len(batches) < 3:
        return np.empty(0), np.empty(0)
    for k in np.unique(
        np.linspace(0, len(batches) - 1, min(len(batches), LEFT_OUT_LIMIT)).round().astype(int)
    ):
        x, y, here = np.delete(batches, k), np.delete(seconds, k), batches[k : k + 1]
        form = refitted(kind, x, y)
        simple = float(form(here)[0] / seconds[k])
        alone.append(simple - 1)
        blended.append(simple * float(Blend.of(form, x, y, walk.without(int(k))).ratio(here)[0]) - 1)
    return np.array(alone), np.array(blended)


def _blended(form: Form, walk: Walk, batches: Vector, seconds: Vector, misses: Vector) -> Fit:
    """The fit whose table is the form blended with the points. misses: at batches left out."""
    blend = Blend.of(form, batches, seconds, walk)
    table = blend.knots()
    at = np.interp(batches, [b for b, _ in table], [s for _, s in table])
    low, high = trusted_range(batches, np.abs(at / seconds - 1))
    error = float(np.median(np.abs(misses))) if len(misses) else None
    last = batches[-1:]
    slope = float((form(2 * last) - form(last))[0] * blend.ratio(last)[0] / last[0])
    return Fit(
        kind="table",
        per_sample_seconds=max(0.0, slope),
        r2=r2_of(seconds, at),
        leave_one_out_error=error,
        trusted_min_batch=low,
        trusted_max_batch=high,
        table=table,
    )


def _band(fit: Fit, misses: Vector, points: Sequence[Point]) -> list[tuple[int, float, float]] | None:
    """The curve at the measured batches, times and over what 90 % of errors between these stay below.

    misses: at batches left out; those inside tell of gaps twice as wide as the ones between the points.
    """
    if not len(misses):
        return None
    inner = misses[1:-1] if len(misses) > 2 else misses
    off = math.exp(NORMAL_90 * float(np.sqrt(np.mean(np.log1p(inner) ** 2))))
    batches = sorted({point.batch for point in points})
    return [(b, predict_seconds(fit, b) / off, predict_seconds(fit, b) * off) for b in batches]
