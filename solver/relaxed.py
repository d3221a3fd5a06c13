"""The relaxed optimum: how fast the cluster could be if samples could be divided.

    min t   s.t.  sum b_i >= B,  0 <= b_i <= cap_i real,  T_i(b_i) <= t where b_i > 0

A lower bound on the exact split, as minima and quanta are dropped (a required worker still holds t to
T_i(low_i)). Where no bound binds and the costs are lines it has the closed form

    t* = (B + sum c_i/a_i) / (sum 1/a_i),   b_i = (t* - c_i)/a_i
"""

from __future__ import annotations

import numpy as np

from pyps.solver.costs import Costs
from pyps.solver.minmax import Problem, times

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


def unbounded_seconds(costs: Costs, global_batch: int) -> float:
    """The closed form above, for lines with a_i > 0 that all take part."""
    return float((global_batch + (costs.c / costs.a).sum()) / (1 / costs.a).sum())
