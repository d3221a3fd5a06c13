"""The min-max problem as a mixed-integer linear program (MILP) in PuLP, for HiGHS or CBC.

Worker k's cost consists of a few straight pieces; one binary variable a piece selects the batch's piece:

    min t    t >= intercept_j z_kj + slope_j b_kj + extra_k      first_j z_kj <= b_kj <= last_j z_kj
             sum_j z_kj = used_k in {0, 1}   (1: required)       sum_kj b_kj = B,   sum_j b_kj = quantum_k u_k
             sum_kj each_k b_kj <= pool, where the workers draw on one

extra_k is what the caller adds to a worker's time. Times are scaled to be near 1, because the solvers'
tolerances are absolute: their solutions are exact to about 1e-6.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pyps.errors import Infeasible, PypsError, needed
from pyps.solver.costs import Costs, Ints
from pyps.solver.exact.minmax import Problem

SolverName = Literal["HiGHS", "CBC"]
MOST_SECONDS = 120.0  # for a proof: users wait for it
MIB = 2**20  # so that the solvers' tolerances are bytes


class NoProof(PypsError):
    """A solver stopped before it had proved an optimum. best, bound: of the objective, if any."""

    def __init__(self, message: str, best: float | None = None, bound: float | None = None) -> None:
        super().__init__(message)
        self.best, self.bound = best, bound


@dataclass(frozen=True)
class Piece:
    """T(b) = max(floor, intercept + slope * b) on first <= b <= last: seconds, seconds a sample, samples."""

    first: int
    last: int
    intercept: float
    slope: float
    floor: float = 0.0


@dataclass
class Milp:
    """A PuLP model, its objective t (in units of `scale` seconds), and one term a worker of each other kind.

    used: 0 or 1. batch: samples. steps: batch multiples. extra: further time of the worker, at least 0, or
    None.
    """

    model: Any
    t: Any
    scale: float
    batch_multiple: Ints
    used: list[Any] = field(default_factory=list)
    batch: list[Any] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    extra: list[Any] = field(default_factory=list)

    def minimise(
        self, objective: Any, solver: SolverName = "HiGHS", time_limit: float | None = MOST_SECONDS
    ) -> bool:
        """Solve with no gap allowed; False if infeasible. Raises NoProof if the solver proves neither within
        time_limit seconds; None: it may take any time.
        """
        pulp = needed("pulp", "plan")

        self.model.setObjective(objective)
        if solver == "HiGHS":
            exact = {
                "gapRel": 0.0,
                "gapAbs": 0.0,
                "mip_allow_restart": False,
            }  # a restart may lose the optimum
            engine = _silent(pulp.HiGHS)(msg=False, timeLimit=time_limit, **exact)
        else:
            engine = pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, gapAbs=0.0, timeLimit=time_limit)
        self.model.solve(engine)
        status = pulp.LpStatus[self.model.status]
        if status == "Infeasible":
            return False
        if status != "Optimal" or self.model.sol_status != pulp.LpSolutionOptimal:
            why = f"no proof within {time_limit:g} s" if time_limit is not None else status.lower()
            found = self.model.solverModel.getInfo() if solver == "HiGHS" else None
            if (
                found is None
                or not math.isfinite(found.objective_function_value)
                or not found.mip_gap < math.inf
            ):
                raise NoProof(f"{solver} ended without a solution: {why}")
            best, bound = found.objective_function_value, found.mip_dual_bound
            gap = f"a gap of {found.mip_gap:.1%} is left"
            raise NoProof(f"{solver} ended without a proof: {why}; {gap}", best, bound)
        return True

    def batches(self) -> Ints:
        """The solution after `minimise`, in samples."""
        steps = np.array([round(u.value() or 0.0) for u in self.steps], np.int64)
        return steps * self.batch_multiple


def _silent(solver: Any) -> Any:
    """PuLP's HiGHS, which prints its version when it is made, before anything can turn that off."""

    class Silent(solver):  # type: ignore[misc]
        def createAndConfigureSolver(self, lp: Any) -> None:  # noqa: N802
            with _no_output():
                super().createAndConfigureSolver(lp)

    return Silent


