"""A split with all that ties its workers: the problem, what a solution takes, and which workers are alike.

To the min-max problem with synchronisation (pyps.solver.exact.subset) come the side constraints:

    limits      the needs of all workers in use, price per hour or watts, sum to at most a limit
    resources   a link shared by several workers: their transfers take turns. Each worker waits for all of
                them, or, where they do not meet, an iteration lasts at least as long as all of them in one
                direction. A host: it prepares a fixed number of samples a second for all its workers
    together    sets of workers that are used all or not at all

The objective is the longest step. How long an iteration, one global batch of samples, takes then depends on
the policy's pace. A step is the time from one step of a worker to its next, if it waits for no other.

    round   the longest step. With k spare workers, the longest step but k: B samples then take B / (B - d)
            rounds, where d samples a round are dropped
    clock   the longest step: in the long run every worker makes as many steps as the slowest
    turns   the longest step, or all transfers one after another, if they take longer
    free    B / sum_i (b_i / s_i): nothing waits. Where a link is always busy, its workers' steps s_i stretch
            to at least s with sum_i x_i / s_i = 1, x_i the seconds of a worker's transfers over it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyps.formats import EvenSplit, Plan
from pyps.formats.mode import ROUND, Pace, PaceKind
from pyps.solver.costs import Floats, Ints
from pyps.solver.exact.minmax import Bools, Problem, at_index, solve, times
from pyps.solver.motion import Trip, iteration_in_motion
from pyps.solver.sync import Sync

SAME = 0.02  # relative: which of two steps this close is the later one changes from round to round
AT_FIRST = 0.03  # relative: by so much shorter iterations at first are worth a word
BISECTIONS = 60
WITHIN = 1 + 1e-9  # relative: the rounding error allowed in a sum of needs


@dataclass(frozen=True)
class Limit:
    """The `need` of all workers in use (one entry a worker) sums to at most at_most, in the unit of `key`."""

    key: str
    need: Floats
    at_most: float
    table: str = "limits"  # of the cluster file, where the key is

    @property
    def field(self) -> str:
        return f"{self.table}.{self.key}"


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
    ranks_each: among which each worker's batch is divided equally; None: each is one rank. trips: of each
    worker, where some share a link.
    """

    problem: Problem
    sync: Sync
    limits: tuple[Limit, ...] = ()
    resources: tuple[Resource, ...] = ()
    together: tuple[Ints, ...] = ()
    pace: Pace = ROUND
    link_seconds: Floats | None = None
    ranks_each: Ints | None = None
    trips: tuple[Trip, ...] = ()

    @property
    def has_side_constraints(self) -> bool:
        """Return whether more ties the workers than the sum of their batches and the synchronisation."""
        return self.may_forbid or bool(self.resources)

    @property
    def may_forbid(self) -> bool:
        """Return whether a limit or a tie may be why a worker is left out. A resource only takes time."""
        return bool(self.limits or self.together)

    @property
    def minimises_iteration(self) -> bool:
        """Return whether the objective, the longest step, is also how long an iteration takes."""
        return self.pace.kind != "free" and not self.pace.spare

    @property
    def may_meet(self) -> bool:
        """Return whether transfers may meet on a shared link: an iteration is then known by following."""
        links = [trip.link for trip in self.trips]
        return len(set(links)) < len(links) and self.pace.kind != "turns" and not self.pace.spare

    @property
    def may_not_bind(self) -> bool:
        """Return whether the only side constraints are links that may have time for all transfers."""
        links = all(one.overlaps and one.samples_per_second is None for one in self.resources)
        return links and not self.limits and not self.together

    def kinds(self) -> list[list[int]]:
        """The workers, grouped by what the problem and its side constraints distinguish. The groups' order
        follows from that, so that the order of a cluster's file decides nothing.
        """
        problem, sync = self.problem, self.sync
        rows = [*problem.keys(), sync.latency_seconds, sync.message_seconds]
        rows += [limit.need for limit in self.limits]
        for resource in self.resources:
            rows += [resource.workers, resource.transfer_seconds]
        for group in self.together:
            rows.append(np.isin(np.arange(len(problem.costs)), group))
        found: dict[tuple[float, ...], list[int]] = {}
        for k, key in enumerate(zip(*(np.asarray(row, float).tolist() for row in rows), strict=True)):
            found.setdefault(key, []).append(k)
        return [found[key] for key in sorted(found)]


