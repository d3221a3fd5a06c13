"""The optimal split of a constrained problem, by the exact solvers or as a mixed-integer program for HiGHS.

Without side constraints the exact solver finds the optimum, and the tests show that both agree. Its optimum
also holds where a link has time for all transfers anyway. With side constraints that bind, the search by
kinds (pyps.solver.exact.kinds) finds it where many workers are alike. The rest, as a pool of memory where
both needs and batch multiples are unlike, is a mixed-integer linear program (MILP); HiGHS runs until it has
proved the optimum, with no gap allowed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import numpy as np

from pyps.errors import Infeasible, PypsError, needed
from pyps.solver.constrained import ConstrainedProblem, ConstrainedSolution, Limit, evaluate
from pyps.solver.exact.kinds import TooManyKinds, fastest, handles
from pyps.solver.exact.minmax import NotAlike, solve
from pyps.solver.exact.remedies import with_remedies
from pyps.solver.exact.subset import solve_subset
from pyps.solver.milp.model import MOST_SECONDS, Milp, NoProof, minmax_milp
from pyps.solver.sync import Sync


def solve_constrained(
    constrained: ConstrainedProblem, time_limit: float | None = MOST_SECONDS
) -> ConstrainedSolution:
    """The optimum: by the exact solvers, else by HiGHS.

    time_limit: seconds for HiGHS. Raises Infeasible with the least change of one limit or of B that would
    help, and NoProof if HiGHS stops without a proof.
    """
    with contextlib.suppress(NotAlike):
        return _by_exact_solvers(constrained, time_limit)
    return solve_by_milp(constrained, time_limit)


def _by_exact_solvers(constrained: ConstrainedProblem, time_limit: float | None) -> ConstrainedSolution:
    if constrained.may_forbid or constrained.problem.local_steps > 1:
        try:
            solve(constrained.problem)
        except Infeasible as error:
            raise with_remedies(constrained, error.reason) from None
    if constrained.may_not_bind:
        found = evaluate(constrained, solve_subset(constrained.problem, constrained.sync).batches)
        steps = float(found.step_seconds.max()) + found.sync_seconds
        if not constrained.has_side_constraints or found.longest_seconds <= steps:
            return found
    with contextlib.suppress(TooManyKinds):
        if handles(constrained):
            best = fastest(constrained)
            if best is None:
                raise with_remedies(constrained)
            return best
    return solve_by_milp(constrained, time_limit)


def solve_by_milp(
    constrained: ConstrainedProblem, time_limit: float | None = MOST_SECONDS
) -> ConstrainedSolution:
    """The optimum by HiGHS, with or without side constraints."""
    with contextlib.suppress(NotAlike):
        solve(constrained.problem)  # raises Infeasible if no split exists even without side constraints
    milp, seconds = constrained_milp(constrained)
    try:
        feasible = milp.minimise(seconds, time_limit=time_limit)
    except NoProof as stopped:
        if stopped.best is None or stopped.bound is None:
            raise
        best, bound = (1e3 * milp.scale * value for value in (stopped.best, stopped.bound))
        batches = milp.batches().tolist()
        between = f"iterations of {best:.4g} ms by {batches}, no split is below {bound:.4g} ms"
        raise NoProof(f"{stopped}: {between}", stopped.best, stopped.bound) from None
    if not feasible and not constrained.may_forbid:
        raise Infeasible(
            f"global_batch {constrained.problem.global_batch}: no batches fit all memory together"
        )
    if not feasible:
        raise with_remedies(constrained)
    return solution_of(constrained, milp)


def solution_of(constrained: ConstrainedProblem, milp: Milp) -> ConstrainedSolution:
    """The solution in a solved MILP. Raises PypsError if rounding broke it."""
    batches = milp.batches()
    if int(batches.sum()) != constrained.problem.global_batch:
        raise PypsError("HiGHS ended with batches that are not whole; please report this cluster")
    return evaluate(constrained, batches)


def constrained_milp(constrained: ConstrainedProblem) -> tuple[Milp, Any]:
    """The MILP with all side constraints, and its iteration time, the objective."""
    pulp = needed("pulp", "plan")

    milp = minmax_milp(constrained.problem, extra=True)
    model, used = milp.model, milp.used
    for limit in constrained.limits:
        if math.isfinite(limit.at_most):
            unit = limit.at_most or 1.0
            model += total_need(milp, limit, unit) <= limit.at_most / unit
    for group in constrained.together:
        for k in group[1:]:
            model += used[int(k)] == used[int(group[0])]
    _add_resources(milp, constrained)
    for alike in constrained.kinds():  # of interchangeable workers the first take the larger batches
        for left, right in itertools.pairwise(alike):
            model += milp.steps[left] >= milp.steps[right]
    if constrained.sync.kind == "none":
        return milp, milp.t + 0
    sync = model.add_variable("sync", lowBound=0)
    _add_sync(milp, constrained.sync, sync)
    given = constrained.sync
    if given.overlap == 0:
        return milp, pulp.lpSum([milp.t, sync])
    end = model.add_variable("end", lowBound=0)
    model += end >= milp.t + given.tail * sync
    model += end >= (1 - given.overlap) * milp.t + sync
    return milp, end + 0


def total_need(milp: Milp, limit: Limit, unit: float = 1.0) -> Any:
    """The needs of all workers in use, in units of `unit`."""
    pulp = needed("pulp", "plan")

    return pulp.lpSum(float(x) / unit * z for x, z in zip(limit.need, milp.used, strict=True))


def _add_resources(milp: Milp, constrained: ConstrainedProblem) -> None:
    pulp = needed("pulp", "plan")

    waits: dict[int, list[tuple[Any, float]]] = {}
    for resource in constrained.resources:
        workers = np.flatnonzero(resource.workers).tolist()
        seconds = resource.transfer_seconds / milp.scale
        on_link = pulp.lpSum(float(seconds[k]) * milp.used[k] for k in workers)
        if resource.overlaps:
            milp.model += milp.t >= on_link
        else:
            for k in workers:
                waits.setdefault(k, []).append((on_link, float(seconds[workers].sum())))
        if resource.samples_per_second is not None:
            rate = resource.samples_per_second * milp.scale
            milp.model += milp.t >= pulp.lpSum(milp.batch[k] for k in workers) / rate
    for k, links in waits.items():
        most = sum(m for _, m in links)
        if most > 0:
            milp.model += milp.extra[k] >= pulp.lpSum(x for x, _ in links) - most * (1 - milp.used[k])


def _add_sync(milp: Milp, sync: Sync, seconds: Any) -> None:
    """seconds >= F_k(link) if k workers are in use and one of them has that link."""
    pulp = needed("pulp", "plan")

    model, used = milp.model, milp.used
    counts = [model.add_variable(f"n{k}", cat="Binary") for k in range(1, len(used) + 1)]
    model += pulp.lpSum(counts) == 1
    model += pulp.lpSum(k * y for k, y in enumerate(counts, 1)) == pulp.lpSum(used)
    links = np.stack([sync.latency_seconds, sync.message_seconds])
    _, first, which = np.unique(links, axis=1, return_index=True, return_inverse=True)
    for p, place in enumerate(first):
        link_used = model.add_variable(f"l{p}", 0, 1)
        for k in np.flatnonzero(np.ravel(which) == p).tolist():
            model += link_used >= used[k]
        for count, y in enumerate(counts, 1):
            cost = float(sync.by_link(count)[place]) / milp.scale
            if cost > 0:
                model += seconds >= cost * (y + link_used - 1)