@contextmanager
def _no_output() -> Iterator[None]:
    """Return what C code writes to its standard output goes nowhere."""
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
        flush(None)  # into nowhere, not later into a file
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def minmax_milp(problem: Problem, extra: bool = False) -> Milp:
    """The program above. extra: add the variables extra_k, which the caller bounds.

    Raises Infeasible if a required worker can take no batch.
    """
    pulp = needed("pulp", "plan")

    model = pulp.LpProblem("minmax", pulp.LpMinimize)
    milp = Milp(model, model.add_variable("t", lowBound=0), time_scale(problem), problem.batch_multiple)
    for k in range(len(problem.costs)):
        more = model.add_variable(f"e{k}", lowBound=0) if extra else None
        _add_worker(milp, problem, k, more)
    model += pulp.lpSum(milp.batch) == problem.global_batch
    if (pool := problem.pool) is not None:
        used = pulp.lpSum(float(x) / MIB * b for x, b in zip(pool.each, milp.batch, strict=True))
        model += used <= pool.at_most / MIB
    return milp


def _add_worker(milp: Milp, problem: Problem, k: int, extra: Any) -> None:
    pulp = needed("pulp", "plan")

    model, t, scale = milp.model, milp.t, milp.scale
    multiple, low = int(problem.batch_multiple[k]), int(problem.min_batch[k])
    max_batch = int(min(problem.costs.last_batch(problem.max_batch)[k], problem.global_batch))
    chosen, batches = [], []
    for j, piece in enumerate(pieces(problem.costs, k, max_batch)):
        z = model.add_variable(f"z{k}_{j}", cat="Binary")
        b = model.add_variable(f"b{k}_{j}", lowBound=0)
        model += b >= max(piece.first, low) * z
        model += b <= piece.last * z
        model += t >= piece.intercept / scale * z + piece.slope / scale * b + (0 if extra is None else extra)
        if piece.floor > 0:
            model += t >= piece.floor / scale * z + (0 if extra is None else extra)
        chosen.append(z)
        batches.append(b)
    if problem.required[k] and not chosen:
        raise Infeasible(f"required worker {k} can take no batch")
    if chosen:
        model += pulp.lpSum(chosen) == 1 if problem.required[k] else pulp.lpSum(chosen) <= 1
    steps = model.add_variable(f"u{k}", 0, max_batch // multiple, cat="Integer")
    model += multiple * steps == pulp.lpSum(batches)
    milp.used.append(pulp.lpSum(chosen))
    milp.batch.append(multiple * steps)
    milp.steps.append(steps)
    milp.extra.append(extra)


def time_scale(problem: Problem) -> float:
    """Seconds near the optimum."""
    share = np.full(len(problem.costs), max(1, problem.global_batch // len(problem.costs)), np.int64)
    max_batch = problem.costs.last_batch(problem.max_batch)
    return float(np.median(problem.costs.seconds(np.clip(share, 1, np.maximum(max_batch, 1)))))


def pieces(costs: Costs, k: int, max_batch: int) -> list[Piece]:
    """The pieces on which worker k's cost is a straight line (apart from its floor), up to max_batch."""
    transfer = 0.0 if costs.transfer is None else float(costs.transfer[k])
    overlap = 0.0 if costs.overlap is None else float(costs.overlap[k])
    found = _computing(costs, k, max_batch)
    return [
        replace(
            p,
            intercept=p.intercept + transfer,
            floor=max(p.floor + transfer if p.floor > 0 else 0.0, overlap),
        )
        for p in found
    ]


def _computing(costs: Costs, k: int, max_batch: int) -> list[Piece]:
    if costs.micro is None:
        return _at_once(costs, k, max_batch)
    micro = int(costs.micro[k])
    first = _at_once(costs, k, min(micro, max_batch))
    whole = float(costs.take(np.array([k])).compute(np.array([micro]))[0]) if max_batch > micro else 0.0
    return [
        Piece(
            p.first + full * micro,
            min(p.last + full * micro, max_batch),
            p.intercept + full * (whole - p.slope * micro),
            p.slope,
            p.floor + full * whole if p.floor > 0 else 0.0,
        )
        for full in range(-(-max_batch // micro) if max_batch > 0 else 0)
        for p in first
        if p.first + full * micro <= max_batch
    ]


def _at_once(costs: Costs, k: int, max_batch: int) -> list[Piece]:
    start, stop = int(costs.start[k]), int(costs.stop[k])
    if max_batch < 1:
        return []
    if start == stop:
        return [Piece(1, max_batch, float(costs.c[k]), float(costs.a[k]), float(costs.t0[k]))]
    knots = [
        (int(b), float(s))
        for b, s in zip(costs.knot_batch[start:stop], costs.knot_seconds[start:stop], strict=True)
    ]
    found = [Piece(1, min(knots[0][0], max_batch), knots[0][1], 0.0)]
    for (b0, s0), (b1, s1) in itertools.pairwise(knots):
        if b0 < max_batch:
            slope = (s1 - s0) / (b1 - b0)
            found.append(Piece(b0, min(b1, max_batch), s0 - slope * b0, slope))
    return found
