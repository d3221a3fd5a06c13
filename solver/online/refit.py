"""OnlineCost estimates the cost of this device's steps from few measurements, with the profile as the prior.

    T(b) = d + f P(b)      P: the profile's cost, or proportional to b

At first the level f is free, and d, the error of the profile's fixed part, is kept small (ridge):
measurements of a single batch change the level and keep the profile's shape.

Every window is compared with what the estimate says of its batch, whether that batch was timed before or
not. If the difference is more than noise, the device has changed, and all earlier times are void. One batch
cannot tell whether the change takes time once a step (d) or for every sample (f), so f is known to lie
between its old value and one that has changed as much as the time. Until another batch is timed, the
estimate takes the middle of these on a log scale: at most the root of the change away from either. A time
that fits the cost before all changes means that the disturbance is over. A second batch tells which it is,
even where the bounds were wrong.

A batch's time follows a device that drifts. A local-level filter of the logarithm of a step's time runs for
each of several rates of drift, the variance that a step adds over that of a step's scatter. Each rate is
believed as far as it foretold the windows; no drift is believed first. What is known of the time is the mean
of the filters, weighted by belief.

f never leaves 0.5 to 2 times the profile's shape at the level that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyps.profiler.statistics import robust_sigma
from pyps.solver.costs import Cost, Line, Table

CHANGE = 0.10  # relative, of a window's median: a larger difference is not noise
ERRORS = 4.0  # standard errors: a smaller difference may be noise
OVER = 0.05  # relative: so near to the cost before all changes, these are over
NOISE = 0.01  # relative error of a window's median, where the window does not tell
FIXED = 0.3  # relative to T(b): how wrong the profile's fixed part may be
SLOPE_LOW, SLOPE_HIGH = 0.5, 2.0  # of the profile's shape
FULL = 1.1  # of the latest level: the whole time grows with the batch
UNKNOWN_LOW = 0.05  # without a profile, the fixed part may be nearly all
REMEMBERED = 6  # batches
STEPS_KEPT = 200  # that what is known of a batch is worth at most
LEAST_SECONDS = 1e-9
LEAST_ERROR = 1e-3
SCATTER_FROM, SCATTER_KEPT = 3, 60  # steps that show a scatter, and that an earlier one counts for
MOST_SCATTER = 0.5
COUNTED_FROM = 20  # steps of a known scatter: before, nothing is learnt of drift and hiccups
HICCUP_COST = 3  # what a believed hiccup costs, over what a change that is believed a step earlier saves
DOUBT = 8.0  # steps: the scatter of few may be too small by this over their number
SHAPE_ERROR = 0.1  # of the log of an untimed batch's time, by the log of its distance from a timed one
RATES = (0.0, 0.02, 0.1, 0.4)
UNUSUAL = 3.0  # log: how much less likely any drift is than none, before the first window
FORGOTTEN = 60.0  # steps after which what spoke for a rate counts e times less
MOST_ODD = 9.0  # squared standard errors: a window further off speaks no more clearly
CLEAR = 2  # the first of RATES that a few steps show


PROPORTIONAL = Line(0.0, 1e-3)


class Drift(msgspec.Struct):
    """The filters. odds: of each rate, log. at, variances: of the log of the time, from what is believed."""

    odds: list[float] = msgspec.field(default_factory=lambda: [-UNUSUAL if rate else 0.0 for rate in RATES])
    at: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(RATES))
    variances: list[float] = msgspec.field(default_factory=lambda: [1.0] * len(RATES))

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


@dataclass(frozen=True)
class Timed:
    """Hold what is known of one batch: its mean seconds over `steps`, and the scatter of a step."""

    seconds: float
    steps: float = 1
    scatter: float = NOISE

    @property
    def error(self) -> float:
        """The relative standard error."""
        return max(LEAST_ERROR, self.scatter / math.sqrt(self.steps))


class OnlineCost(msgspec.Struct):
    """Takes in windows of steps; plan with `cost`. As a message it is all that a checkpoint keeps."""

    prior: Cost = PROPORTIONAL
    profiled: bool = True
    known: dict[int, Timed] = {}  # by batch, since the last change, the latest timed last
    slopes: tuple[float, float] | None = None  # between which f is; None: before any change
    first: Cost | None = None  # before all changes
    scatter: float = NOISE  # relative, of a step
    scattered: int = 0  # steps that it is of, SCATTER_KEPT at most
    drift: Drift = msgspec.field(default_factory=Drift)
    lasted: int = 0  # slow steps that were a change's first one
    passed: int = 0  # slow steps that were hiccups
    first_slope: float = 1.0  # f then
    level: float = 1.0  # how many times longer steps take than when they were first measured

    @staticmethod
    def of(prior: Cost | None) -> OnlineCost:
        """One that begins with a profile's cost, or with none."""
        return OnlineCost(profiled=False) if prior is None else OnlineCost(prior)

    @property
    def changed(self) -> bool:
        """Return whether the device is not what it was at first."""
        return self.slopes is not None

    @property
    def cost(self) -> Cost:
        """The current estimate: the prior itself before the first measurement."""
        return self._estimate()[0]

    @property
    def unsure(self) -> bool:
        """Return whether another batch's first times will tell much: one was timed since a change."""
        return self.changed and len(self.known) == 1

    @property
    def spread(self) -> float:
        """The scatter of a step, as large as it may be for all that few steps tell."""
        return self.scatter * (1 + DOUBT / self.scattered if self.scattered else 1.0)

    @property
    def confirmed(self) -> int:
        """Slow steps in a row that are a change: two, but one of a device that changes and seldom hiccups."""
        return 1 if self.lasted > HICCUP_COST * self.passed + 1 else 2

    @property
    def patience(self) -> float:
        """Steps in which it drifts as far as their mean errs: more of them would tell less of it now."""
        return max(SCATTER_FROM, 1 / math.sqrt(self.drift.rate))

    def awaits(self, batch: int) -> bool:
        """Return whether it is unsure, and this batch is the one that will tell."""
        return self.unsure and batch not in self.known

    @property
    def error(self) -> float:
        """The relative standard error of the time that was measured of the latest batch."""
        return next(reversed(self.known.values())).error if self.known else 0.0

    def observe(self, batch: int, times: Sequence[float]) -> None:
        """Take in one window: the seconds of its steps, each of `batch` samples."""
        if not times or not math.isfinite(self.prior.seconds(batch)):
            return  # nothing was timed, or a table says nothing of this batch
        times = [max(seconds, LEAST_SECONDS) for seconds in times]
        middle = median_low(times)  # of two steps the quicker: what disturbs a single step delays it
        self._learn_scatter(times, middle)
        near = [math.log(s) for s in times if abs(math.log(s / middle)) <= ERRORS * self.spread]
        timed = Timed(math.exp(fmean(near)), len(near), self.spread)
        if self.known and self._differs(batch, timed) and not self._resolves(batch, timed):
            self._change(batch, timed)
        else:
            self._follow(batch, timed)
        while len(self.known) > REMEMBERED:
            del self.known[next(iter(self.known))]
        if self.first is not None:
            self.level = self.known[batch].seconds / self.first.seconds(batch)

    def _learn_scatter(self, times: Sequence[float], middle: float) -> None:
        """Learn how much steps scatter; two alone tell little, so they change it a little."""
        if len(times) >= SCATTER_FROM:
            found = robust_sigma(times, middle) / middle
        elif len(times) > 1 and self.scattered:
            found = min(abs(math.log(times[0] / times[1])) / math.sqrt(2), 3 * self.scatter)
        else:
            return
        share = len(times) / (len(times) + self.scattered)
        found = min(found, MOST_SCATTER)
        scatter = math.hypot(math.sqrt(share) * found, math.sqrt(1 - share) * self.scatter)
        self.scatter = max(scatter, LEAST_ERROR)
        self.scattered = min(SCATTER_KEPT, self.scattered + len(times))

    def _follow(self, batch: int, timed: Timed) -> None:
        """Take in a window of a device that has not changed at once. As far as it drifted, the times of other
        batches did, too, and are less certain now.
        """
        if batch not in self.known and (self.unsure or not (self.profiled and self.known)):
            self.known[batch] = timed
            self.drift.begin(timed.error**2)
            return
        latest, own = next(reversed(self.known)), self.known.pop(batch, None)
        before = own.seconds if own is not None else self.cost.seconds(batch)
        away = 0.0 if own is not None else SHAPE_ERROR * math.log(batch / latest)
        off, noise, scatter = math.log(timed.seconds / before), timed.error**2 + away**2, self.scatter**2
        learns = self.scattered >= COUNTED_FROM
        moved, variance = self.drift.take(off, timed.steps, noise, scatter, learns)
        drifted = self.drift.rate * scatter * timed.steps
        share = drifted / (drifted + (variance if own is None else own.error**2))
        for other, then in self.known.items():
            seconds = then.seconds * math.exp(share * moved)
            self.known[other] = _known(seconds, then.error**2 + drifted, then.scatter)
        self.known[batch] = _known(before * math.exp(moved), variance, timed.scatter)

    def expects(self, batch: int) -> tuple[float, float]:
        """The least and the most seconds of a step that are no surprise, but for noise."""
        cost, _, low, high = self._estimate()
        if not self.known:
            return 0.0, math.inf
        at, timed = next(reversed(self.known.items()))
        shape = self.prior.seconds(batch) - self.prior.seconds(at)
        by_slope = [timed.seconds + f * shape for f in (low, high)] if math.isfinite(shape) else []
        seconds = [max(LEAST_SECONDS, s) for s in (cost.seconds(batch), *by_slope)]
        return min(seconds), max(seconds)

    @property
    def proportional(self) -> Cost:
        """The estimate if the last change takes time for each sample: as likely, until another batch is
        timed.
        """
        if not self.changed or len(self.known) != 1:
            return self.cost
        ((batch, timed),) = self.known.items()
        f = self._estimate()[3]
        return stretched(self.prior, timed.seconds - f * self.prior.seconds(batch), f)

    def renew(self, batch: int, seconds: float) -> None:
        """Take in a step after a time without any.

        Where it is none of what was expected, the device is another one: each batch's cost changes as this
        one's.
        """
        low, high = self.expects(batch)
        if self.known and not (1 - CHANGE) * low <= seconds <= (1 + CHANGE) * high:
            f = seconds / self.prior.seconds(batch)
            if self.first is None:
                self.first, self.first_slope = self._estimate()[:2]
            self.known, self.slopes = {batch: Timed(seconds)}, (f, f)
            self.level = seconds / self.first.seconds(batch)
            return
        self.observe(batch, [seconds])

    def _differs(self, batch: int, timed: Timed) -> bool:
        """Return whether a window is more than noise away from what was expected."""
        low, high = self.expects(batch)
        drifted = math.sqrt(self.drift.rate * timed.steps) * self.spread
        allowed = max(CHANGE, ERRORS * math.hypot(timed.error, self.error, drifted))
        return not low * math.exp(-allowed) <= timed.seconds <= high * math.exp(allowed)

    def _resolves(self, batch: int, timed: Timed) -> bool:
        """Return whether it is no new change, but tells what the last was: once a step, or for each sample.

        f may have been wrong before the change, and so the bounds that it has since; these give way, as far
        as the errors of both times do not explain it.
        """
        if not self.unsure or batch in self.known or self.slopes is None:
            return False
        ((before, then),) = self.known.items()
        shape, allowed = self.prior.seconds(batch) / self.prior.seconds(before), 1 + CHANGE
        ratio, rise = timed.seconds / then.seconds, self.prior.seconds(batch) - self.prior.seconds(before)
        if not rise or not min(1.0, shape) / allowed <= ratio <= max(1.0, shape) * allowed:
            return False
        least = UNKNOWN_LOW * timed.seconds / self.prior.seconds(batch)
        f = (timed.seconds - then.seconds) / rise
        error = 3 * math.hypot(timed.error * timed.seconds, then.error * then.seconds) / abs(rise)
        low, high = self.slopes
        self.slopes = min(low, max(least, f + error)), max(high, f - error)
        return True

    def _change(self, batch: int, timed: Timed) -> None:
        """The device has become another one."""
        self.drift.begin(timed.error**2)
        cost, _, low, high = self._estimate()
        if self.first is None:
            self.first, self.first_slope = self._estimate()[:2]
        if self.changed and abs(math.log(timed.seconds / self.first.seconds(batch))) < OVER:
            self.prior, self.first_slope = self.first, 1.0
            self.known, self.slopes = {batch: timed}, None
            return
        level = timed.seconds / self.first.seconds(batch)
        ratio = timed.seconds / cost.seconds(batch)
        low = max(low * min(1.0, ratio), self.first_slope * min(1.0, level))
        high = min(high * max(1.0, ratio), self.first_slope * max(1.0, level))
        self.known, self.slopes = {batch: timed}, (min(low, high), max(low, high))

    def _bounds(self) -> tuple[float, float]:
        """Return f's: of the profile's shape at the latest level, and of what is known since a change."""
        batch, timed = next(reversed(self.known.items()))
        level = timed.seconds / self.prior.seconds(batch)
        low, high = (SLOPE_LOW if self.profiled else UNKNOWN_LOW) * level, SLOPE_HIGH * level
        if self.slopes is not None:
            high = min(self.slopes[1], FULL * level)
            low = min(self.slopes[0], high)
        return low, high

    def _estimate(self) -> tuple[Cost, float, float, float]:
        """The cost, its f, and the bounds between which that may be."""
        points = {b: t for b, t in self.known.items() if math.isfinite(self.prior.seconds(b))}
        if not points:
            return self.prior, 1.0, 1.0, 1.0
        low, high = self._bounds()
        middle = math.sqrt(low * high) if self.changed else None
        d, f, covariance = _solved(self.prior, points, middle, low, high)
        error = math.sqrt(max(0.0, float(covariance[1, 1])))
        kept = max(low, min(f - 3 * error, high)), min(high, max(f + 3 * error, low))
        return stretched(self.prior, d, f), f, *kept


