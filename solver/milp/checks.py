"""Independent checks of the exact solver: the same problem as a MILP, its relaxation with shadow prices, and
the costs of micro-batches by enumeration.

`agreement` states the integer program in PuLP and solves it with HiGHS, with no gap allowed; the program
shares nothing with pyps.solver.exact. `shadow_prices` states the relaxation over the workers in use as a
linear program in cvxpy; its dual values show which worker or bound limits the iteration time, and by how
much.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyps.errors import PypsError, needed
from pyps.solver.constrained import ConstrainedProblem, evaluate
from pyps.solver.costs import Costs, Floats
from pyps.solver.exact.minmax import Problem
from pyps.solver.milp.constrained import solve_by_milp
from pyps.solver.milp.model import MIB, pieces, time_scale

NEGLIGIBLE = 1e-6  # of the iteration: below, a dual value is the solver's tolerance
FAR_FROM_BOUND = 1e-3  # samples
HIGHS_TOLERANCE = 1e-6  # relative; HiGHS meets constraints to 1e-6 of the scaled program


@dataclass(frozen=True)
class ShadowPrices:
    """The relaxed optimum and the dual values, in seconds of the iteration.

    per_sample: what one more sample in the global batch costs. share: how much each worker's cost determines
    the iteration time (the shares sum to 1). max_batch: what one more sample of a worker's maximum saves.
    min_batch: what one sample less of its minimum saves.
    """

    iteration_seconds: float
    per_sample: float
    share: Floats
    max_batch: Floats
    min_batch: Floats


def agreement(constrained: ConstrainedProblem, batches: Sequence[int], coarse: float = 0.0) -> str:
    """One line confirming that HiGHS finds the same optimum. Raises PypsError if it finds a better one, or
    none.

    coarse: relative: how much better one may be than batches that were searched for in such steps.
    """
    ours = evaluate(constrained, np.array(batches, np.int64)).longest_seconds
    theirs = solve_by_milp(constrained).longest_seconds
    if abs(theirs - ours) <= HIGHS_TOLERANCE * ours:
        return f"checked: HiGHS finds the same optimum, {theirs:.6g} s"
    if 0 < ours - theirs <= (coarse + HIGHS_TOLERANCE) * ours and coarse:
        found = f"HiGHS finds {theirs:.6g} s, the plan takes {ours:.6g} s"
        return f"checked: {found}: sets of many unlike workers are searched to within {coarse:.0%}"
    raise PypsError(f"HiGHS disagrees: {theirs!r} s against {ours!r} s; please report this cluster")


def shadow_prices(problem: Problem, batches: Sequence[int]) -> ShadowPrices:
    """Solves the relaxation over the workers used in `batches` with cvxpy; returns its dual values.

    Tables and accumulated costs enter with their lower convex hull. Unused workers have price 0. So has all
    else if each used worker is at a bound: the dual values are not unique then.
    Raises PypsError if the solver ends without an optimum.
    """
    cp: Any = needed("cvxpy", "plan")
    used = np.flatnonzero(np.asarray(batches) > 0)
    scale = time_scale(problem)
    # Beyond B, where no batch can be: a bound of B itself would have a price, though it binds nothing.
    most = problem.costs.last_batch(np.minimum(problem.max_batch, 2 * problem.global_batch))[used]
    low = np.maximum(problem.min_batch[used], 1)
    t, b = cp.Variable(), cp.Variable(len(used))
    owner, intercept, slope = [], [], []
    for k, worker in enumerate(used):
        for c, a in _convex(problem.costs, int(worker), int(most[k])):
            owner.append(k)
            intercept.append(c / scale)
            slope.append(a / scale)
    in_time = np.array(intercept) + cp.multiply(np.array(slope), b[np.array(owner)]) <= t
    all_done, under, over = problem.global_batch <= cp.sum(b), b <= most, b >= low
    within = [in_time, all_done, under, over]
    if (pool := problem.pool) is not None:
        within.append(pool.each[used] / MIB @ b <= pool.at_most / MIB)
    program = cp.Problem(cp.Minimize(t), within)
    program.solve(solver=cp.SCIPY)
    if program.status != cp.OPTIMAL:
        raise PypsError(f"cvxpy ended without an optimum: {program.status}")

    unique = bool(np.any((b.value > low + FAR_FROM_BOUND) & (b.value < most - FAR_FROM_BOUND)))
    free = NEGLIGIBLE * float(t.value)

    def price(values: Floats) -> Floats:
        return np.where(unique & (np.abs(values) > free), np.abs(values), 0.0) * scale

    def spread(values: Floats, index: Sequence[int] | None = None) -> Floats:
        out = np.zeros(len(batches))
        np.add.at(out, used if index is None else used[np.array(index)], np.abs(values))
        return out

    return ShadowPrices(
        iteration_seconds=float(t.value) * scale,
        per_sample=float(price(all_done.dual_value)),
        share=spread(in_time.dual_value, owner),
        max_batch=spread(price(under.dual_value)),
        min_batch=spread(price(over.dual_value)),
    )


def _convex(costs: Costs, k: int, most: int) -> list[tuple[float, float]]:
    """Lines (intercept, slope) whose maximum is worker k's cost, or its lower convex hull."""
    parts = pieces(costs, k, most)
    if costs.start[k] == costs.stop[k] and len(parts) == 1:
        return [(parts[0].intercept, parts[0].slope), (parts[0].floor, 0.0)]
    ends = sorted({batch for part in parts for batch in (part.first, part.last)})
    seconds = costs.take(np.full(len(ends), k)).seconds(np.array(ends, np.int64)).tolist()
    hull: list[tuple[int, float]] = []
    for b, s in zip(ends, seconds, strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (b, s)):
            hull.pop()
        hull.append((b, s))
    lines = [
        (s - _slope((b, s), after) * b, _slope((b, s), after)) for (b, s), after in itertools.pairwise(hull)
    ]
    return lines or [(hull[0][1], 0.0)]


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])
