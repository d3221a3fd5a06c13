"""The same program in two other forms, as independent checks, and what its bounds are worth.

`milp` states the integer program in PuLP and has HiGHS solve it, with no gap allowed; it knows nothing of
how pyps.solver.exact.minmax solves it. `prices` states the relaxation over the workers in use as a linear
program in cvxpy, whose dual values say which worker or bound holds the iteration up, and by how much.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyps.errors import Infeasible, PypsError
from pyps.solver.costs import Costs, Floats
from pyps.solver.exact.minmax import Problem, times
from pyps.solver.milp.constrained import Coupled, by_milp, valued
from pyps.solver.milp.program import SolverName, build, pieces, time_scale

HIGHS_TOLERANCE = 1e-6  # relative; HiGHS meets constraints to 1e-6 of the scaled program


@dataclass(frozen=True)
class Prices:
    """The relaxed optimum, and what a change is worth, in seconds of the iteration.

    per_sample: one more sample in the global batch. share: how far each worker's cost holds the iteration up
    (they sum to 1). cap: one more sample under a worker's maximum saves this much; low: so does one less of
    its minimum.
    """

    iteration_seconds: float
    per_sample: float
    share: Floats
    cap: Floats
    low: Floats


def milp(
    problem: Problem, *, time_limit_seconds: float | None = None, solver: SolverName = "HiGHS"
) -> tuple[list[int], float]:
    """Batches and iteration seconds, exact to the solver's tolerances. Raises Infeasible, PypsError."""
    program = build(problem)
    if not program.minimise(program.t, solver, time_limit_seconds):
        raise Infeasible(f"global_batch {problem.global_batch}: {solver} finds no split")
    found = program.batches()
    return found.tolist(), float(times(problem.costs, found).max())


def agreement(coupled: Coupled, batches: Sequence[int]) -> str:
    """One line that says that HiGHS confirms a split. Raises PypsError if it finds a better one, or none."""
    ours = valued(coupled, np.array(batches, np.int64)).iteration_seconds
    if coupled.loose and coupled.sync.kind == "none":
        _, theirs = milp(coupled.problem)
    else:
        theirs = by_milp(coupled).iteration_seconds
    if abs(theirs - ours) > HIGHS_TOLERANCE * ours:
        raise PypsError(f"HiGHS disagrees: {theirs!r} s against {ours!r} s; please report this cluster")
    return f"checked: HiGHS finds the same optimum, {theirs:.6g} s"


def prices(problem: Problem, batches: Sequence[int]) -> Prices:
    """The relaxation over the workers used in `batches`, solved by cvxpy, and its dual values.

    Tables and accumulated costs count with their lower convex hull. Workers out of use have price 0.
    Raises PypsError if the solver ends without an optimum.
    """
    cp: Any = importlib.import_module("cvxpy")
    used = np.flatnonzero(np.asarray(batches) > 0)
    scale = time_scale(problem)
    cap = problem.costs.last_batch(np.minimum(problem.cap, problem.global_batch))[used]
    low = np.maximum(problem.low[used], 1)
    t, b = cp.Variable(), cp.Variable(len(used))
    owner, intercept, slope = [], [], []
    for k, worker in enumerate(used):
        for c, a in _convex(problem.costs, int(worker), int(cap[k])):
            owner.append(k)
            intercept.append(c / scale)
            slope.append(a / scale)
    in_time = np.array(intercept) + cp.multiply(np.array(slope), b[np.array(owner)]) <= t
    all_done, under, over = problem.global_batch <= cp.sum(b), b <= cap, b >= low
    program = cp.Problem(cp.Minimize(t), [in_time, all_done, under, over])
    program.solve(solver=cp.CLARABEL)
    if program.status != cp.OPTIMAL:
        raise PypsError(f"cvxpy ended without an optimum: {program.status}")

    def spread(values: Floats, index: Sequence[int] | None = None) -> Floats:
        out = np.zeros(len(batches))
        np.add.at(out, used if index is None else used[np.array(index)], np.abs(values))
        return out

    return Prices(
        iteration_seconds=float(t.value) * scale,
        per_sample=float(abs(all_done.dual_value)) * scale,
        share=spread(in_time.dual_value, owner),
        cap=spread(under.dual_value) * scale,
        low=spread(over.dual_value) * scale,
    )


def _convex(costs: Costs, k: int, cap: int) -> list[tuple[float, float]]:
    """Lines (intercept, slope) whose maximum is worker k's cost, or its lower convex hull."""
    parts = pieces(costs, k, cap)
    if costs.start[k] == costs.stop[k] and len(parts) == 1:
        return [(parts[0].intercept, parts[0].slope), (parts[0].floor, 0.0)]
    ends = sorted({batch for part in parts for batch in (part.low, part.high)})
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
