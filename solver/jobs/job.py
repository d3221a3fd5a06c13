"""The cheapest set of workers for a job by its deadline, or the fastest within its budget; also of workers
that may be taken away (pyps.solver.jobs.spot).

A set takes `iteration seconds * iterations`, and longer by what preemptions cost, for the job's target, and
costs its price an hour all the while; a machine that is away is not paid. With a confidence, the deadline is
kept with that probability. Time and price grow with the iteration, the price an hour, the rate of preemptions
and the time away: pyps.solver.jobs.sets finds the best set, or says how much better one may be.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Plan, TargetEstimate
from pyps.formats.cluster import CLUSTER_FILE
from pyps.solver.constrained import ConstrainedProblem, ConstrainedSolution, Limit
from pyps.solver.costs import Floats
from pyps.solver.exact.remedies import with_remedies
from pyps.solver.goal import SetObjective
from pyps.solver.jobs.pareto import PRICE
from pyps.solver.jobs.sets import BestSet, best_set
from pyps.solver.jobs.spot import HOUR, Delays, Presence, lost_to_preemptions, presence_of
from pyps.solver.local_steps import round_samples
from pyps.solver.ranks import PlannedRank, needs
from pyps.solver.report.warnings import few_of
from pyps.solver.systems.goodput import efficiency_of

RATE, AWAY = "preemptions_per_hour", "away"
WITHIN = 1 + 1e-9  # relative: the rounding error allowed in a job's time and price
WORTH_SAYING = 1e-3  # relative: a gap below it is not said


def job_estimate(
    cluster: Cluster, ranks: Sequence[PlannedRank], solution: ConstrainedSolution
) -> TargetEstimate | None:
    """Return how long the job's target takes with a solution, and at what price; None: there is no target.

    With [goodput] its samples are those of batches of base_batch.
    """
    job, used = cluster.job, solution.batches > 0
    if job.target is None:
        return None
    work, rates, away = _undisturbed(cluster, ranks, solution)
    delays, (_, every) = Delays.of(work, rates, away, cluster.spot), lost_to_preemptions(rates, cluster.spot)
    seconds = float(delays.expected)
    paid = _paid(cluster, ranks)
    disturbed = rates > 0 or away > 0
    by = None if job.deadline_hours is None or not disturbed else job.deadline_hours * HOUR * WITHIN
    return TargetEstimate(
        samples=job.target,
        seconds=seconds,
        price=None if paid is None else float(paid[used].sum()) * seconds / HOUR,
        base_batch=cluster.goodput.base_batch if cluster.goodput else None,
        lost=max(1.0, seconds / work),
        checkpoint_every_seconds=float(every) if rates > 0 else None,
        deadline_chance=None if by is None else delays.chance(by),
    )


def _undisturbed(
    cluster: Cluster, ranks: Sequence[PlannedRank], solution: ConstrainedSolution
) -> tuple[float, float, float]:
    """The seconds of the target's steps, and what disturbs them: preemptions an hour, absence of machines."""
    used = solution.batches > 0
    rates, away = (float(need[used].sum()) for need in _absences(cluster, ranks))
    return solution.iteration_seconds * (cluster.job.target or 0.0) / _useful_each(cluster), rates, away


def _useful_each(cluster: Cluster) -> float:
    """Return what an iteration counts of a job's target."""
    if cluster.goodput is None:
        return float(round_samples(cluster))
    a_step = 1 / (cluster.run.local_steps or 1)
    return efficiency_of(cluster.goodput).estimate(cluster.job.global_batch, a_step).goodput


def _presences(cluster: Cluster, ranks: Sequence[PlannedRank]) -> list[Presence]:
    groups = {id(rank.group): rank.group for rank in ranks}
    found = {key: presence_of(group, cluster.spot) for key, group in groups.items()}
    return [found[id(rank.group)] for rank in ranks]


def _absences(cluster: Cluster, ranks: Sequence[PlannedRank]) -> tuple[Floats, Floats]:
    """Each worker's preemptions an hour, and minus the logarithm of its availability; of all its devices."""
    here = _presences(cluster, ranks)
    devices = np.array([rank.group.devices for rank in ranks], float)
    rates = np.array([one.preemptions_per_hour for one in here])
    return devices * rates, -devices * np.log([one.availability for one in here])


def _paid(cluster: Cluster, ranks: Sequence[PlannedRank]) -> Floats | None:
    """Each worker's price an hour of the job; None if one states none."""
    price = needs(ranks, PRICE)
    if price is None:
        return None
    return np.asarray(price * np.array([one.availability for one in _presences(cluster, ranks)]))


def best_for_job(
    cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem
) -> tuple[ConstrainedSolution, list[str]]:
    """The cheapest solution by the job's deadline, or without one the fastest within its budget; and what is
    not proven of it, in sentences.

    Raises Infeasible with the soonest end, or the least budget; InputError where a policy does not wait for
    the slowest worker.
    """
    job = cluster.job
    if not constrained.minimises_iteration or needs(ranks, PRICE) is None or job.target is None:
        field = "deadline_hours" if job.deadline_hours is not None else "budget"
        expected = "nothing with a policy that does not wait for the slowest worker"
        raise InputError(CLUSTER_FILE, f"job.{field}", "a number", expected)

    def fits(changed: ConstrainedProblem) -> bool:
        bounded = msgspec.structs.replace(
            job, global_batch=changed.problem.global_batch // changed.problem.local_steps
        )
        trial = msgspec.structs.replace(cluster, job=bounded)
        with contextlib.suppress(Infeasible):
            return _best(trial, ranks, changed) is not None
        return False

    try:
        found = _best(cluster, ranks, constrained)
    except Infeasible as error:  # no split: what is proposed has to keep the job's bounds, too
        raise with_remedies(constrained, error.reason, fits) from None
    if found is None:
        raise _refusal(cluster, ranks, constrained)
    gap = 1 - found.proven / found.value
    if gap < WORTH_SAYING:
        return found.solution, []
    better = "cheaper" if job.deadline_hours is not None else "faster"
    return found.solution, [
        f"another set of workers may be {better}, by at most {gap:.1%}: not all were tried"
    ]


