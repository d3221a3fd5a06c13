"""The relaxed optimum: the least iteration time if samples could be divided.

    min t   s.t.  sum b_i >= B,  0 <= b_i <= max_i real,  T_i(b_i) <= t where b_i > 0

It is a lower bound for the exact split, because it drops minima and batch multiples (a required worker still
keeps t at or above T_i(min_i)). If no bound binds and the costs are lines, it has the closed form

    t* = (B + sum c_i/a_i) / (sum 1/a_i),   b_i = (t* - c_i)/a_i
"""

from __future__ import annotations

import heapq

import numpy as np

from pyps.solver.exact.minmax import Problem, times
from pyps.solver.sync import Sync

BISECTIONS = 40  # to 1e-12 of the time
ROUNDING = 1e-12  # relative: the inverse of a cost is rounded, but the bound must hold exactly


def relaxed_seconds(problem: Problem, iteration_seconds: float) -> float:
    """The relaxed optimum in seconds, rounded down. iteration_seconds: a time in which B can be done."""
    costs, limit = problem.costs, problem.costs.last_batch(problem.max_batch)
    low, high = 0.0, iteration_seconds
    while low < (middle := low + (high - low) / 2) < high:
        if costs.real_batch(middle, limit).sum() >= problem.global_batch:
            high = middle
        else:
            low = middle
    least = times(costs, np.where(problem.required, np.maximum(problem.min_batch, 1), 0)).max()
    return min(iteration_seconds, max(high * (1 - ROUNDING), float(least)))


def subset_bound(problem: Problem, sync: Sync, iteration_seconds: float) -> float:
    """The relaxed optimum with synchronisation, in seconds, over all choices of workers; rounded down.

    Every choice of low .. high workers takes at least the relaxed time of the best `high` workers plus the
    synchronisation of `low` workers over the fastest links. The box of counts with the least such bound is
    halved until it holds a single count.
    """
    if sync.kind == "none":
        return relaxed_seconds(problem, iteration_seconds)
    held = int(problem.required.sum())
    boxes = [(0.0, max(1, held), len(problem.costs))]
    while True:
        bound, low, high = heapq.heappop(boxes)
        if low == high and bound > 0:
            return min(iteration_seconds, bound)
        middle = (low + high) // 2
        for first, last in {(low, middle), (min(middle + 1, high), high)}:
            wait = float(
                max(
                    np.sort(sync.by_link(first))[first - 1],
                    sync.by_link(first)[problem.required].max(initial=0),
                )
            )
            heapq.heappush(boxes, (sync.end(_sooner(problem, last, iteration_seconds), wait), first, last))


def _sooner(problem: Problem, count: int, high: float) -> float:
    """A lower bound, at most `high`, of the time in which `count` workers do B samples and the required
    minima.
    """
    costs, limit = problem.costs, problem.costs.last_batch(problem.max_batch)
    low = float(times(costs, np.where(problem.required, np.maximum(problem.min_batch, 1), 0)).max()) * (
        1 - ROUNDING
    )
    spare, held = count - int(problem.required.sum()), problem.required

    def enough(t: float) -> bool:
        most = costs.real_batch(t, limit)
        free = np.sort(most[~held])[::-1][:spare]
        return bool(most[held].sum() + free.sum() >= problem.global_batch)

    if low >= high or enough(low):
        return min(low, high)
    for _ in range(BISECTIONS):
        middle = low + (high - low) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low * (1 - ROUNDING)