@dataclass(frozen=True)
class ConstrainedSolution:
    """Batches (0 = left out); compute, transfer and step seconds of each worker.

    link_seconds covers a worker's own link and its shared links. step_seconds: from one step to the next, of
    a worker that waits for no other. longest_seconds: the objective: the longest step, or a link's transfers
    or a host's preparation if these take longer, plus sync_seconds, which the synchronisation adds to it.
    iteration_seconds: of a global batch at the policy's pace. meets: by transfers followed over shared links.
    proven_seconds: no split's iteration is known to be below; 0: nothing was proven.
    """

    batches: Ints
    seconds: Floats
    link_seconds: Floats
    step_seconds: Floats
    sync_seconds: float
    longest_seconds: float
    iteration_seconds: float
    meets: bool = False
    proven_seconds: float = 0.0


def evaluate(constrained: ConstrainedProblem, batches: Ints) -> ConstrainedSolution:
    """The seconds of given batches, by the definitions above."""
    used = batches > 0
    costs, shared = constrained.problem.costs, _waits(constrained, used)
    least, busy = 0.0, []
    for resource in constrained.resources:
        mine = used & resource.workers
        if resource.overlaps:
            busy.append(np.where(mine, resource.transfer_seconds, 0.0))
            least = max(least, float(busy[-1].sum()))
        if resource.samples_per_second is not None:
            least = max(least, int(batches[mine].sum()) / resource.samples_per_second)
    sync = constrained.sync.seconds(batches)
    steps = times(costs, batches) + shared
    longest = max(least, float(steps.max()))
    computing = np.where(used, costs.compute(np.maximum(batches, 1)), 0.0)
    own = constrained.link_seconds
    links = shared if own is None else shared + used * own
    exposed = constrained.sync.exposed(longest, sync)
    seconds = iteration(constrained.pace, batches, steps, longest, busy) + exposed
    return ConstrainedSolution(batches, computing, links, steps, exposed, longest + exposed, seconds)


def _waits(constrained: ConstrainedProblem, used: Bools) -> Floats:
    """The seconds that each used worker waits for the transfers of all on shared links where they meet."""
    found = np.zeros(len(used))
    for resource in constrained.resources:
        if not resource.overlaps:
            mine = used & resource.workers
            found[mine] += resource.transfer_seconds[mine].sum()
    return found


def split_among(constrained: ConstrainedProblem, workers: Ints) -> Ints:
    """The batches of the fastest split with all of these workers, and no others. Raises Infeasible."""
    batches = np.zeros(len(constrained.problem.costs), np.int64)
    mine = replace(at_index(constrained.problem, workers), required=np.ones(len(workers), bool))
    used = np.zeros(len(batches), bool)
    used[workers] = True
    if (waits := _waits(constrained, used)).any():
        own = 0.0 if mine.costs.transfer is None else mine.costs.transfer
        mine = replace(mine, costs=replace(mine.costs, transfer=own + waits[workers]))
    batches[workers] = solve(mine).batches
    return batches


def allowed(constrained: ConstrainedProblem, batches: Ints) -> bool:
    """Return whether these batches keep the limits and the pool, and use all or none of each set that is tied
    together.
    """
    used = batches > 0
    whole = all(used[group].all() or not used[group].any() for group in constrained.together)
    whole &= (pool := constrained.problem.pool) is None or pool.fits(batches)
    return whole and all(x.need[used].sum() <= x.at_most * WITHIN for x in constrained.limits)


def observed(constrained: ConstrainedProblem, batches: Ints) -> ConstrainedSolution:
    """`evaluate`, but on shared links with the iteration that a run shows: transfers meet there more or less
    than the bounds above say.
    """
    solution = evaluate(constrained, batches)
    seconds = _in_motion(constrained, solution, constrained.pace.kind)
    if seconds is None:
        return solution
    hosts = [
        int(batches[one.workers].sum()) / one.samples_per_second
        for one in constrained.resources
        if one.samples_per_second is not None
    ]
    return replace(solution, iteration_seconds=max([seconds, *hosts]), meets=True)


def at_first(constrained: ConstrainedProblem, solution: ConstrainedSolution) -> float | None:
    """The seconds of an iteration while no worker is as far ahead as its clock allows, if it takes less time
    than a solution's; None: it does not, or nothing waits. On shared links that can last for hundreds of
    rounds.
    """
    if constrained.pace.kind != "clock" or not solution.meets:
        return None
    seconds = _in_motion(constrained, solution, "free")
    later = seconds is not None and seconds < solution.iteration_seconds * (1 - AT_FIRST)
    return seconds if later else None


def _in_motion(
    constrained: ConstrainedProblem, solution: ConstrainedSolution, kind: PaceKind
) -> float | None:
    """The seconds of an iteration by transfers followed; None where none meet, or they are too many."""
    used = np.flatnonzero(solution.batches > 0)
    trips = [constrained.trips[k] for k in used] if constrained.trips else []
    links = [trip.link for trip in trips]
    if len(set(links)) == len(links) or not constrained.may_meet:
        return None
    batches, compute = solution.batches[used].tolist(), solution.seconds[used].tolist()
    return iteration_in_motion(kind, batches, compute, trips)


