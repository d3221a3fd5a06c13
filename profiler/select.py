"""Selects a device's cost model: a simple form where that explains the points, else a curve through them.

    affine   T(b) = c + a b
    knee     T(b) = max(t0, c + a b)
    table    a nondecreasing polygon: the form blended with the points (pyps.profiler.blend)

A form is kept if it misses no measured batch by more than 10 %, predicts batches left out about as well as
the blend does, and promises little gain below the smallest measured batch, unless four batches prove it.
(The forms other than the line, and this rule, are ours.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyps.formats import Fit, Point, Profile
from pyps.profiler.blend import USUAL_NOISE, Blend, Form, Walk, estimated, thinned
from pyps.profiler.fit import (
    KNEE_GAIN,
    LEFT_OUT_LIMIT,
    NOISE_CEILING,
    TRUST_TOLERANCE,
    fit_points,
    medians_of,
    point_seconds,
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
RESAMPLES = 200
CONFIDENCE = 0.90

Vector = NDArray[np.float64]
Kind = Literal["affine", "knee"]


@dataclass(frozen=True)
class _Model:
    """How a device's points are fitted: the kind of the form, and the walk about it."""

    kind: Kind
    walk: Walk
    blended: bool

    def curve(self, batches: Vector, seconds: Vector) -> Vector:
        """At the batches, fitted to these seconds."""
        form = refitted(self.kind, batches, seconds)
        if not self.blended:
            return form(batches)
        return form(batches) * Blend.of(form, batches, seconds, self.walk).ratio(batches)


def select_fit(points: Sequence[Point]) -> Fit:
    """Fits a profile's points with the model that predicts best, and adds a band of its uncertainty.

    `band` has (batch, low, high) for each measured batch: 90 % of the fits to measurements resampled from
    those of each batch lie between low and high seconds (percentile bootstrap, seeded). It is None if every
    batch was measured once. Raises InputError as fit_points does.
    """
    measured = [(p.batch, s) for p in points for s in point_seconds(p)]
    fit = fit_points(measured)
    batches, seconds = _bunched(*medians_of(measured))
    kind: Kind = "knee" if fit.kind == "knee" else "affine"
    form = refitted(kind, batches, seconds)
    walk = estimated(form, batches, seconds, _usual_noise(points))
    blended = _needs_blend(kind, fit, form, walk, batches, seconds)
    if blended:
        fit = _blended(kind, form, walk, batches, seconds)
    fit = msgspec.structs.replace(fit, doubling_error=walk.doubling_error)
    return _with_band(fit, _Model(kind, walk, blended), points)


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


def _needs_blend(kind: Kind, fit: Fit, form: Form, walk: Walk, batches: Vector, seconds: Vector) -> bool:
    """Whether the form alone does not do.

    kind, form, fit: the form, and how it was judged. walk: about it. batches, seconds: the points.
    """
    if np.abs(form(batches) / seconds - 1).max() > TRUST_TOLERANCE:
        return True
    good = (fit.leave_one_out_error or 0.0) <= GOOD_ENOUGH
    if good and len(batches) >= CONFIRMING:
        return False
    if 1 - float(form(np.ones(1))[0] / form(batches[:1])[0]) > UNMEASURED_GAIN:
        return True
    if good:
        return False
    alone, blended = _misses(kind, walk, batches, seconds)
    return soft_l1(blended, NOISE_CEILING) < KNEE_GAIN * soft_l1(alone, NOISE_CEILING)


def _misses(kind: Kind, walk: Walk, batches: Vector, seconds: Vector) -> tuple[Vector, Vector]:
    """Relative errors at batches left out one by one: of the form, and of the blend."""
    alone, blended = [], []
    for k in np.unique(
        np.linspace(0, len(batches) - 1, min(len(batches), LEFT_OUT_LIMIT)).round().astype(int)
    ):
        x, y, here = np.delete(batches, k), np.delete(seconds, k), batches[k : k + 1]
        form = refitted(kind, x, y)
        simple = float(form(here)[0] / seconds[k])
        alone.append(simple - 1)
        blended.append(simple * float(Blend.of(form, x, y, walk.without(int(k))).ratio(here)[0]) - 1)
    return np.array(alone), np.array(blended)


def _blended(kind: Kind, form: Form, walk: Walk, batches: Vector, seconds: Vector) -> Fit:
    """The fit whose table is the form blended with the points."""
    blend = Blend.of(form, batches, seconds, walk)
    table = blend.knots()
    at = np.interp(batches, [b for b, _ in table], [s for _, s in table])
    low, high = trusted_range(batches, np.abs(at / seconds - 1))
    error = None
    if len(batches) > 2:
        error = float(np.median(np.abs(_misses(kind, walk, batches, seconds)[1])))
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


def _with_band(fit: Fit, model: _Model, points: Sequence[Point]) -> Fit:
    """The fit with the band of its predictions: each resample refits the coefficients of the same model."""
    groups: dict[int, list[float]] = {}
    for point in sorted(points, key=lambda p: p.batch):
        groups.setdefault(point.batch, []).extend(point_seconds(point))
    if all(len(seconds) == 1 for seconds in groups.values()):
        return fit
    luck, batches, curves = np.random.default_rng(0), np.array(list(groups), float), []
    resampled = [luck.choice(seconds, (RESAMPLES, len(seconds))) for seconds in groups.values()]
    medians = np.column_stack([np.median(drawn, axis=1) for drawn in resampled])
    distinct, drawn_as = np.unique(medians, axis=0, return_inverse=True)  # of few repeats many are equal
    for again in distinct:
        few, seconds = _bunched(batches, again)
        curves.append(np.interp(batches, few, model.curve(few, seconds)))
    ends = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(np.array(curves)[drawn_as.reshape(-1)], ends, axis=0)
    band = [(b, float(lo), float(hi)) for b, lo, hi in zip(groups, low, high, strict=True)]
    return msgspec.structs.replace(fit, band=band)
