"""Chooses the global batch where the job leaves it to the planner: of highest goodput, within the price; or
lists what each choice of batch and workers is worth, in time and price.

By the noise scale phi, B samples of a step count as `B (phi + m0) / (phi + B)` of steps of m0. The front is
that of time and price of these useful samples. It is made of the exact fronts of batches NEXT apart: with the
same workers a step of the next lower of these takes no longer than one of B, and is worth at most NEXT times
less. So for every choice the front has one that is as good to within NEXT, in both; but where batches are so
small that minima of workers bind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Cluster
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.mode import ROUND, Pace
from pyps.solver.constrained import ConstrainedProblem
from pyps.solver.costs import Floats
from pyps.solver.jobs.pareto import PRICE, ParetoPoint, pareto_front
from pyps.solver.problem import planning_problem, solve_within_limits
from pyps.solver.ranks import PlannedRank, needs
from pyps.solver.systems.goodput import best_batch, efficiency_of

NEXT = 1.05  # times the batch before


@dataclass(frozen=True)
class BatchPoint:
    """A global batch and workers; seconds and price of a million useful samples. point: its solution."""

    global_batch: int
    seconds_per_million: float
    price_per_million: float
    point: ParetoPoint


def front_over_batches(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    price: Floats,
    pace: Pace = ROUND,
    progress: Callable[[int], None] = lambda batch: None,
) -> list[BatchPoint]:
    """The choices of a global batch and workers that no other beats in time and price, fastest first.

    cluster: with [goodput]; its own global batch is ignored. price: of one hour of each worker. progress: is
    called with each batch. Raises Infeasible if no batch has a solution, InputError without [goodput].
    """
    problem, most = _of_any_batch(cluster, ranks, pace)
    assert cluster.goodput is not None
    statistical, found = efficiency_of(cluster.goodput), list[BatchPoint]()
    step = math.gcd(*problem.problem.batch_multiple.tolist())
    last, batch = min(most, int(problem.problem.max_batch.sum())) // step * step, step
    while batch <= last:
        progress(batch)
        try:
            for point in pareto_front(
                replace(problem, problem=replace(problem.problem, global_batch=batch)), price
            ):
                useful = statistical.estimate(batch, point.solution.iteration_seconds).goodput
                hourly = point.price_per_hour
                found.append(BatchPoint(batch, 1e6 / useful, 1e6 / useful * hourly / 3600, point))
        except Infeasible:
            pass
        batch = last if batch < last < batch * NEXT else max(batch + step, int(batch * NEXT) // step * step)
    if not found:
        raise Infeasible(
            f"no global batch up to {last} has a split", "raise the workers' maxima or the limits"
        )
    front, cheapest = list[BatchPoint](), math.inf
    for one in sorted(found, key=lambda one: (one.seconds_per_million, one.price_per_million)):
        if one.price_per_million < cheapest:
            front.append(one)
            cheapest = one.price_per_million
    return front


def _of_any_batch(
    cluster: Cluster, ranks: Sequence[PlannedRank], pace: Pace
) -> tuple[ConstrainedProblem, int]:
    """The problem whose micro-batches suffice for every global batch, and the largest of these."""
    info = cluster.goodput
    if info is None:
        raise InputError(CLUSTER_FILE, "goodput", "nothing", "noise_scale and base_batch, in samples")
    most = info.max_batch or MAX_BATCH
    job = msgspec.structs.replace(cluster.job, global_batch=most)
    # Transfers are followed for the batch that is chosen, not for all that are compared.
    return replace(planning_problem(msgspec.structs.replace(cluster, job=job), ranks, pace), trips=()), most


def best_global_batch(cluster: Cluster, ranks: Sequence[PlannedRank], pace: Pace = ROUND) -> int:
    """The global batch of highest goodput, by the cluster's noise scale. Raises InputError without one."""
    problem, most = _of_any_batch(cluster, ranks, pace)
    assert cluster.goodput is not None
    job = msgspec.structs.replace(cluster.job, global_batch=most)
    solve = partial(solve_within_limits, msgspec.structs.replace(cluster, job=job), ranks, name_least=False)
    price, budget = needs(ranks, PRICE), cluster.limits.price_per_million_samples
    least = 0 if budget is None or price is None else _least_affordable(problem, price, budget)
    return best_batch(problem, efficiency_of(cluster.goodput), most, solve, least)[0]


def _least_affordable(constrained: ConstrainedProblem, price: Floats, budget: float) -> int:
    """A global batch below which every sample costs more than the budget allows.

    In a batch of B no worker has more than B samples, nor is any sample cheaper than on the cheapest worker
    with as many as make it cheapest. Raises Infeasible if none is cheap enough.
    """
    problem = constrained.problem
    most, batch = problem.costs.last_batch(problem.max_batch), 1
    cheapest = math.inf
    while True:
        tried = np.minimum(most, batch)
        seconds = np.where(tried > 0, problem.costs.compute(np.maximum(tried, 1)), np.inf)
        # A batch between two powers of two takes no less time than the lower one.
        below = np.minimum(most, 2 * batch)
        bound = float((1e6 / 3600 * price * seconds / np.maximum(below, 1)).min())
        cheapest = min(cheapest, bound)
        if cheapest <= budget:
            return batch
        if (most <= batch).all():
            raise Infeasible(
                f"no workers compute a million samples for {budget:g}, whatever the global batch",
                f"raise limits.price_per_million_samples above {cheapest:.4g}",
            )
        batch *= 2
