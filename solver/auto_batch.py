"""Chooses the global batch where the job leaves it to the planner: of highest goodput, within the price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Cluster
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.mode import ROUND, Pace
from pyps.solver.constrained import ConstrainedProblem
from pyps.solver.costs import Floats
from pyps.solver.milp.pareto import PRICE
from pyps.solver.problem import planning_problem, solve_within_limits
from pyps.solver.ranks import PlannedRank, needs
from pyps.solver.systems.goodput import best_batch, efficiency_of


def best_global_batch(cluster: Cluster, ranks: Sequence[PlannedRank], pace: Pace = ROUND) -> int:
    """The global batch of highest goodput, by the cluster's noise scale. Raises InputError without one."""
    info = cluster.goodput
    if info is None:
        raise InputError(CLUSTER_FILE, "goodput", "nothing", "noise_scale and base_batch, in samples")
    most = info.max_batch or MAX_BATCH
    solve = partial(solve_within_limits, cluster, ranks, name_least=False)
    job = msgspec.structs.replace(cluster.job, global_batch=most)  # micro-batches suffice for all of them
    cluster = msgspec.structs.replace(cluster, job=job)
    problem, price = planning_problem(cluster, ranks, pace), needs(ranks, PRICE)
    budget = cluster.limits.price_per_million_samples
    least = 0 if budget is None or price is None else _least_affordable(problem, price, budget)
    return best_batch(problem, efficiency_of(info), most, solve, least)[0]


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
