"""Selects a device's cost model: a simple form where that explains the points, else a curve through them.

The last of three files, and the one to call: it asks pyps.profiler.fit for a form, pyps.profiler.blend for a
curve about the form, and keeps one of them.

    affine   T(b) = c + a b
    knee     T(b) = max(t0, c + a b)
    table    a nondecreasing polygon: a form blended with the points; the form is one of these, or stairs,
             T(b) = c + a q ceil(b / q), where work comes in tiles of q samples

The blend is believed first. A line or a knee is kept only if it misses no measured batch by more than 10 %,
predicts batches left out clearly better than the blend or nearly exactly, and promises little gain below the
smallest measured batch, unless four batches prove it. Stairs are blended only where they predict what was
left out much better.
(The forms other than the line, and this rule, are ours.)
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Sequence
from functools import partial

import msgspec
import numpy as np

from pyps.errors import InputError
from pyps.formats import Fit, Point, Profile, read_profile
from pyps.profiler.blend import USUAL_NOISE, Blended
from pyps.profiler.fit import (
    TRUST_TOLERANCE,
    Fitted,
    Form,
    Vector,
    bunched,
    fit_line,
    judged,
    medians_of,
    point_seconds,
    predict_seconds,
    simple_fit,
    simple_form,
    soft_l1,
)
from pyps.profiler.statistics import median_and_error

GOOD_ENOUGH = 0.01  # a form with a smaller error at batches left out is kept
FORM_GAIN = 0.8  # else it must reduce the loss at batches left out to this share of the blend's
UNMEASURED_GAIN = 0.25  # of the smallest measured time: a form that promises more below needs proof
CONFIRMING = 4  # batches on a form that prove it, also below the smallest
TILES = 8, 16, 32, 64
STAIRS_POINTS, STAIRS_FROM = 6, 3  # points, and stairs among them
MOST_STAIRS = 256  # more are no different from a line
WITHIN_STAIRS = 2  # points past the first stair that are no corner: without them a knee has the same points
STAIRS_GAIN = 0.5  # stairs must reduce the loss at batches left out to this share
OPTIMIZER_SHARE = 0.95  # of the shortest step: parts are timed apart, and may not fit together
# Where all sizes are powers of two: of a step that may lie between two of them, the parts that the band takes
# in above and below the curve.
GRID_SIZES, GRID_KNOTS, LATE_STEP, EARLY_STEP = 4, 4, 0.5, 0.25
LEAST_NOISE = 0.003  # relative: repeats of a batch say nothing of what differs from batch to batch
WITHIN = 0.95  # one side of 90 %
# Of errors at batches left out, those between the points, whose gaps are half as wide; and how much an error
# says of its own surroundings, the rest being said of the whole curve. Chosen by 90 % coverage on eight
# families of curves that benchmarks/outside/ has not.
# (How much larger errors are where two batches are left out does not tell the curves whose bands are wide.)
GAPS, LOCAL = 0.76, 0.7


def select_fit(points: Sequence[Point]) -> Fit:
    """Fits a profile's points with the model that predicts best, and adds a band of its uncertainty.

    `band` has (batch, low, high) for each measured batch: where 90 % of the times of batches between these
    lie, by the errors at batches left out; None with two batches. Raises InputError as fit_points does.
    """
    measured = [(p.batch, s) for p in points for s in point_seconds(p)]
    noise = usual_noise(points)
    curve, corners = Blended.of(simple_form(*bunched(*medians_of(measured))), noise), np.empty(0)
    if (tile := _tile(curve)) is not None:
        stairs = Fitted.of(partial(_fit_stairs, tile), curve.fitted.batches, curve.fitted.seconds)
        curve, corners = Blended.of(stairs, noise), _corners(tile, stairs.batches)
    if tile is not None or _needs_blend(curve):
        fit, misses = _blended_fit(curve, corners), curve.misses
    else:
        fit, misses = simple_fit(curve.fitted), curve.fitted.misses
    return msgspec.structs.replace(
        fit,
        doubling_error=curve.blend.walk.doubling_error,
        band=_band(fit, curve.fitted, misses, {p.batch for p in points}, corners),
        optimizer_seconds=optimizer_seconds(points),
    )


def optimizer_seconds(points: Sequence[Point]) -> float | None:
    """The seconds of an optimizer's step, whatever the batch; None if no point tells a step's parts."""
    found = [(p.parts.optimizer, float(np.median(point_seconds(p)))) for p in points if p.parts is not None]
    if not found:
        return None
    return min(float(np.median([own for own, _ in found])), OPTIMIZER_SHARE * min(s for _, s in found))


def fit_of(profile: Profile) -> Fit:
    """The profile's fit, or else the fit of its points. Raises InputError if these cannot be fitted."""
    fit = profile.fit
    if fit is None:
        return select_fit(profile.points)
    if fit.optimizer_seconds is not None:
        return fit
    return msgspec.structs.replace(fit, optimizer_seconds=optimizer_seconds(profile.points))