def _known(seconds: float, variance: float, scatter: float) -> Timed:
    """Return what is known with a variance of the log."""
    return Timed(seconds, min(STEPS_KEPT, scatter**2 / max(variance, LEAST_ERROR**2)), scatter)


def _solved(
    prior: Cost, points: Mapping[int, Timed], middle: float | None, low: float, high: float
) -> tuple[float, float, NDArray[np.float64]]:
    """d, f and their covariance: nearest to the times, with f from low to high.

    middle: where f is without more evidence; None: d is near 0.
    """
    seconds = np.array([timed.seconds for timed in points.values()])
    shape = np.array([prior.seconds(batch) for batch in points])
    weight = 1 / np.array([math.hypot(timed.error, NOISE / 2) for timed in points.values()])
    latest = seconds[-1]
    if middle is None:
        ridge = [1 / (FIXED * latest), 0.0, 0.0]
    else:
        spread = max(0.05, math.log(max(high / low, 1.0)) / 2)
        ridge = [0.0, 1 / (middle * spread), 1 / spread]
    rows = np.vstack([np.column_stack([weight / seconds, weight * shape / seconds, weight]), ridge])
    normal = rows[:, :2].T @ rows[:, :2]
    scale = np.sqrt(np.diag(normal))
    inverse = np.linalg.pinv(normal / np.outer(scale, scale)) / np.outer(scale, scale)
    d, f = inverse @ rows[:, :2].T @ rows[:, 2]
    if not low <= f <= high:
        f = min(max(float(f), low), high)
        share = (weight / seconds) ** 2
        d = float((share * (seconds - f * shape)).sum() / share.sum())
    return float(d), float(f), inverse


def at_least(cost: Cost, seconds: float) -> Cost:
    """The cost, but never less than `seconds`."""
    if isinstance(cost, Table):
        return Table(tuple((b, max(seconds, s)) for b, s in cost.points))
    return msgspec.structs.replace(cost, floor_seconds=max(seconds, cost.floor_seconds))


def stretched(cost: Cost, fixed_seconds: float, factor: float) -> Cost:
    """fixed_seconds + factor * cost, never below a nanosecond."""
    if isinstance(cost, Table):
        points = ((b, max(fixed_seconds + factor * s, LEAST_SECONDS)) for b, s in cost.points)
        return Table(tuple(points))
    floor = max(fixed_seconds + factor * cost.floor_seconds, LEAST_SECONDS)
    c, a = fixed_seconds + factor * cost.fixed_seconds, factor * cost.per_sample_seconds
    return Line(c, a, floor)
