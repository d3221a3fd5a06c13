"""The relaxed optimum: how fast the cluster could be if samples could be divided.

    min t   s.t.  sum b_i >= B,  0 <= b_i <= cap_i real,  T_i(b_i) <= t where b_i > 0

A lower bound on the exact split, as minima and quanta are dropped (a required worker still holds t to
T_i(low_i)). Where no bound binds and the costs are lines it has the closed form

    t* = (B + sum c_i/a_i) / (sum 1/a_i),   b_i = (t* - c_i)/a_i
"""

from __future__ import annotations

import heapq

import numpy as np

from pyps.solver.costs import Costs
from pyps.solver.exact.minmax import Problem, times
from pyps.solver.sync import Sync

BISECTIONS = 40  # to 1e-12 of the time
ROUNDING = 1e-12  # relative: the inverse of a cost is rounded, the bound must not be


def relaxed_seconds(problem: Problem, iteration_seconds: float) -> float:
    """The relaxed optimum in seconds, rounded down; iteration_seconds is a time in which B can be done."""
    costs, cap = problem.costs, problem.costs.last_batch(problem.cap)
    low, high = 0.0, iteration_seconds
    while low < (middle := low + (high - low) / 2) < high:
        if costs.real_batch(middle, cap).sum() >= problem.global_batch:
            high = middle
        else:
            low = middle
    least = times(costs, np.where(problem.required, np.maximum(problem.low, 1), 0)).max()
    return min(iteration_seconds, max(high * (1 - ROUNDING), float(least)))


def subset_bound(problem: Problem, sync: Sync, iteration_seconds: float) -> float:
    """The same with the synchronisation of those in use, over all choices of them; rounded down.

    With at most `high` workers, whose samples can be divided, and the synchronisation of `low` of them over
    their fastest links: no choice of low .. high workers is sooner. The least such bound's box of counts is
    halved until it is a single count.
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
            heapq.heappush(boxes, (_sooner(problem, last, iteration_seconds) + wait, first, last))


def _sooner(problem: Problem, count: int, high: float) -> float:
    """A time by which no `count` workers can do B, nor the required ones their minima; at most `high`."""
    costs, cap = problem.costs, problem.costs.last_batch(problem.cap)
    low = float(times(costs, np.where(problem.required, np.maximum(problem.low, 1), 0)).max()) * (
        1 - ROUNDING
    )
    spare, held = count - int(problem.required.sum()), problem.required

    def enough(t: float) -> bool:
        most = costs.real_batch(t, cap)
        free = np.sort(most[~held])[::-1][:spare]
        return bool(most[held].sum() + free.sum() >= problem.global_batch)

    if low >= high or enough(low):
        return min(low, high)
    for _ in range(BISECTIONS):
        middle = low + (high - low) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low * (1 - ROUNDING)


def unbounded_seconds(costs: Costs, global_batch: int) -> float:
    """The closed form above, for lines with a_i > 0 that all take part."""
    fixed = costs.c if costs.once is None else costs.c + costs.once
    return float((global_batch + (fixed / costs.a).sum()) / (1 / costs.a).sum())