def check_whole(where: str, profile: Profile) -> None:
    """Raise InputError for times of steps in micro-batches, of which a plan cannot say what each one takes.

    where: the profile's file.
    """
    if (parts := profile.model.accumulate) > 1:
        expected = f"1, as measured without --accumulate; max_accumulation = {parts} lets a plan choose them"
        raise InputError(where, "model.accumulate", f"{parts} micro-batches", expected)


def fitted_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile in a file, for plans, with a fit. Raises InputError, naming the file."""
    profile = read_profile(path)
    check_whole(os.fspath(path), profile)
    try:
        return msgspec.structs.replace(profile, fit=fit_of(profile))
    except InputError as error:
        raise InputError(os.fspath(path), "points", error.found, error.expected) from None


def usual_noise(points: Sequence[Point]) -> float:
    """The relative error to expect of a batch's median: by its repeats, where there are any."""
    errors = [median_and_error(times)[1] for p in points if len(times := point_seconds(p)) > 2]
    return max(LEAST_NOISE, float(np.median(errors))) if errors else USUAL_NOISE


def _needs_blend(curve: Blended) -> bool:
    """Return whether the form alone does not do."""
    fitted, misses = curve.fitted, curve.fitted.misses
    form, batches = fitted.form, fitted.batches
    if np.abs(form(batches) / fitted.seconds - 1).max() > TRUST_TOLERANCE:
        return True
    good = not len(misses) or float(np.median(np.abs(misses))) <= GOOD_ENOUGH
    if good and len(batches) >= CONFIRMING:
        return False
    if 1 - float(form(np.ones(1))[0] / form(batches[:1])[0]) > UNMEASURED_GAIN:
        return True
    return not good and soft_l1(misses) > FORM_GAIN * soft_l1(curve.misses)


def _tile(simple: Blended) -> int | None:
    """The samples in a tile, where stairs predict the batches left out much better than a simple form, alone
    or blended, does; None if they do not.
    """
    batches, seconds = simple.fitted.batches, simple.fitted.seconds
    tiles = [
        q
        for q in TILES
        if len(np.unique(np.ceil(batches / q))) >= STAIRS_FROM and batches[-1] <= MOST_STAIRS * q
        if np.count_nonzero((batches > q) & (batches % q != 0)) >= WITHIN_STAIRS
    ]
    if not tiles or len(batches) < STAIRS_POINTS:
        return None
    losses = {q: soft_l1(_line_misses(_tiled(batches, q), seconds)) for q in tiles}
    best = min(losses, key=losses.__getitem__)
    most = STAIRS_GAIN * min(soft_l1(simple.fitted.misses), soft_l1(simple.misses))
    return None if losses[best] > most else best


def _corners(tile: int, batches: Vector) -> Vector:
    """The batches at the ends of the tiles within the points."""
    ends = np.arange(tile, batches[-1] + 1, tile)
    both = np.concatenate([ends, ends + 1])
    inside: Vector = both[(both > batches[0]) & (both < batches[-1])]
    return inside


def _tiled(batches: Vector, tile: int) -> Vector:
    """The batches rounded up to whole tiles."""
    return tile * np.ceil(batches / tile)


def _fit_stairs(tile: int, batches: Vector, seconds: Vector) -> Form:
    line = fit_line(_tiled(batches, tile), seconds)
    return lambda batch: line(_tiled(batch, tile))


