"""The samples at once of each worker, where micro-batches draw on one pool of memory: exact, by a knapsack.

By a time t a batch needs the memory of the smallest micro-batches in which it takes no longer. The least
memory of B samples by t is a knapsack with one batch of each worker:

    f_k(B) = min over b of  f_{k-1}(B - b) + need_k(b, t)

Whether f_n(B) fits the pool is monotone in t, and the earliest time is that of some size and batch: these
are bisected.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pyps.errors import InputError
from pyps.formats.cluster import CLUSTER_FILE
from pyps.solver.costs import Cost, Costs, Floats, Ints
from pyps.solver.exact.knapsack import best_choices
from pyps.solver.exact.minmax import too_large

LATEST = 1e300  # seconds: later than any split
MOST_TIMES = 1 << 22  # pairs of a size and a batch of one kind of worker
MOST_SUMS = 1 << 28  # of a batch and a sum, over all workers: seconds


@dataclass(frozen=True, eq=False)
class InParts:
    """A worker that computes a batch in up to `repeats` micro-batches: of at most `at_once` samples, in steps
    of `unit`.

    cost: T_1. once: the optimizer's seconds in it. least, multiple: of its batch. each: bytes of a sample.
    """

    cost: Cost
    once: float
    at_once: int
    unit: int
    repeats: int
    least: int
    multiple: int
    each: float

    def choices(self, total: int) -> tuple[Ints, Ints]:
        """The sizes of micro-batches, and the batches up to `total`. Raises InputError for too many."""
        first = -(-max(self.least, 1) // self.multiple) * self.multiple
        last = min(self.at_once * self.repeats, total)
        sizes = np.arange(self.unit, min(self.at_once, last) + self.unit, self.unit, dtype=np.int64)
        batches = np.arange(first, last + 1, self.multiple, dtype=np.int64)
        if len(sizes) * len(batches) > MOST_TIMES:
            raise _too_many(len(sizes) * len(batches), "sizes and batches")
        return sizes[sizes <= self.at_once], batches

    def seconds(self, sizes: Ints, batches: Ints) -> Floats:
        """The seconds of each batch (columns) in micro-batches of each size (rows); infinite if too many."""
        full = (batches - 1) // sizes[:, None]
        rest = batches - full * sizes[:, None]
        last = self._alone(rest.ravel()).reshape(rest.shape)
        whole = self._alone(sizes)[:, None] - self.once
        return np.where(full < self.repeats, np.where(full > 0, full * whole, 0.0) + last, np.inf)

    def _alone(self, batches: Ints) -> Floats:
        return Costs.stack([self.cost]).take(np.zeros(len(batches), np.int64)).compute(batches)

    @cached_property
    def key(self) -> tuple[float | int | str, ...]:
        """Workers with equal keys are alike."""
        bounds = self.at_once, self.unit, self.repeats, self.least, self.multiple
        return self.each, *bounds, self.once, repr(self.cost)


@dataclass(frozen=True)
class _Times:
    """The choices of a kind of worker, the seconds of each, and the bytes that each takes."""

    sizes: Ints
    batches: Ints
    seconds: Floats
    each: float

    def needs(self, t: float) -> tuple[Floats, Ints]:
        """The least bytes of each batch by t, infinite if it takes longer, and the samples at once."""
        in_time = self.seconds <= t
        at_once = np.minimum(self.sizes[in_time.argmax(0)], self.batches)
        return np.where(in_time.any(0), self.each * at_once, np.inf), at_once


def at_once_within(workers: Sequence[InParts], total: int, at_most: float) -> Ints | None:
    """The samples at once of each worker with which `total` samples are done soonest within a pool of
    `at_most` bytes; None if their batches do not sum to it, whatever the pool.

    Raises Infeasible where they do, but take more, and InputError for too many choices.
    """
    order = sorted(range(len(workers)), key=lambda k: workers[k].key)
    kinds: dict[tuple[float | int | str, ...], _Times] = {}
    for one in workers:
        if one.key not in kinds:
            sizes, batches = one.choices(total)
            if not len(sizes) or not len(batches):
                return None
            kinds[one.key] = _Times(sizes, batches, one.seconds(sizes, batches), one.each)
    times = [kinds[workers[k].key] for k in order]
    unit = math.gcd(total, *(one.multiple for one in workers))
    sums = sum(len(one.batches) for one in times) * (total // unit)
    if sums > MOST_SUMS:
        raise _too_many(sums, "batches and sums")
    steps = [one.batches // unit for one in times]

    def least(t: float) -> tuple[float, list[int]]:
        """The least bytes of all batches by t, and which choices these are."""
        worth, picked = best_choices([-one.needs(t)[0] for one in times], steps, total // unit)
        return -worth, picked

    whole = least(LATEST)[0]
    if not math.isfinite(whole):
        return None
    if whole > at_most:
        raise too_large(total, whole, at_most)
    ends = np.unique(np.concatenate([one.seconds[np.isfinite(one.seconds)] for one in kinds.values()]))
    seconds = ends.tolist()
    t = seconds[bisect_left(seconds[:-1], True, key=lambda t: least(t)[0] <= at_most)]
    at_once = np.zeros(len(workers), np.int64)
    at_once[order] = [one.needs(t)[1][k] for one, k in zip(times, least(t)[1], strict=True)]
    return at_once


def _too_many(count: int, what: str) -> InputError:
    expected = 'fewer, or 1 with sharding.shares = "memory": each combination is tried'
    return InputError(CLUSTER_FILE, "max_accumulation", f"{count:,} combinations of {what}", expected)