def _best(cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem) -> BestSet | None:
    """The best set by the job's own bounds; None if none keeps them."""
    paid = _paid(cluster, ranks)
    assert paid is not None
    return best_set(constrained, SetObjective((paid, *_absences(cluster, ranks)), _value_of(cluster)))


def _value_of(cluster: Cluster) -> Callable[..., Any]:
    """The price of a job by its deadline, or its seconds within its budget."""
    job, spot = cluster.job, cluster.spot
    assert job.target is not None
    iterations = job.target / _useful_each(cluster)

    def value(seconds: Any, hourly: Any, rate: Any, away: Any) -> Any:
        delays = Delays.of(np.asarray(seconds) * iterations, rate, away, spot)
        took = delays.expected
        price, kept = took * hourly / HOUR, np.ones(np.shape(took), bool)
        if job.deadline_hours is not None:
            by = took if job.confidence is None else delays.by(job.confidence)
            kept &= by <= job.deadline_hours * HOUR * WITHIN
        if job.budget is not None:
            kept &= price <= job.budget * WITHIN
        return np.where(kept, price if job.deadline_hours is not None else took, math.inf)

    return value


def assumptions(cluster: Cluster, ranks: Sequence[PlannedRank], plan: Plan) -> list[str]:
    """Say what a job's time relies on, where no trace of the machines tells it."""
    used = {rank.group.name: rank for rank, one in zip(ranks, plan.workers, strict=True) if one.batch}
    absent = [
        name
        for name, rank in used.items()
        if rank.group.trace is None and presence_of(rank.group, cluster.spot).preemptions_per_hour
    ]
    if cluster.job.target is None or not absent:
        return []
    taken = "times between preemptions are taken as exponential and independent"
    return [f"{few_of(absent)}: {taken}; those of real machines vary more, and a trace tells them"]


def limits_of_set(cluster: Cluster, ranks: Sequence[PlannedRank], plan: Plan) -> list[Limit]:
    """The price an hour and the rate of preemptions of a plan's workers, as limits."""
    used = np.array([worker.batch > 0 for worker in plan.workers])
    rates, away = _absences(cluster, ranks)
    needed = [(PRICE, _paid(cluster, ranks)), (RATE, rates), (AWAY, away)]
    return [Limit(key, need, float(need[used].sum())) for key, need in needed if need is not None]


def _refusal(cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem) -> Infeasible:
    """The refusal, with the changes of the job's bounds that the planner has tried."""
    job, ways = cluster.job, list[str]()
    wanted = [f"in {job.deadline_hours:g} hours"] if job.deadline_hours is not None else []
    wanted += [f"with probability {job.confidence:g}"] if job.confidence is not None else []
    wanted += [f"for {job.budget:g}"] if job.budget is not None else []
    for changes in _changes(cluster, ranks, constrained):
        trial = msgspec.structs.replace(cluster, job=msgspec.structs.replace(job, **changes))
        if _best(trial, ranks, constrained) is not None:
            ways.append("set " + " and ".join(f"job.{key} to {value:g}" for key, value in changes.items()))
    return Infeasible(f"no workers train {job.target:g} {job.unit} {' '.join(wanted)}", " or ".join(ways))


def _changes(
    cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem
) -> list[dict[str, float]]:
    """Changes of the deadline, of the budget, or of both, that may help."""
    job = cluster.job

    def ends(**bounds: float | None) -> tuple[float, float] | None:
        """Hours and price of the best set with these bounds."""
        trial = msgspec.structs.replace(cluster, job=msgspec.structs.replace(job, **bounds))
        found = _best(trial, ranks, constrained)
        estimate = None if found is None else job_estimate(trial, ranks, found.solution)
        if found is None or estimate is None:
            return None
        seconds = estimate.seconds
        if job.confidence is not None:
            disturbed = _undisturbed(cluster, ranks, found.solution)
            seconds = float(Delays.of(*disturbed, cluster.spot).by(job.confidence))
        return _up(seconds / HOUR), _up(estimate.price or 0.0)

    found: list[dict[str, float]] = []
    soonest = ends(deadline_hours=None, budget=job.budget or 1e300)
    if job.deadline_hours is not None and soonest is not None:
        found.append({"deadline_hours": soonest[0]})
    if job.budget is not None:
        least = ends(budget=None, deadline_hours=job.deadline_hours or 1e290)
        found += [{"budget": least[1]}] if least is not None else []
    if not found and job.deadline_hours is not None and job.budget is not None:
        both = ends(deadline_hours=None, budget=1e300), ends(deadline_hours=1e290, budget=None)
        found += [
            {"deadline_hours": one[0], "budget": one[1]} for one in dict.fromkeys(both) if one is not None
        ]
    return found


def _up(value: float) -> float:
    """Four digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3) if value > 0 else 1e-3
    return math.ceil(value / unit) * unit
