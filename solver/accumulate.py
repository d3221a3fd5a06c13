"""The time of a batch in micro-batches, with the best size for each batch.

A run computes a batch of b samples in full micro-batches of m and a remainder:

    T(b) = min over m of  (k - 1) (T_1(m) - o) + T_1(b - (k - 1) m)

with k = ceil(b / m) <= repeats, m <= at_once, and T_1(b) the time of b samples at once, of which the
optimizer, which steps once, takes o. Which m is best depends on b: where T_1 has steps, a size just below one
beats the largest, and the remainder takes what is left over. So every m is tried for every b, and the result
is one nondecreasing table. A min-max solution over it chooses sizes and batches together. T is nondecreasing
because the parts of b + 1 samples, less one sample of the last, do b.
"""

from __future__ import annotations

import numpy as np

from pyps.formats import Fit
from pyps.profiler.fit import predict_seconds
from pyps.solver.costs import Cost, Costs, Floats, Ints, Table

MOST_TRIED = 1 << 25  # pairs of a size and a batch: a third of a second
ROUNDING = 8 * np.finfo(float).eps  # relative: a bend of a table below it is rounding
CLOSE = 1e-12  # relative: how far a table without such bends may be off


def accumulated(
    cost: Cost, once: float, at_once: int, repeats: int, unit: int, multiple: int, total: int
) -> Table:
    """T of every multiple of `multiple` up to at_once * repeats, exactly up to twice `total`.

    cost: T_1. once: o. at_once: the most samples in a micro-batch, at least 1. repeats: the most
    micro-batches. unit: micro-batches are multiples of it, as of a sample's tokens. total: the global batch.
    Past twice that a straight line leads to the last batch: no worker gets a batch there, but messages name
    what would fit.
    Of more than MOST_TRIED pairs of a size and a batch, equally spaced sizes are tried.
    """
    last = at_once * repeats // multiple * multiple
    exact = max(min(last, -(-2 * total // multiple) * multiple), multiple)
    batches = np.arange(multiple, exact + 1, multiple, dtype=np.int64)
    seconds = np.maximum.accumulate(_best(cost, once, batches, at_once, repeats, unit)[1])
    finite = np.isfinite(seconds)
    batches, seconds = batches[finite], seconds[finite]
    kept = _bends(batches, seconds)
    points = list(zip(batches[kept].tolist(), seconds[kept].tolist(), strict=True))
    if last > exact:
        whole = repeats * (float(_at_once(cost, np.array([at_once], np.int64))[0]) - once) + once
        if np.isfinite(whole):
            points.append((last, max(whole, points[-1][1])))
    return Table(tuple(points))


def best_size(cost: Cost, once: float, batch: int, at_once: int, repeats: int, unit: int) -> int:
    """The size of this batch's micro-batches in `accumulated`; the largest of equally fast ones."""
    return int(_best(cost, once, np.array([batch], np.int64), at_once, repeats, unit)[0][0])


def seconds_in_parts(fit: Fit, batch: int, size: int) -> float:
    """The seconds of a batch in full micro-batches of `size` and a remainder; the optimizer steps once."""
    before = -(-batch // max(size, 1)) - 1
    once = fit.optimizer_seconds or 0.0
    return before * (predict_seconds(fit, size) - once) + predict_seconds(fit, batch - before * size)


def _best(
    cost: Cost, once: float, batches: Ints, at_once: int, repeats: int, unit: int
) -> tuple[Ints, Floats]:
    """The best size for each batch, and the seconds with it; infinite where none does."""
    most = min(at_once, int(batches[-1]))  # a larger size is the whole batch, too
    single = _at_once(cost, np.arange(0, most + 1, unit, dtype=np.int64))
    largest = int(np.flatnonzero(np.isfinite(single))[-1])  # in units; a table is undefined past its end
    step = max(1, -(-largest * len(batches) // MOST_TRIED))
    sizes, seconds = np.full(len(batches), unit, np.int64), np.full(len(batches), np.inf)
    for size in range(largest, 0, -step):
        full = (batches - 1) // (size * unit)
        rest = (batches - full * (size * unit)) // unit
        trial = full * (single[size] - once) + single[rest]
        better = (trial < seconds) & (full < repeats)
        seconds[better], sizes[better] = trial[better], size * unit
    return np.minimum(sizes, batches), seconds


def _at_once(cost: Cost, batches: Ints) -> Floats:
    return Costs.stack([cost]).take(np.zeros(len(batches), np.int64)).compute(batches)


def _bends(batches: Ints, seconds: Floats) -> Ints:
    """The points between which a straight line gives all others; all points where rounding adds up."""
    bent = np.abs(seconds[2:] - 2 * seconds[1:-1] + seconds[:-2]) > ROUNDING * seconds[1:-1]
    kept = np.concatenate([[0], 1 + np.flatnonzero(bent), [len(batches) - 1]])
    kept = np.unique(kept)
    between = np.interp(batches, batches[kept], seconds[kept])
    return kept if np.allclose(between, seconds, rtol=CLOSE, atol=0.0) else np.arange(len(batches))
