"""The cheapest set of workers for a job by its deadline, or the fastest within its budget; also of workers
that may be taken away (spot prices).

A set takes `iteration seconds * iterations * lost` for the job's target, and costs its price an hour all the
while. `lost` is 1, or, with a rate of preemptions of all workers in use, what checkpoints and lost work add:
a preemption stops the job, which waits `restart_seconds` and goes on from its last checkpoint, and each
checkpoint takes `checkpoint_seconds`. With the best interval between checkpoints (J. Daly, Future Generation
Computer Systems 22, 2006, for exponential times between failures)

    lost = exp(rate * restart) / (1 - x),    (1 - x) exp(x) = exp(-rate * checkpoint),    interval = x / rate

Time and price grow with the iteration, the price an hour and the rate. So the best set is one that no other
beats in all three: these are the Pareto fronts of time and price (pyps.solver.milp.pareto) for each rate that
still allows another set, the highest first. The result is exact but for the fronts' own steps
in price, 0.01 %, or 1 % of many unlike workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Plan
from pyps.formats.cluster import CLUSTER_FILE, Spot
from pyps.solver.constrained import ConstrainedProblem, ConstrainedSolution, Limit
from pyps.solver.costs import Floats
from pyps.solver.milp.pareto import PRICE, pareto_front
from pyps.solver.ranks import PlannedRank, needs
from pyps.solver.systems.goodput import efficiency_of

HOUR = 3600.0
RATE = "preemptions_per_hour"
BELOW = 1 - 1e-5  # relative: of a rate, what is less, well above the tolerance of sums of needs
MANY_RATES, CLEARLY_BELOW = 20, 0.95  # fronts; the same of those that follow them
WITHIN = 1 + 1e-9  # relative: the rounding error allowed in a job's time and price
MOST_LOST = 700.0  # log of how much longer a job may take


@dataclass(frozen=True)
class JobEstimate:
    """Seconds and price of a job's target; the rest as in TargetEstimate."""

    seconds: float
    price: float | None
    lost: float = 1.0
    checkpoint_every_seconds: float | None = None


def lost_to_preemptions(per_hour: float, spot: Spot) -> tuple[float, float | None]:
    """How many times longer a job takes, and the best seconds between checkpoints; None: none are needed."""
    rate = per_hour / HOUR
    if rate == 0:
        return 1.0, None
    low, high, wanted = 0.0, 1.0, math.exp(-rate * spot.checkpoint_seconds)
    for _ in range(100):
        x = (low + high) / 2
        low, high = (x, high) if (1 - x) * math.exp(x) > wanted else (low, x)
    exponent = rate * spot.restart_seconds - math.log1p(-min(high, 1 - 1e-12))
    return math.exp(min(exponent, MOST_LOST)), high / rate


def job_estimate(
    cluster: Cluster, ranks: Sequence[PlannedRank], solution: ConstrainedSolution, samples: float
) -> JobEstimate:
    """What `samples` take with a solution; with [goodput], those of batches of base_batch."""
    used = solution.batches > 0
    rates, price = _rates(ranks), needs(ranks, PRICE)
    lost, every = lost_to_preemptions(float(rates[used].sum()), cluster.spot)
    seconds = _undisturbed_seconds(cluster, solution, samples) * lost
    return JobEstimate(
        seconds, None if price is None else float(price[used].sum()) * seconds / HOUR, lost, every
    )


def _undisturbed_seconds(cluster: Cluster, solution: ConstrainedSolution, samples: float) -> float:
    """What `samples` take with a solution if no worker is taken away."""
    each = float(solution.batches.sum())
    if cluster.goodput is not None:
        a_step = 1 / (cluster.run.local_steps or 1)
        each = efficiency_of(cluster.goodput).estimate(cluster.job.global_batch, a_step).goodput
    return solution.iteration_seconds * samples / each


