"""Fits the hardware-agnostic cost model T(b) = max(t0, c + a*b) robustly, and judges it on points left out.

The first of three files that make a device's curve: pyps.profiler.curve calls pyps.profiler.blend, and both
call this one. Every device has the same functional form; only its coefficients are measured (BOA, doi
10.1007/s11227-019-02845-2, states the principle; the form with the knee and this fitting procedure are ours):

    a   seconds a sample       a >= 0: more samples never take less time
    c   seconds an iteration   c >= 0: launching work takes time, so T(0) cannot be negative
    t0  least seconds          all batches that are too small to fill the device take this long (0: no knee)

With a >= 0 the model is nondecreasing. The exact planner needs nothing else.

The fit minimises the relative error T(b)/t - 1 under a soft L1 loss. So a slow point of 1 s does not outweigh
a quick one of 1 ms, and a single interrupted measurement does not tilt the line. (Division by the measured
time helps: an interruption only adds time, and so weighs less.) A knee is one more parameter. It is used only
if at least two batches lie on each side of it, and it predicts batches left out clearly better than the line
does. A last point above a plateau may be the begin of a line or a disturbed measurement, and so stays outside
the trusted range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InputError, needed
from pyps.formats import Fit, Link, Memory, Point
from pyps.profiler.statistics import SIGMA_PER_MAD

TRUST_TOLERANCE = 0.10  # the model is not trusted at a measured batch that it misses by more
KNEE_GAIN = 0.8  # a knee must reduce the line's left-out loss to this share
NOISE_FLOOR, NOISE_CEILING = 1e-3, 0.05  # bounds of the relative scatter that the loss treats as ordinary
KNEE_MIN_BATCHES = 4  # two on the plateau, two on the line
KNEE_STARTS = 2  # how many of the best starting points are refined
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e12  # of a step: others overflow where they are squared
LEFT_OUT_LIMIT = 24  # most batches left out in turn, evenly spread
AT_MOST = 100  # points of a curve; more are bunched, because the work grows with the cube

Vector = NDArray[np.float64]


Form = Callable[[Vector], Vector]  # batches -> seconds


@dataclass(frozen=True)
class Knee:
    """T(b) = max(t0, c + a*b); a line where t0 is 0."""

    t0: float
    c: float
    a: float

    def __call__(self, batches: Vector) -> Vector:
        return np.maximum(self.t0, self.c + self.a * batches)


@dataclass(frozen=True)
class Fitted:
    """A form fitted to points, and what it predicts of those left out.

    left_out: which points were left out, one by one; with two points none can be. others: the forms fitted
    without each of these.
    """

    form: Form
    batches: Vector
    seconds: Vector
    left_out: NDArray[np.int64]
    others: list[Form]

    @staticmethod
    def of(fit: Callable[[Vector, Vector], Form], batches: Vector, seconds: Vector) -> Fitted:
        """Fit a form to distinct, ascending batches."""
        count = min(len(batches), LEFT_OUT_LIMIT) if len(batches) > 2 else 0
        left_out = np.unique(np.linspace(0, len(batches) - 1, count).round().astype(np.int64))
        others = [fit(np.delete(batches, k), np.delete(seconds, k)) for k in left_out]
        return Fitted(fit(batches, seconds), batches, seconds, left_out, others)

    @property
    def misses(self) -> Vector:
        """The relative errors at the batches that were left out."""
        pairs = zip(self.left_out, self.others, strict=True)
        return np.array([float(form(self.batches[[k]])[0] / self.seconds[k]) - 1 for k, form in pairs])


def fit_points(points: Sequence[tuple[int, float]]) -> Fit:
    """Fits T(b) = max(t0, c + a*b) to measured (batch in samples, seconds of one iteration).

    In the result fixed_seconds is c, per_sample_seconds is a and floor_seconds is t0 (0 without a knee).
    Several measurements of one batch count as their median. Two distinct batches give the line through them
    and a leave_one_out_error of None. r2 is taken over the batches' medians; leave_one_out_error is the
    median relative error at a batch that was left out. The model meets the measured batches from
    trusted_min_batch to trusted_max_batch within 10 %.
    Raises InputError for fewer than two distinct batches, a batch below 1, seconds that no step takes.
    """
    return simple_fit(simple_form(*medians_of(points)))


def simple_form(batches: Vector, seconds: Vector) -> Fitted:
    """The line, or the knee where that predicts batches left out clearly better."""
    line = Fitted.of(fit_line, batches, seconds)
    if len(batches) < KNEE_MIN_BATCHES or _fit_knee(batches, seconds) is None:
        return line
    knee = Fitted.of(lambda x, y: _fit_knee(x, y) or fit_line(x, y), batches, seconds)
    return knee if soft_l1(knee.misses) < KNEE_GAIN * soft_l1(line.misses) else line


def simple_fit(fitted: Fitted) -> Fit:
    """The fit of a line or a knee."""
    form = fitted.form
    assert isinstance(form, Knee)
    return Fit(
        kind="knee" if form.t0 else "affine",
        fixed_seconds=form.c,
        per_sample_seconds=form.a,
        floor_seconds=form.t0,
        **judged(fitted.batches, fitted.seconds, form(fitted.batches), fitted.misses),
    )


def judged(batches: Vector, seconds: Vector, predicted: Vector, misses: Vector) -> dict[str, Any]:
    """Return what a fit says of its own errors. misses: relative errors at batches left out."""
    met = np.flatnonzero(np.abs(predicted / seconds - 1) <= TRUST_TOLERANCE)
    if not len(met):
        met = np.array([int(np.argmin(np.abs(predicted / seconds - 1)))])
    return {
        "r2": _r2_of(seconds / np.median(seconds), predicted / np.median(seconds)),
        "leave_one_out_error": float(np.median(np.abs(misses))) if len(misses) else None,
        "trusted_min_batch": int(batches[met[0]]),
        "trusted_max_batch": int(batches[met[-1]]),
    }


def point_seconds(point: Point) -> list[float]:
    """All measurements of a point, in seconds."""
    return list(point.seconds) if isinstance(point.seconds, list) else [point.seconds]


def predict_seconds(fit: Fit, batch: float) -> float:
    """T(batch) in seconds. A table is linear between its batches, constant before the first one, and
    continued at fit.end_slope after the last one.
    """
    if fit.kind in ("affine", "knee"):
        return max(fit.floor_seconds, fit.fixed_seconds + fit.per_sample_seconds * batch)
    table = fit.table or []
    batches, seconds = [b for b, _ in table], [s for _, s in table]
    if batch <= batches[-1]:
        return float(np.interp(batch, batches, seconds))
    return seconds[-1] + fit.end_slope * (batch - batches[-1])


def medians_of(points: Sequence[tuple[int, float]]) -> tuple[Vector, Vector]:
    """Distinct batches, ascending, and the median seconds of each."""
    by_batch: dict[int, list[float]] = {}
    for index, (batch, seconds) in enumerate(points):
        field = f"point {index + 1}"
        if isinstance(batch, bool) or batch != int(batch) or batch < 1:
            raise InputError("points", field, f"batch {batch!r}", "a whole number of at least 1")
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            expected = f"a number from {LEAST_SECONDS:g} to {MOST_SECONDS:g}"
            raise InputError("points", field, f"{seconds!r} seconds", expected)
        by_batch.setdefault(int(batch), []).append(float(seconds))
    if len(by_batch) < 2:
        found = f"{len(by_batch)} distinct batch{'' if len(by_batch) == 1 else 'es'}"
        raise InputError("points", "batch", found, "at least 2: one batch does not determine a slope")
    batches = sorted(by_batch)
    return np.array(batches, float), np.array([np.median(by_batch[b]) for b in batches])


def bunched(batches: Vector, seconds: Vector) -> tuple[Vector, Vector]:
    """The points; of very many the medians of neighbours, with the ends alone."""
    if len(batches) <= AT_MOST:
        return batches, seconds
    inner = np.array_split(np.arange(1, len(batches) - 1), AT_MOST - 2)
    bunches = [np.array([0]), *inner, np.array([len(batches) - 1])]
    middles = [int(bunch[len(bunch) // 2]) for bunch in bunches]
    return batches[middles], np.array([np.median(seconds[bunch]) for bunch in bunches])


def fit_line(batches: Vector, seconds: Vector) -> Knee:
    """The best c + a*b with c, a >= 0; through two points the exact line, if that has c, a >= 0."""
    x, y = batches / batches[-1], seconds / np.median(seconds)
    start = _theil_sen(x, y)
    exact = len(x) == 2 and start.c > 0
    return _unscaled(start if exact else _refine(x, y, start, knee=False), batches, seconds)


def _fit_knee(batches: Vector, seconds: Vector) -> Knee | None:
    """The best max(t0, c + a*b), or None if no start keeps two batches on the plateau and two on the line."""
    x, y = batches / batches[-1], seconds / np.median(seconds)
    starts = []
    for split in range(2, len(x) - 1):
        line = _theil_sen(x[split:], y[split:])
        starts.append(Knee(float(np.median(y[:split])), line.c, line.a))
    starts.sort(key=lambda form: soft_l1(form(x) / y - 1))
    best, best_loss = None, math.inf
    for start in starts[:KNEE_STARTS]:
        form = _refine(x, y, start, knee=True)
        on_plateau = int(np.count_nonzero(form.c + form.a * x < form.t0))
        loss = soft_l1(form(x) / y - 1)
        if 2 <= on_plateau <= len(x) - 2 and loss < best_loss:
            best, best_loss = form, loss
    return None if best is None else _unscaled(best, batches, seconds)


def _unscaled(form: Knee, batches: Vector, seconds: Vector) -> Knee:
    """The form of the points, by that of their parts of the largest batch and of the median time."""
    unit = float(np.median(seconds))
    return Knee(form.t0 * unit, form.c * unit, form.a * unit / float(batches[-1]))


def _theil_sen(x: Vector, y: Vector) -> Knee:
    """A starting point that a single outlier cannot move: the median slope of all pairs and the median
    intercept.
    """
    if len(x) > 64:  # pairs grow with the square
        pick = np.linspace(0, len(x) - 1, 64).round().astype(int)
        x, y = x[pick], y[pick]
    i, j = np.triu_indices(len(x), 1)
    i, j = i[x[j] > x[i]], j[x[j] > x[i]]
    slope = max(0.0, float(np.median((y[j] - y[i]) / (x[j] - x[i]))))
    return Knee(0.0, max(0.0, float(np.median(y - slope * x))), slope)


def _refine(x: Vector, y: Vector, start: Knee, *, knee: bool) -> Knee:
    """Minimises the soft L1 of T(x)/y - 1 with coefficients >= 0; the scale of the loss is the start's
    scatter.
    """
    least_squares = needed("scipy.optimize", "plan").least_squares

    def residuals(p: Vector) -> Vector:
        line = p[-2] + p[-1] * x
        model: Vector = np.maximum(p[0], line) if knee else line
        return model / y - 1

    def jacobian(p: Vector) -> Vector:
        on_line = (p[-2] + p[-1] * x >= p[0]) if knee else np.ones(len(x), bool)
        columns = [on_line / y, on_line * x / y]
        return np.column_stack([~on_line / y, *columns] if knee else columns)

    p0 = np.array([start.t0, start.c, start.a] if knee else [start.c, start.a])
    scatter = SIGMA_PER_MAD * float(np.median(np.abs(residuals(p0))))
    solution = least_squares(
        residuals,
        p0,
        jac=jacobian,
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=min(max(scatter, NOISE_FLOOR), NOISE_CEILING),
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    t0, c, a = solution.x if knee else (0.0, *solution.x)
    # The solver stops just inside a bound: such a coefficient is zero.
    return Knee(*(float(v) if v > 1e-9 else 0.0 for v in (t0, c, a)))


def soft_l1(relative_errors: Vector) -> float:
    """The mean soft L1 loss: quadratic for ordinary errors, linear above, so that one outlier does not
    dominate.
    """
    return float(np.mean(np.sqrt(1 + (relative_errors / NOISE_CEILING) ** 2) - 1))


def _r2_of(y: Vector, predicted: Vector) -> float:
    """1 - residual over total sum of squares; if all y are equal, 1 for an exact fit and else 0."""
    residual, total = float(np.sum((y - predicted) ** 2)), float(np.sum((y - y.mean()) ** 2))
    if total <= 1e-24:
        return 1.0 if residual <= 1e-18 else 0.0
    return 1.0 - residual / total


def memory_model(peaks: Sequence[tuple[int, int]], budget_bytes: int) -> Memory | None:
    """The memory model fixed + per sample * b, an upper bound of every measured peak; None if memory is
    constant.

    The slope is the median over pairs of sizes, the intercept the least with which no point lies above the
    line. peaks: two or more batches, each with its peak in bytes.
    """
    b, peak = (np.array(values, float) for values in zip(*peaks, strict=True))
    i, j = np.triu_indices(len(b), 1)
    slope = float(np.median((peak[j] - peak[i]) / (b[j] - b[i])))
    if slope <= 0:
        return None
    fixed = max(0, math.ceil(float(np.max(peak - slope * b))))
    return Memory(fixed_bytes=fixed, bytes_per_sample=slope, budget_bytes=budget_bytes)


def link_model(via: str, seconds: Mapping[int, Sequence[float]]) -> Link:
    """Latency and bandwidth of a link. via: how it was measured. seconds: of messages, by their bytes."""
    largest = max(seconds)
    at_least = largest / float(np.median(seconds[largest]))  # where the slope is lost in the noise
    if len(seconds) == 1:
        return Link(via=via, latency_seconds=0.0, bytes_per_second=at_least)
    fit = fit_points([(size, value) for size, values in seconds.items() for value in values])
    per_byte = fit.per_sample_seconds or 1 / at_least
    latency = fit.fixed_seconds or float(np.median(seconds[min(seconds)]))  # of a line through 0
    return Link(via=via, latency_seconds=latency, bytes_per_second=1 / per_byte)
