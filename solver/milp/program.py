"""The min-max program as a mixed-integer program in PuLP, for HiGHS or CBC.

Worker k's cost is a few straight pieces; a binary for each says which one its batch lies on:

    min t    t >= intercept_j z_kj + slope_j b_kj + extra_k      low_j z_kj <= b_kj <= high_j z_kj
             sum_j z_kj = used_k in {0, 1}   (1: required)       sum_kj b_kj = B,   sum_j b_kj = quantum_k u_k

extra_k is whatever the caller adds to a worker's time. Times are scaled to be near 1, as the tolerances of
the solvers are absolute: their answers are exact to about 1e-6.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pyps.errors import Infeasible, PypsError
from pyps.solver.costs import Costs, Ints
from pyps.solver.exact.minmax import Problem

SolverName = Literal["HiGHS", "CBC"]


@dataclass(frozen=True)
class Piece:
    """T(b) = max(floor, intercept + slope * b) on low <= b <= high: seconds, seconds a sample, samples."""

    low: int
    high: int
    intercept: float
    slope: float
    floor: float = 0.0


@dataclass
class Program:
    """A PuLP model and its parts: t (in units of `scale` seconds), the others with a term for each worker.

    used: 0 or 1. batch: samples. steps: quanta. extra: what else a worker's time holds, at least 0, or None.
    """

    model: Any
    t: Any
    scale: float
    quantum: Ints
    used: list[Any] = field(default_factory=list)
    batch: list[Any] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    extra: list[Any] = field(default_factory=list)

    def minimise(self, objective: Any, solver: SolverName = "HiGHS", time_limit: float | None = None) -> bool:
        """Solve with no gap allowed; False if infeasible. Raises PypsError for any other end."""
        import pulp

        self.model.setObjective(objective)
        if solver == "HiGHS":
            engine = pulp.HiGHS(msg=False, gapRel=0.0, gapAbs=0.0, timeLimit=time_limit)
        else:
            engine = pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, gapAbs=0.0, timeLimit=time_limit)
        self.model.solve(engine)
        status = pulp.LpStatus[self.model.status]
        if status == "Infeasible":
            return False
        if status != "Optimal" or self.model.sol_status != pulp.LpSolutionOptimal:
            why = f"no proof within {time_limit:g} s" if time_limit is not None else status.lower()
            raise PypsError(f"{solver} ended without an answer: {why}")
        return True

    def batches(self) -> Ints:
        """The answer, in samples, after `minimise`."""
        steps = np.array([round(u.value() or 0.0) for u in self.steps], np.int64)
        return steps * self.quantum


def build(problem: Problem, extra: bool = False, total: bool = True) -> Program:
    """The program above; with `extra`, a variable a worker for the caller to bound; without `total`, any B.

    Raises Infeasible if a required worker can take no batch.
    """
    import pulp

    model = pulp.LpProblem("minmax", pulp.LpMinimize)
    program = Program(model, model.add_variable("t", lowBound=0), time_scale(problem), problem.quantum)
    for k in range(len(problem.costs)):
        more = model.add_variable(f"e{k}", lowBound=0) if extra else None
        _add_worker(program, problem, k, more)
    if total:
        model += pulp.lpSum(program.batch) == problem.global_batch
    return program


def _add_worker(program: Program, problem: Problem, k: int, extra: Any) -> None:
    import pulp

    model, t, scale = program.model, program.t, program.scale
    quantum, low = int(problem.quantum[k]), int(problem.low[k])
    cap = int(min(problem.costs.last_batch(problem.cap)[k], problem.global_batch))
    chosen, batches = [], []
    for j, piece in enumerate(pieces(problem.costs, k, cap)):
        z = model.add_variable(f"z{k}_{j}", cat="Binary")
        b = model.add_variable(f"b{k}_{j}", lowBound=0)
        model += b >= max(piece.low, low) * z
        model += b <= piece.high * z
        model += t >= piece.intercept / scale * z + piece.slope / scale * b + (0 if extra is None else extra)
        if piece.floor > 0:
            model += t >= piece.floor / scale * z + (0 if extra is None else extra)
        chosen.append(z)
        batches.append(b)
    if problem.required[k] and not chosen:
        raise Infeasible(f"required worker {k} can take no batch")
    if chosen:
        model += pulp.lpSum(chosen) == 1 if problem.required[k] else pulp.lpSum(chosen) <= 1
    steps = model.add_variable(f"u{k}", 0, cap // quantum, cat="Integer")
    model += quantum * steps == pulp.lpSum(batches)
    program.used.append(pulp.lpSum(chosen))
    program.batch.append(quantum * steps)
    program.steps.append(steps)
    program.extra.append(extra)


def time_scale(problem: Problem) -> float:
    """Seconds near the optimum."""
    share = np.full(len(problem.costs), max(1, problem.global_batch // len(problem.costs)), np.int64)
    cap = problem.costs.last_batch(problem.cap)
    return float(np.median(problem.costs.seconds(np.clip(share, 1, np.maximum(cap, 1)))))


def pieces(costs: Costs, k: int, cap: int) -> list[Piece]:
    """Where worker k's cost is a straight line (its floor apart), up to its cap, in every micro-batch."""
    once = 0.0 if costs.once is None else float(costs.once[k])
    found = _computing(costs, k, cap)
    return [
        replace(p, intercept=p.intercept + once, floor=p.floor + once if p.floor > 0 else 0.0) for p in found
    ]


def _computing(costs: Costs, k: int, cap: int) -> list[Piece]:
    if costs.micro is None:
        return _at_once(costs, k, cap)
    micro = int(costs.micro[k])
    first = _at_once(costs, k, min(micro, cap))
    whole = float(costs.take(np.array([k])).compute(np.array([micro]))[0]) if cap > micro else 0.0
    return [
        Piece(
            p.low + full * micro,
            min(p.high + full * micro, cap),
            p.intercept + full * (whole - p.slope * micro),
            p.slope,
            p.floor + full * whole if p.floor > 0 else 0.0,
        )
        for full in range(-(-cap // micro) if cap > 0 else 0)
        for p in first
        if p.low + full * micro <= cap
    ]


def _at_once(costs: Costs, k: int, cap: int) -> list[Piece]:
    start, stop = int(costs.start[k]), int(costs.stop[k])
    if cap < 1:
        return []
    if start == stop:
        return [Piece(1, cap, float(costs.c[k]), float(costs.a[k]), float(costs.t0[k]))]
    knots = [
        (int(b), float(s))
        for b, s in zip(costs.knot_batch[start:stop], costs.knot_seconds[start:stop], strict=True)
    ]
    found = [Piece(1, min(knots[0][0], cap), knots[0][1], 0.0)]
    for (b0, s0), (b1, s1) in itertools.pairwise(knots):
        if b0 < cap:
            slope = (s1 - s0) / (b1 - b0)
            found.append(Piece(b0, min(b1, cap), s0 - slope * b0, slope))
    return found
