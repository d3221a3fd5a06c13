"""The time T(b) of a batch on one worker, in seconds, and its inverse: the largest b with T(b) <= t.

    Line(c, a, t0)    T(b) = max(t0, c + a*b)    affine with t0 = 0; a knee if small batches do not fill it
    Table(points)     linear between measured points, flat before the first, infinite after the last

Both are nondecreasing in b >= 1, also in floating point, because each operation rounds monotonically. The
exact solver needs nothing else. `Costs` holds many workers as arrays and gives bit for bit the results of the
scalar types. The caller handles workers that are left out (b = 0).

Gradient accumulation: a batch above `micro` is computed in full micro-batches and a remainder, in sequence,

    T(k * micro + r) = k * T(micro) + T(r),    1 <= r <= micro

A transfer, once an iteration whatever the batch, is added to that. Transfers that overlap with the compute of
other steps are a lower limit instead: max(T(b), overlap).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pyps.formats import MAX_BATCH, Fit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Index = npt.NDArray[Any]


class Line(msgspec.Struct, frozen=True, tag="line"):
    """T(b) = max(floor, fixed + per_sample * b): t0, c and a of the affine and the knee form.

    Raises ValueError unless all are finite, per_sample and floor are nonnegative and T(1) > 0.
    """

    fixed_seconds: float
    per_sample_seconds: float
    floor_seconds: float = 0.0

    def __post_init__(self) -> None:
        c, a, t0 = self.fixed_seconds, self.per_sample_seconds, self.floor_seconds
        if not all(map(math.isfinite, (c, a, t0))) or a < 0 or t0 < 0 or max(t0, c + a) <= 0:
            raise ValueError(f"not a cost: {self}")

    def seconds(self, batch: int) -> float:
        """T(batch), batch >= 1."""
        return max(self.floor_seconds, self.fixed_seconds + self.per_sample_seconds * batch)


class Table(msgspec.Struct, frozen=True, tag="table"):
    """Monotone measured points (batch, seconds), batches strictly rising. Raises ValueError otherwise."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        batches, seconds = [b for b, _ in self.points], [s for _, s in self.points]
        rising = all(x < y for x, y in itertools.pairwise(batches))
        monotone = all(x <= y for x, y in itertools.pairwise(seconds))
        if not self.points or batches[0] < 1 or not rising or not monotone:
            raise ValueError(f"not a monotone table: {self.points}")
        if not all(math.isfinite(s) and s > 0 for s in seconds):
            raise ValueError(f"not positive, finite seconds: {seconds}")

    def seconds(self, batch: int) -> float:
        """T(batch), batch >= 1; infinite past the last point."""
        right = bisect_right(self.points, batch, key=lambda point: point[0])
        if right == 0:
            return self.points[0][1]
        b0, s0 = self.points[right - 1]
        if right == len(self.points):
            return s0 if batch == b0 else math.inf
        b1, s1 = self.points[right]
        return min(s1, s0 + (s1 - s0) * ((batch - b0) / (b1 - b0)))


Cost = Line | Table


def cost_of(fit: Fit, factor: float = 1.0) -> Cost:
    """The cost model of a fit, with every time multiplied by `factor`."""
    if fit.kind in ("convex", "table"):
        knots = list(fit.table or ())
        last, longest = knots[-1]
        if last < MAX_BATCH:
            knots.append((MAX_BATCH, longest + fit.end_slope * (MAX_BATCH - last)))
        return Table(tuple((batch, factor * seconds) for batch, seconds in knots))
    floor = fit.floor_seconds if fit.kind == "knee" else 0.0
    return Line(factor * fit.fixed_seconds, factor * fit.per_sample_seconds, factor * floor)