def best_for_job(
    cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem
) -> ConstrainedSolution:
    """The cheapest solution by the job's deadline, or without one the fastest within its budget.

    Raises Infeasible with the soonest end, or the least budget; InputError where a policy does not wait for
    the slowest worker.
    """
    job = cluster.job
    price = needs(ranks, PRICE)
    if not constrained.minimises_iteration or price is None or job.target is None:
        field = "deadline_hours" if job.deadline_hours is not None else "budget"
        expected = "nothing with a policy that does not wait for the slowest worker"
        raise InputError(CLUSTER_FILE, f"job.{field}", "a number", expected)
    latest = math.inf if job.deadline_hours is None else job.deadline_hours * HOUR * WITHIN
    most = math.inf if job.budget is None else job.budget * WITHIN
    best: tuple[float, float] | None = None
    chosen: ConstrainedSolution | None = None
    soonest = least = math.inf
    quickest = cheapest = (math.inf, math.inf)
    samples = job.target

    def too_late(solution: ConstrainedSolution) -> bool:
        """Whether no slower one of a front matters any more."""
        if chosen is None:
            return _undisturbed_seconds(cluster, solution, samples) > max(latest, soonest)
        by = latest if job.deadline_hours is not None or best is None else best[0]
        return _undisturbed_seconds(cluster, solution, samples) > by

    for solution in _sets(constrained, price, _rates(ranks), too_late):
        found = job_estimate(cluster, ranks, solution, samples)
        paid = found.price or 0.0
        soonest = min(soonest, found.seconds if paid <= most else math.inf)
        least = min(least, paid if found.seconds <= latest else math.inf)
        quickest, cheapest = min(quickest, (found.seconds, paid)), min(cheapest, (paid, found.seconds))
        rank = (paid, found.seconds) if job.deadline_hours is not None else (found.seconds, paid)
        if found.seconds <= latest and paid <= most and (best is None or rank < best):
            best, chosen = rank, solution
    if chosen is None:
        raise _refusal(cluster, soonest, least, (quickest, cheapest[::-1]))
    return chosen


def _sets(
    constrained: ConstrainedProblem,
    price: Floats,
    rates: Floats,
    too_late: Callable[[ConstrainedSolution], bool],
) -> Iterator[ConstrainedSolution]:
    """All solutions that no other beats in time, price an hour and rate of preemptions; of each front those
    until one that is too late.
    """
    limited, fronts = constrained, 0
    while True:
        largest, fronts = 0.0, fronts + 1
        try:
            for point in pareto_front(limited, price):
                yield point.solution
                largest = max(largest, float(rates[point.solution.batches > 0].sum()))
                if too_late(point.solution):
                    break
        except Infeasible:
            if limited is constrained:
                raise
            return
        if largest == 0:
            return
        fewer = Limit(RATE, rates, largest * (BELOW if fronts < MANY_RATES else CLEARLY_BELOW))
        limited = replace(constrained, limits=(*constrained.limits, fewer))


def limits_of_set(ranks: Sequence[PlannedRank], plan: Plan) -> list[Limit]:
    """The price an hour and the rate of preemptions of a plan's workers, as limits."""
    used = np.array([worker.batch > 0 for worker in plan.workers])
    needed = [(PRICE, needs(ranks, PRICE)), (RATE, _rates(ranks))]
    return [Limit(key, need, float(need[used].sum())) for key, need in needed if need is not None]


def _rates(ranks: Sequence[PlannedRank]) -> Floats:
    return np.array([rank.group.preemptions_per_hour * rank.group.devices for rank in ranks])


def _refusal(
    cluster: Cluster, soonest: float, least: float, ends: tuple[tuple[float, float], tuple[float, float]]
) -> Infeasible:
    """soonest, least: seconds of the soonest end within the budget, and the least price by the deadline.
    ends: seconds and price of the soonest end, and of the cheapest, whatever the job says.
    """
    job, ways = cluster.job, []
    wanted = [f"in {job.deadline_hours:g} hours"] if job.deadline_hours is not None else []
    wanted += [f"for {job.budget:g}"] if job.budget is not None else []
    if job.deadline_hours is not None and math.isfinite(soonest):
        ways.append(f"set job.deadline_hours to {_up(soonest / HOUR):g}")
    if job.budget is not None and math.isfinite(least):
        ways.append(f"set job.budget to {_up(least):g}")
    if not ways:  # each bound alone is out of reach, so neither change helps without the other
        changes = [(_up(seconds / HOUR), _up(price)) for seconds, price in ends]
        ways = [f"set job.deadline_hours to {h:g} and job.budget to {p:g}" for h, p in dict.fromkeys(changes)]
    return Infeasible(f"no workers train {job.target:g} {job.unit} {' '.join(wanted)}", " or ".join(ways))


def _up(value: float) -> float:
    """Four digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / unit) * unit
