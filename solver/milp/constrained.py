"""The optimal split under constraints between workers, as a mixed-integer linear program (MILP) for HiGHS.

To the min-max problem with synchronisation (pyps.solver.exact.subset) come the side constraints:

    limits      the needs of all workers in use, price per hour or watts, sum to at most a limit
    resources   a link shared by several workers: their transfers take turns. Each worker waits for all of
                them, or, where they do not meet, an iteration lasts at least as long as all of them in one
                direction. A host: it prepares a fixed number of samples a second for all its workers
    together    sets of workers that are used all or not at all

Without side constraints the exact solver finds the optimum, and the tests show that both agree. Its optimum
also holds where a link has time for all transfers anyway. With side constraints that bind we know no method
faster than a MILP. HiGHS runs until it has proved the optimum, with no gap allowed.

The objective is the longest step. How long an iteration takes then depends on the policy's pace
(pyps.solver.pace).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyps.errors import Infeasible, PypsError
from pyps.formats.mode import ROUND, Pace
from pyps.solver.costs import Floats, Ints
from pyps.solver.exact.minmax import Bools, Problem, solve, times
from pyps.solver.exact.subset import solve_subset
from pyps.solver.milp.model import Milp, minmax_milp
from pyps.solver.pace import iteration
from pyps.solver.sync import Sync


@dataclass(frozen=True)
class Limit:
    """The `need` of all workers in use (one entry a worker) sums to at most at_most, in the unit of `key`."""

    key: str
    need: Floats
    at_most: float


@dataclass(frozen=True)
class Resource:
    """A link or host that `workers` share: transfer_seconds of each (0: none), samples a second of a host.

    overlaps: transfers do not meet. Each worker's own is then part of its cost, not of the resource's.
    """

    name: str
    workers: Bools
    transfer_seconds: Floats
    samples_per_second: float | None = None
    overlaps: bool = False


@dataclass(frozen=True)
class ConstrainedProblem:
    """A min-max problem, its synchronisation, the side constraints between workers, and the policy's pace.

    link_seconds: of each worker's transfers, apart from those that resources add to its cost; None: none.
    """

    problem: Problem
    sync: Sync
    limits: tuple[Limit, ...] = ()
    resources: tuple[Resource, ...] = ()
    together: tuple[Ints, ...] = ()
    pace: Pace = ROUND
    link_seconds: Floats | None = None

    @property
    def has_side_constraints(self) -> bool:
        """Whether more ties the workers than the sum of their batches and the synchronisation."""
        return bool(self.limits or self.resources or self.together)

    @property
    def minimises_iteration(self) -> bool:
        """Whether the objective, the longest step, is also how long an iteration takes."""
        return self.pace.kind != "free" and not self.pace.spare

    @property
    def may_not_bind(self) -> bool:
        """Whether the only side constraints are links that may have time for all transfers."""
        links = all(one.overlaps and one.samples_per_second is None for one in self.resources)
        return links and not self.limits and not self.together


@dataclass(frozen=True)
class ConstrainedSolution:
    """Batches (0 = left out); compute, transfer and step seconds of each worker.

    link_seconds covers a worker's own link and its shared links. step_seconds: from one step to the next, of
    a worker that waits for no other. longest_seconds: the objective: the longest step, or a link's transfers
    or a host's preparation if these take longer, plus sync_seconds. iteration_seconds: of a global batch at
    the policy's pace.
    """

    batches: Ints
    seconds: Floats
    link_seconds: Floats
    step_seconds: Floats
    sync_seconds: float
    longest_seconds: float
    iteration_seconds: float


def evaluate(constrained: ConstrainedProblem, batches: Ints) -> ConstrainedSolution:
    """The seconds of given batches, by the definitions above."""
    used = batches > 0
    costs, shared = constrained.problem.costs, np.zeros(len(batches))
    least, busy = 0.0, []
    for resource in constrained.resources:
        mine = used & resource.workers
        if resource.overlaps:
            busy.append(np.where(mine, resource.transfer_seconds, 0.0))
            least = max(least, float(busy[-1].sum()))
        else:
            shared[mine] += resource.transfer_seconds[mine].sum()
        if resource.samples_per_second is not None:
            least = max(least, int(batches[mine].sum()) / resource.samples_per_second)
    sync = constrained.sync.seconds(batches)
    steps = times(costs, batches) + shared
    longest = max(least, float(steps.max()))
    computing = np.where(used, costs.compute(np.maximum(batches, 1)), 0.0)
    own = constrained.link_seconds
    links = shared if own is None else shared + used * own
    seconds = iteration(constrained.pace, batches, steps, longest, busy) + sync
    return ConstrainedSolution(batches, computing, links, steps, sync, longest + sync, seconds)


def solve_constrained(
    constrained: ConstrainedProblem, time_limit: float | None = None
) -> ConstrainedSolution:
    """The optimum: by the exact solver without side constraints, else by HiGHS.

    time_limit: seconds for HiGHS. Raises Infeasible with the least change of one limit or of B that would
    help, and PypsError if HiGHS stops without a proof.
    """
    if constrained.may_not_bind:
        found = evaluate(constrained, solve_subset(constrained.problem, constrained.sync).batches)
        if not constrained.has_side_constraints or found.longest_seconds <= _longest_step(found):
            return found
    return solve_by_milp(constrained, time_limit)


def _longest_step(solution: ConstrainedSolution) -> float:
    return float(solution.step_seconds.max()) + solution.sync_seconds


def solve_by_milp(constrained: ConstrainedProblem, time_limit: float | None = None) -> ConstrainedSolution:
    """The optimum by HiGHS, with or without side constraints."""
    solve(constrained.problem)  # raises Infeasible if no split exists even without side constraints
    milp, seconds = constrained_milp(constrained)
    if not milp.minimise(seconds, time_limit=time_limit):
        raise _refusal(constrained)
    return solution_of(constrained, milp)


def solution_of(constrained: ConstrainedProblem, milp: Milp) -> ConstrainedSolution:
    """The solution in a solved MILP. Raises PypsError if rounding broke it."""
    batches = milp.batches()
    if int(batches.sum()) != constrained.problem.global_batch:
        raise PypsError("HiGHS ended with batches that are not whole; please report this cluster")
    return evaluate(constrained, batches)


def constrained_milp(
    constrained: ConstrainedProblem, without: Limit | None = None, total: bool = True
) -> tuple[Milp, Any]:
    """The MILP with all side constraints, and its iteration time, the objective.

    without: a limit to leave out. total: fix the sum of the batches to B.
    """
    import pulp

    milp = minmax_milp(constrained.problem, extra=True, total=total)
    model, used = milp.model, milp.used
    for limit in constrained.limits:
        if limit is not without:
            unit = limit.at_most or 1.0
            model += total_need(milp, limit, unit) <= limit.at_most / unit
    for group in constrained.together:
        for k in group[1:]:
            model += used[int(k)] == used[int(group[0])]
    _add_resources(milp, constrained)
    _break_symmetry(milp, constrained)
    if constrained.sync.kind == "none":
        return milp, milp.t + 0
    sync = model.add_variable("sync", lowBound=0)
    _add_sync(milp, constrained.sync, sync)
    return milp, pulp.lpSum([milp.t, sync])


def total_need(milp: Milp, limit: Limit, unit: float = 1.0) -> Any:
    """The needs of all workers in use, in units of `unit`."""
    import pulp

    return pulp.lpSum(float(x) / unit * z for x, z in zip(limit.need, milp.used, strict=True))


def _add_resources(milp: Milp, constrained: ConstrainedProblem) -> None:
    import pulp

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
    import pulp

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


def _break_symmetry(milp: Milp, constrained: ConstrainedProblem) -> None:
    """Orders interchangeable workers: the first take the larger batches."""
    for group in _interchangeable(constrained):
        for left, right in itertools.pairwise(group):
            milp.model += milp.steps[left] >= milp.steps[right]


def _interchangeable(constrained: ConstrainedProblem) -> list[list[int]]:
    """Groups of workers that the problem and its side constraints do not distinguish."""
    problem, sync = constrained.problem, constrained.sync
    needs = [limit.need for limit in constrained.limits]
    rows = [*problem.keys(), sync.latency_seconds, sync.message_seconds, *needs]
    for resource in constrained.resources:
        rows += [resource.workers, resource.transfer_seconds]
    for group in constrained.together:
        rows.append(np.isin(np.arange(len(problem.costs)), group))
    found: dict[tuple[float, ...], list[int]] = {}
    for k, key in enumerate(zip(*(np.asarray(row, float).tolist() for row in rows), strict=True)):
        found.setdefault(key, []).append(k)
    return [group for group in found.values() if len(group) > 1]


def _refusal(constrained: ConstrainedProblem) -> Infeasible:
    """The refusal, with the least increase of one limit, or the nearest B, for which a split exists."""
    problem = constrained.problem
    changes = []
    for limit in constrained.limits:
        milp, _ = constrained_milp(constrained, without=limit)
        if milp.minimise(total_need(milp, limit)):
            least = float(limit.need[milp.batches() > 0].sum())
            changes.append(f"raise limits.{limit.key} from {limit.at_most:g} to {least:.6g}")
    changes += [f"set global_batch to {batch}" for batch in _nearest_batches(constrained)]
    what = [f"limits.{limit.key}" for limit in constrained.limits] + ["together"] * bool(constrained.together)
    return Infeasible(
        f"global_batch {problem.global_batch}: no workers within {' and '.join(what)} can do it",
        " or ".join(changes) or "no change of one limit helps",
    )


def _nearest_batches(constrained: ConstrainedProblem) -> list[int]:
    """The feasible global batch nearest to the requested one, if there is any."""
    import pulp

    problem = constrained.problem
    wide = replace(problem, global_batch=min(2 * problem.global_batch, int(problem.max_batch.sum())))
    milp, _ = constrained_milp(replace(constrained, problem=wide), total=False)
    away = milp.model.add_variable("away", lowBound=0)
    done = pulp.lpSum(milp.batch)
    milp.model += done >= 1
    milp.model += away >= done - problem.global_batch
    milp.model += away >= problem.global_batch - done
    return [int(milp.batches().sum())] if milp.minimise(away) else []