def _line_misses(x: Vector, seconds: Vector) -> Vector:
    """Relative errors of the least-squares line at each point, fitted without that point."""
    rows = np.column_stack([1 / seconds, x / seconds])
    hat = rows @ np.linalg.pinv(rows)
    kept = np.maximum(1 - np.diag(hat), LEAST_NOISE)
    return np.asarray((hat.sum(axis=1) - 1) / kept)


def _blended_fit(curve: Blended, corners: Vector) -> Fit:
    """The fit whose table is the form blended with the points. corners: of its tiles."""
    batches, table = curve.fitted.batches, curve.knots(corners)
    at = np.interp(batches, [b for b, _ in table], [s for _, s in table])
    form, last = curve.fitted.form, batches[-1:]
    slope = float((form(2 * last) - form(last))[0] * curve.blend.ratio(last)[0] / last[0])
    return Fit(
        kind="table",
        per_sample_seconds=max(0.0, slope),
        table=table,
        **judged(batches, curve.fitted.seconds, at, curve.misses),
    )


def _band(
    fit: Fit, fitted: Fitted, misses: Vector, sizes: set[int], corners: Vector
) -> list[tuple[int, float, float]] | None:
    """The curve at the measured batches and its corners, times and over what 90 % of errors between the
    measured batches stay below: more where its surroundings were missed by more, and no less than the curve
    misses the measured batches by.

    misses: at batches left out; those inside tell of gaps twice as wide as the ones between the points.
    sizes: the batches measured.
    """
    from scipy.stats import t as student_t

    if not len(misses):
        return None
    at = fitted.batches[fitted.left_out]
    inside = slice(1, -1) if len(misses) > 2 else slice(None)
    at, squares = at[inside], np.log1p(misses[inside]) ** 2
    most = GAPS * float(student_t.ppf(WITHIN, max(2, len(squares))))
    curve = np.array([predict_seconds(fit, int(batch)) for batch in fitted.batches])
    left = np.log(fitted.seconds / curve) ** 2
    found = []
    for batch in sorted(sizes.union(map(int, corners))):
        off = math.exp(max(most * _error_near(batch, at, squares), _error_near(batch, fitted.batches, left)))
        seconds = predict_seconds(fit, batch)
        found.append((batch, seconds / off, seconds * off))
    return _off_grid(found, fit, sorted(sizes)) if on_one_grid(sizes) else found


def on_one_grid(batches: Collection[int]) -> bool:
    """Return whether sizes are so many powers of two alone that steps between them are not seen."""
    return len(batches) >= GRID_SIZES and all(batch & (batch - 1) == 0 for batch in batches)


def _off_grid(
    band: list[tuple[int, float, float]], fit: Fit, sizes: Sequence[int]
) -> list[tuple[int, float, float]]:
    """The band with sizes between those of a grid, where work that comes in steps takes up to as long as at
    the next size, or as little as at the one before.
    """
    at, low, high = (np.array(column, float) for column in zip(*band, strict=True))
    found = {int(b): (lo, hi) for b, lo, hi in band}
    for first, last in itertools.pairwise(sizes):
        before, after = predict_seconds(fit, first), predict_seconds(fit, last)
        for batch in (
            np.unique(np.geomspace(first + 1, last - 1, GRID_KNOTS).round()) if last > first + 1 else ()
        ):
            seconds = predict_seconds(fit, int(batch))
            lowest, highest = (float(np.interp(batch, at, side)) for side in (low, high))
            lowest = min(lowest, seconds - EARLY_STEP * (seconds - before))
            found[int(batch)] = lowest, max(highest, seconds + LATE_STEP * (after - seconds))
    return [(batch, *found[batch]) for batch in sorted(found)]


def _error_near(batch: int, at: Vector, squares: Vector) -> float:
    """The error to expect at a batch, by squared errors at others: mostly by those of its surroundings."""
    near = np.convolve(np.pad(squares, 1, "edge"), (0.25, 0.5, 0.25), "valid")
    local = float(np.interp(math.log(batch), np.log(at), near))
    return math.sqrt(LOCAL * local + (1 - LOCAL) * float(squares.mean()))
