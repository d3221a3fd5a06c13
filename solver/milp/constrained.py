"""The split under constraints that tie workers together, as a mixed-integer program for HiGHS.

To the min-max program with its synchronisation (pyps.solver.exact.subset) come

    limits      what the workers in use need together, price per hour or watts, is at most so much
    resources   a link that several workers share: their transfers over it go one after another, so each of
                them waits for all. A host: it prepares so many samples a second for all of its workers
    together    sets of workers that are used all or not at all

Without any of these the exact solver answers, which this program is tested to agree with. With them nothing
faster than a MILP is known to us; HiGHS runs until it has proved the optimum, with no gap allowed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyps.errors import Infeasible, PypsError
from pyps.solver.costs import Floats, Ints
from pyps.solver.exact.minmax import Bools, Problem, solve, times
from pyps.solver.exact.subset import solve_subset
from pyps.solver.milp.program import Program, build
from pyps.solver.sync import Sync


@dataclass(frozen=True)
class Limit:
    """The needs (one entry a worker) of those in use sum to at most at_most, in the unit of `key`."""

    key: str
    need: Floats
    at_most: float


@dataclass(frozen=True)
class Resource:
    """What `members` share: transfer_seconds of each over a link (0: none), samples a second of a host."""

    name: str
    members: Bools
    transfer_seconds: Floats
    samples_per_second: float | None = None


@dataclass(frozen=True)
class Coupled:
    """A min-max problem, how its workers synchronise, and what ties them together."""

    problem: Problem
    sync: Sync
    limits: tuple[Limit, ...] = ()
    resources: tuple[Resource, ...] = ()
    together: tuple[Ints, ...] = ()

    @property
    def loose(self) -> bool:
        """Whether nothing ties the workers, save the sum of their batches and the synchronisation."""
        return not (self.limits or self.resources or self.together)


@dataclass(frozen=True)
class Split:
    """Batches (0 = left out) and seconds, by worker: computing, and its own and its shared links' transfers.

    iteration_seconds = the slowest worker's compute and links, or a host's samples if later, + sync_seconds.
    """

    batches: Ints
    seconds: Floats
    link_seconds: Floats
    sync_seconds: float
    iteration_seconds: float


def valued(coupled: Coupled, batches: Ints) -> Split:
    """What a split costs, by the definitions above."""
    used = batches > 0
    costs, shared = coupled.problem.costs, np.zeros(len(batches))
    slowest = 0.0
    for resource in coupled.resources:
        mine = used & resource.members
        shared[mine] += resource.transfer_seconds[mine].sum()
        if resource.samples_per_second is not None:
            slowest = max(slowest, int(batches[mine].sum()) / resource.samples_per_second)
    sync = coupled.sync.seconds(batches)
    slowest = max(slowest, float((times(costs, batches) + shared).max()))
    computing = np.where(used, costs.compute(np.maximum(batches, 1)), 0.0)
    own = shared if costs.once is None else shared + used * costs.once
    return Split(batches, computing, own, sync, slowest + sync)


def solve_coupled(coupled: Coupled, time_limit: float | None = None) -> Split:
    """The optimum: by the exact solver where nothing but B ties the workers, else by HiGHS.

    Raises Infeasible, with the least change of one limit or of B that would help; PypsError if HiGHS stops.
    """
    if coupled.loose:
        return valued(coupled, solve_subset(coupled.problem, coupled.sync).batches)
    return by_milp(coupled, time_limit)


def by_milp(coupled: Coupled, time_limit: float | None = None) -> Split:
    """`solve_coupled` by HiGHS, whatever ties the workers."""
    solve(coupled.problem)  # refuses what has no split even without the ties
    program, seconds = program_of(coupled)
    if not program.minimise(seconds, time_limit=time_limit):
        raise _refusal(coupled)
    return answer(coupled, program)


def answer(coupled: Coupled, program: Program) -> Split:
    """The split that a solved program holds. Raises PypsError if rounding broke it."""
    batches = program.batches()
    if int(batches.sum()) != coupled.problem.global_batch:
        raise PypsError("HiGHS ended with batches that are not whole; please report this cluster")
    return valued(coupled, batches)


def program_of(coupled: Coupled, without: Limit | None = None, total: bool = True) -> tuple[Program, Any]:
    """The program with all ties (`without` one limit; not `total`: for any B), and its time to minimise."""
    import pulp

    program = build(coupled.problem, extra=True, total=total)
    model, used = program.model, program.used
    for limit in coupled.limits:
        if limit is not without:
            unit = limit.at_most or 1.0
            model += needed(program, limit, unit) <= limit.at_most / unit
    for group in coupled.together:
        for k in group[1:]:
            model += used[int(k)] == used[int(group[0])]
    _add_resources(program, coupled)
    _break_symmetry(program, coupled)
    if coupled.sync.kind == "none":
        return program, program.t + 0
    sync = model.add_variable("sync", lowBound=0)
    _add_sync(program, coupled.sync, sync)
    return program, pulp.lpSum([program.t, sync])


def needed(program: Program, limit: Limit, unit: float = 1.0) -> Any:
    """What the workers in use need together, in units of `unit`."""
    import pulp

    return pulp.lpSum(float(x) / unit * z for x, z in zip(limit.need, program.used, strict=True))


def _add_resources(program: Program, coupled: Coupled) -> None:
    import pulp

    waits: dict[int, list[tuple[Any, float]]] = {}
    for resource in coupled.resources:
        members = np.flatnonzero(resource.members).tolist()
        seconds = resource.transfer_seconds / program.scale
        on_link = pulp.lpSum(float(seconds[k]) * program.used[k] for k in members)
        for k in members:
            waits.setdefault(k, []).append((on_link, float(seconds[members].sum())))
        if resource.samples_per_second is not None:
            rate = resource.samples_per_second * program.scale
            program.model += program.t >= pulp.lpSum(program.batch[k] for k in members) / rate
    for k, links in waits.items():
        most = sum(m for _, m in links)
        if most > 0:
            program.model += program.extra[k] >= pulp.lpSum(x for x, _ in links) - most * (
                1 - program.used[k]
            )


def _add_sync(program: Program, sync: Sync, seconds: Any) -> None:
    """seconds >= F_k(link) if k workers are in use and one of them has that link."""
    import pulp

    model, used = program.model, program.used
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
            cost = float(sync.by_link(count)[place]) / program.scale
            if cost > 0:
                model += seconds >= cost * (y + link_used - 1)


def _break_symmetry(program: Program, coupled: Coupled) -> None:
    """Of workers that nothing tells apart, the first take the larger batches."""
    for twins in _twins(coupled):
        for left, right in itertools.pairwise(twins):
            program.model += program.steps[left] >= program.steps[right]


def _twins(coupled: Coupled) -> list[list[int]]:
    problem, sync = coupled.problem, coupled.sync
    rows = [*problem.costs.keys(), problem.low, problem.cap, problem.quantum, problem.required]
    rows += [sync.latency_seconds, sync.message_seconds, *(limit.need for limit in coupled.limits)]
    for resource in coupled.resources:
        rows += [resource.members, resource.transfer_seconds]
    for group in coupled.together:
        rows.append(np.isin(np.arange(len(problem.costs)), group))
    found: dict[tuple[float, ...], list[int]] = {}
    for k, key in enumerate(zip(*(np.asarray(row, float).tolist() for row in rows), strict=True)):
        found.setdefault(key, []).append(k)
    return [twins for twins in found.values() if len(twins) > 1]


def _refusal(coupled: Coupled) -> Infeasible:
    """Why no split keeps the ties, and the smallest raise of one limit, or the nearest B, that has one."""
    problem = coupled.problem
    changes = []
    for limit in coupled.limits:
        program, _ = program_of(coupled, without=limit)
        if program.minimise(needed(program, limit)):
            least = float(limit.need[program.batches() > 0].sum())
            changes.append(f"raise limits.{limit.key} from {limit.at_most:g} to {least:.6g}")
    changes += [f"set global_batch to {batch}" for batch in _nearest_batches(coupled)]
    what = [f"limits.{limit.key}" for limit in coupled.limits] + ["together"] * bool(coupled.together)
    return Infeasible(
        f"global_batch {problem.global_batch}: no workers within {' and '.join(what)} can do it",
        " or ".join(changes) or "no change of one limit helps",
    )


def _nearest_batches(coupled: Coupled) -> list[int]:
    """The feasible global batch nearest to the one that was asked for, if there is any."""
    import pulp

    problem = coupled.problem
    wide = replace(problem, global_batch=min(2 * problem.global_batch, int(problem.cap.sum())))
    program, _ = program_of(replace(coupled, problem=wide), total=False)
    away = program.model.add_variable("away", lowBound=0)
    done = pulp.lpSum(program.batch)
    program.model += done >= 1
    program.model += away >= done - problem.global_batch
    program.model += away >= problem.global_batch - done
    return [int(program.batches().sum())] if program.minimise(away) else []