def iteration(pace: Pace, batches: Ints, steps: Floats, longest: float, busy: Sequence[Floats]) -> float:
    """Seconds of an iteration.

    batches, steps: samples and seconds of each worker (0: left out). longest: the longest step, or the link
    or host that takes longer. busy: for each shared link, the seconds of each worker's transfers.
    """
    used = batches > 0
    if pace.kind == "free":
        for transfers in busy:
            steps = _stretched(steps, transfers)
        rate = float((batches[used] / steps[used]).sum())
        return max(int(batches.sum()) / rate, _host(steps, longest, busy))
    if pace.spare and used.sum() > 1:
        return _without_the_slowest(min(pace.spare, int(used.sum()) - 1), batches[used], steps[used])
    return longest


def paced_seconds(plan: Plan, pace: Pace) -> float | None:
    """The predicted iteration of a plan at the pace of the policy that it is run by.

    A plan that states a mode is run in it. One that states none was made for rounds; None: it does not say
    how long an iteration at this pace is, as its links may be shared, or more than its steps takes time.
    """
    if plan.run is None and pace.kind == "turns":
        return plan.r2sp.period_seconds
    if plan.run is not None or (pace.kind != "free" and not pace.spare):
        return plan.iteration_seconds
    used = [worker for worker in plan.workers if worker.batch]
    steps = np.array([worker.predicted_seconds for worker in used])
    longest = float(steps.max())
    more = plan.sync is not None or any(worker.link_seconds for worker in used)
    if more or not steps.all() or plan.iteration_seconds > longest * (1 + SAME):
        return None
    return iteration(pace, np.array([worker.batch for worker in used]), steps, longest, ())


def _host(steps: Floats, longest: float, busy: Sequence[Floats]) -> float:
    """The seconds of a host's preparation, if they are what takes longest; else 0."""
    explained = max([float(steps.max()), *(float(transfers.sum()) for transfers in busy)])
    return longest if longest > explained else 0.0


def _stretched(steps: Floats, transfers: Floats) -> Floats:
    """The steps of workers on a link that has no more than one second a second for their transfers."""
    mine = transfers > 0
    if not mine.any() or float((transfers[mine] / steps[mine]).sum()) <= 1:
        return steps
    low, high = float(steps[mine].min()), float(transfers.sum())
    for _ in range(BISECTIONS):
        middle = low + (high - low) / 2
        if float((transfers[mine] / np.maximum(steps[mine], middle)).sum()) > 1:
            low = middle
        else:
            high = middle
    return np.where(mine, np.maximum(steps, high), steps)


def _without_the_slowest(spare: int, batches: Ints, steps: Floats) -> float:
    """A round closes without the `spare` slowest; their samples have to be trained in another round."""
    closes = float(np.sort(steps)[len(steps) - spare - 1])
    late, close = steps > closes * (1 + SAME), np.abs(steps - closes) <= closes * SAME
    dropped = float(batches[late].sum()) + (spare - int(late.sum())) * float(batches[close].mean())
    total = int(batches.sum())
    return closes * total / (total - dropped)


def even_batches(global_batch: int, count: int) -> list[int]:
    """The global batch split as evenly as whole samples allow; the first ranks take the remainder."""
    return [global_batch // count + (k < global_batch % count) for k in range(count)]


def even_units(constrained: ConstrainedProblem) -> Ints:
    """The even split over all ranks, as the batches of the problem's workers."""
    each, total = constrained.ranks_each, constrained.problem.global_batch
    if each is None or (each == 1).all():
        return np.array(even_batches(total, len(constrained.problem.costs)), np.int64)
    ranks = np.array(even_batches(total, int(each.sum())), np.int64)
    return np.add.reduceat(ranks, np.cumsum(each) - each)


def even_split(constrained: ConstrainedProblem) -> tuple[EvenSplit, list[float]]:
    """Return whether an even split keeps every bound, its iteration time, and each worker's seconds."""
    problem = constrained.problem
    batch = even_units(constrained)
    within = (np.maximum(problem.min_batch, 1) <= batch) & (batch % problem.batch_multiple == 0)
    within &= batch <= problem.costs.last_batch(problem.max_batch)
    solution = observed(constrained, batch)
    seconds = solution.step_seconds.tolist()
    if not (within.all() and allowed(constrained, batch)):
        return EvenSplit(feasible=False), seconds
    return EvenSplit(feasible=True, seconds=solution.iteration_seconds), seconds