@dataclass(frozen=True)
class Costs:
    """Many workers' costs: lines in c, a, t0; tables as rows [start, stop) of the knots (empty: a line).

    All arrays have one entry a worker, except the knots, which workers may share. micro: the most samples
    that a worker computes at once; None without accumulation. transfer: seconds added to each iteration, or
    None. overlap: the least seconds of an iteration, or None.
    """

    c: Floats
    a: Floats
    t0: Floats
    start: Ints
    stop: Ints
    knot_batch: Ints
    knot_seconds: Floats
    micro: Ints | None = None
    transfer: Floats | None = None
    overlap: Floats | None = None

    @staticmethod
    def stack(costs: Sequence[Cost]) -> Costs:
        """The arrays of scalar costs, in their order; equal tables share their knots."""
        lines = [cost if isinstance(cost, Line) else Line(0.0, 0.0, 1.0) for cost in costs]
        knots: list[tuple[int, float]] = []
        places: dict[Table, int] = {}
        for cost in costs:
            if isinstance(cost, Table) and cost not in places:
                places[cost] = len(knots)
                knots.extend(cost.points)
        start = [places[cost] if isinstance(cost, Table) else 0 for cost in costs]
        length = [len(cost.points) if isinstance(cost, Table) else 0 for cost in costs]
        return Costs(
            c=np.array([line.fixed_seconds for line in lines], float),
            a=np.array([line.per_sample_seconds for line in lines], float),
            t0=np.array([line.floor_seconds for line in lines], float),
            start=np.array(start, np.int64),
            stop=np.array(start, np.int64) + np.array(length, np.int64),
            knot_batch=np.array([b for b, _ in knots], np.int64),
            knot_seconds=np.array([s for _, s in knots], float),
        )

    @staticmethod
    def lines(c: npt.ArrayLike, a: npt.ArrayLike, t0: npt.ArrayLike = 0.0) -> Costs:
        """Lines from arrays, which are broadcast together. Raises ValueError as Line does."""
        arrays = np.broadcast_arrays(np.asarray(c, float), np.asarray(a, float), np.asarray(t0, float))
        c_, a_, t0_ = (np.atleast_1d(x).astype(float) for x in arrays)
        good = np.isfinite(c_) & (a_ >= 0) & np.isfinite(a_) & (t0_ >= 0) & np.isfinite(t0_)
        good &= np.maximum(t0_, c_ + a_) > 0
        if not good.all():
            raise ValueError(f"not a cost: worker {int(np.argmin(good))}")
        none = np.zeros(len(c_), np.int64)
        return Costs(c_, a_, t0_, none, none, np.empty(0, np.int64), np.empty(0))

    def __len__(self) -> int:
        return len(self.c)

    def take(self, index: Index) -> Costs:
        """The costs of the workers at `index` (repeats allowed)."""
        return Costs(
            self.c[index],
            self.a[index],
            self.t0[index],
            self.start[index],
            self.stop[index],
            self.knot_batch,
            self.knot_seconds,
            None if self.micro is None else self.micro[index],
            None if self.transfer is None else self.transfer[index],
            None if self.overlap is None else self.overlap[index],
        )

    def accumulated(self, micro: Ints) -> Costs:
        """The same workers, each computing at most micro_i >= 1 samples at once, in as many parts as needed.

        A worker that must not accumulate needs micro_i as its largest batch. Raises ValueError for a micro
        below 1.
        """
        if (micro < 1).any():
            raise ValueError(f"not a micro-batch: {int(micro.min())}")
        return replace(self, micro=self.last_batch(micro))

    def keys(self) -> tuple[npt.NDArray[Any], ...]:
        """Sort keys that depend on each cost alone, not on the order in which the costs were stacked."""
        rows = list(zip(self.start.tolist(), self.stop.tolist(), strict=True))
        contents = {(i, j): (*self.knot_batch[i:j], *self.knot_seconds[i:j]) for i, j in set(rows)}
        rank = {row: k for k, row in enumerate(sorted(contents, key=contents.__getitem__))}
        table = np.array([rank[row] for row in rows], np.int64)
        rest = [np.zeros(len(self)) if x is None else x for x in (self.micro, self.transfer, self.overlap)]
        return self.t0, self.a, self.c, table, *rest

    def last_batch(self, most: Ints) -> Ints:
        """The largest batch up to `most` with a defined time: a table is undefined past its last point."""
        if not len(self.knot_batch) or self.micro is not None:
            return most
        last = self.knot_batch[np.maximum(self.stop - 1, 0)]
        return np.where(self.stop > self.start, np.minimum(most, last), most)

    def seconds(self, batch: Ints) -> Floats:
        """T_i(batch_i) for each worker, batch >= 1."""
        seconds = self.compute(batch) if self.transfer is None else self.compute(batch) + self.transfer
        return seconds if self.overlap is None else np.maximum(seconds, self.overlap)

    def compute(self, batch: Ints) -> Floats:
        """T_i(batch_i) without transfers."""
        if self.micro is None:
            return self._at_once(batch)
        full = (batch - 1) // self.micro
        times = self._at_once(batch - full * self.micro)
        if len(rows := np.flatnonzero(full)):
            whole = self.take(rows)._at_once(self.micro[rows])
            before = (full[rows] - 1) * whole + whole  # a lower bound, so that rounding keeps T monotone
            times[rows] = np.maximum(before, full[rows] * whole + times[rows])
        return times

    def _at_once(self, batch: Ints) -> Floats:
        with np.errstate(over="ignore"):
            times = np.maximum(self.t0, self.c + self.a * batch)
        if len(self.knot_batch):
            rows = np.flatnonzero(self.stop > self.start)
            times[rows] = self._table_seconds(rows, batch[rows])
        return times

    def largest_batch(self, t: float, most: Ints) -> Ints:
        """The largest b in 0..max_batch with T_i(b) <= t for each worker (0: not even one sample fits);
        exact.
        """
        guess = np.maximum(np.minimum(self.real_batch(t, most), most), 0).astype(np.int64)
        fits = (guess == 0) | (self.seconds(np.maximum(guess, 1)) <= t)
        more = fits & (guess < most) & (self.seconds(guess + 1) <= t)
        wrong = np.flatnonzero(~fits | more)
        if len(wrong):
            few = self.take(wrong)
            guess[wrong] = few._nudged(t, guess[wrong] + np.where(fits[wrong], 1, -1), most[wrong])
        return guess

    def _nudged(self, t: float, guess: Ints, most: Ints) -> Ints:
        """largest_batch from a guess that rounding may have put off by one; otherwise by bisection."""
        fits = (guess == 0) | (self.seconds(np.maximum(guess, 1)) <= t)
        more = (guess < most) & (self.seconds(guess + 1) <= t)
        wrong = np.flatnonzero(~fits | more)
        if len(wrong):
            guess[wrong] = self.take(wrong)._search(t, most[wrong])
        return guess

    def real_batch(self, t: float, most: Ints) -> Floats:
        """The largest real b in [0, most] with T_i(b) <= t, up to rounding; tables linear between points."""
        left: Floats | float = t if self.transfer is None else t - self.transfer
        real = self._real_in_parts(left, most)
        return real if self.overlap is None else np.where(self.overlap <= t, real, 0.0)

    def _real_in_parts(self, left: Floats | float, most: Ints) -> Floats:
        if self.micro is None:
            return self._real_at_once(left, most)
        whole = self._at_once(self.micro)
        with np.errstate(invalid="ignore", over="ignore"):
            full = np.where(np.isfinite(whole), np.clip(left // whole, 0, most // self.micro + 1), 0)
            rest = self._real_at_once(left - full * whole, self.micro)
        return np.clip(full * self.micro + rest, 0, most)

    def _real_at_once(self, t: Floats | float, most: Ints) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            real = (t - self.c) / self.a
        if not (rising := self.a > 0).all():
            real = np.where(rising, real, np.where(self.c <= t, np.inf, 0.0))
        real = np.where(self.t0 <= t, np.maximum(np.minimum(real, most), 0.0), 0.0)
        if len(self.knot_batch):
            rows = np.flatnonzero(self.stop > self.start)
            by = t[rows] if isinstance(t, np.ndarray) else np.full(len(rows), t)
            real[rows] = np.minimum(self._table_batch(rows, by), most[rows])
        return real

    def _search(self, t: float, most: Ints) -> Ints:
        """largest_batch by bisection, for workers whose line is too flat for its inverse to guess well."""
        low, high = np.zeros(len(self), np.int64), most + 1
        while (high - low > 1).any():
            middle = np.maximum((low + high) // 2, 1)
            fits = self.seconds(middle) <= t
            open_ = high - low > 1
            low = np.where(open_ & fits, middle, low)
            high = np.where(open_ & ~fits, middle, high)
        return low

    def _table_seconds(self, rows: Ints, batch: Ints) -> Floats:
        row = self._row_of(rows, batch, self.knot_batch)
        left, right = np.maximum(row, self.start[rows]), np.minimum(row + 1, self.stop[rows] - 1)
        b0, b1 = self.knot_batch[left], self.knot_batch[right]
        s0, s1 = self.knot_seconds[left], self.knot_seconds[right]
        between = np.minimum(s1, s0 + (s1 - s0) * ((batch - b0) / np.maximum(b1 - b0, 1)))
        return np.where(
            row < self.start[rows],
            s0,
            np.where(batch > self.knot_batch[self.stop[rows] - 1], np.inf, between),
        )

    def _table_batch(self, rows: Ints, t: Floats) -> Floats:
        row = self._row_of(rows, t, self.knot_seconds)
        left, right = np.maximum(row, self.start[rows]), np.minimum(row + 1, self.stop[rows] - 1)
        b0, b1 = self.knot_batch[left], self.knot_batch[right]
        s0, s1 = self.knot_seconds[left], self.knot_seconds[right]
        rise = np.where(s1 > s0, s1 - s0, 1.0)
        return np.where(row < self.start[rows], 0.0, b0 + (b1 - b0) * np.clip((t - s0) / rise, 0, 1))

    def _row_of(self, rows: Ints, value: npt.NDArray[Any], knots: npt.NDArray[Any]) -> Ints:
        """The last knot <= value in each worker's rows, or start - 1: one binary search for all workers."""
        row, stop, end = self.start[rows] - 1, self.stop[rows], len(knots) - 1
        step = 1 << int((stop - row).max(initial=1)).bit_length()
        while step := step >> 1:
            ahead = row + step
            row = np.where((ahead < stop) & (knots[np.minimum(ahead, end)] <= value), ahead, row)
        return row
