"""Plans a cluster, and answers what follows: why, what if, at what price, what to measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pyps.errors import InputError
from pyps.formats import Cluster, Plan, Profile
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.mode import ROUND, Pace
from pyps.solver.auto_batch import BatchPoint, best_global_batch, front_over_batches
from pyps.solver.constrained import Limit, even_split
from pyps.solver.costs import Floats
from pyps.solver.jobs.job import limits_of_set
from pyps.solver.jobs.pareto import COARSE, PRICE, ParetoPoint, pareto_front, unbeaten
from pyps.solver.jobs.whatif import PlanSummary, summary_of, verdict
from pyps.solver.milp.checks import agreement
from pyps.solver.plan import Planned, each_rank, planned
from pyps.solver.problem import at_quantile, planning_problem, solve_within_limits
from pyps.solver.ranks import needs, planned_ranks
from pyps.solver.report.explain import Explanation, explain
from pyps.solver.report.measure import NextSizes, next_sizes
from pyps.solver.ways import worth_of_memory


@dataclass(frozen=True)
class Change:
    """The main figures of two plans, and the difference in a sentence."""

    before: PlanSummary
    after: PlanSummary
    verdict: str


class Planner:
    """One cluster to plan.

    cluster: what is planned. profiles: one with a fit for each group. pace: of the policy that [run] names;
    rounds if it names none. Every method raises Infeasible and InputError as make_plan.
    """

    def __init__(self, cluster: Cluster, profiles: Sequence[Profile], pace: Pace = ROUND) -> None:
        self.cluster, self.profiles, self.pace = cluster, list(profiles), pace

    @cached_property
    def planned(self) -> Planned:
        """The plan with what it was made of; a node is one worker there."""
        return planned(self.cluster, self.profiles, self.pace)

    def plan(self) -> Plan:
        """The plan, with the ranks of all nodes."""
        return each_rank(self.planned.plan, self.planned.ranks)

    def even_seconds(self) -> list[float]:
        """The seconds of each rank in the even split."""
        pairs = zip(even_split(self.planned.problem)[1], self.planned.ranks, strict=True)
        return [seconds for seconds, rank in pairs for _ in range(rank.group.ranks_each)]

    def explain(self) -> Explanation:
        """Which workers and bounds determine the time, and what a change would save."""
        plan, ranks, problem = self.planned.plan, self.planned.ranks, self.planned.problem
        flat = all(rank.card is not None and rank.group.ranks_each == 1 for rank in ranks)
        worth = worth_of_memory(self.cluster, ranks, problem) if flat else None
        return explain(plan, ranks, problem, worth)

    def what_if(self, other: Planner) -> Change:
        """Compare this plan with another one."""
        before, after = (summary_of(one.plan(), one.pace.kind != "free") for one in (self, other))
        return Change(before, after, verdict(before, after))

    def next_sizes(self) -> NextSizes:
        """The batch sizes to measure next."""
        return next_sizes(self.cluster, self.profiles, self.pace)

    def best_global_batch(self) -> int:
        """The global batch of highest goodput."""
        return best_global_batch(self.cluster, planned_ranks(self.cluster, self.profiles), self.pace)

    def front(self, progress: Callable[[str], None] = lambda text: None) -> list[ParetoPoint]:
        """The choices of workers that no other beats in time and price, fastest first."""
        price, points = self._price(), list[ParetoPoint]()
        ranks = at_quantile(self.cluster, planned_ranks(self.cluster, self.profiles), self.pace)
        for point in pareto_front(planning_problem(self.cluster, ranks, self.pace), price):
            points.append(point)
            progress(f"computing the front: {len(points)} points")
        return unbeaten(points)

    def front_over_batches(self, progress: Callable[[str], None] = lambda text: None) -> list[BatchPoint]:
        """The front over global batches, too, of useful samples."""
        price = self._price()
        ranks = at_quantile(self.cluster, planned_ranks(self.cluster, self.profiles), self.pace)
        return front_over_batches(
            self.cluster, ranks, price, self.pace, lambda b: progress(f"computing the front of batch {b}")
        )

    def row_of(self, point: ParetoPoint) -> dict[str, Any]:
        """A point of a front as plain data, with the batch of every rank."""
        ranks = [group.ranks_each for group in self.cluster.worker for _ in range(group.count)]
        batches = zip(point.solution.batches.tolist(), ranks, strict=True)
        return {
            "iteration_seconds": point.solution.iteration_seconds,
            "price_per_hour": point.price_per_hour,
            "price_per_million_samples": point.price_per_million_samples,
            "batches": [batch // each for batch, each in batches for _ in range(each)],
        }

    def names(self) -> list[str]:
        """The group of each worker, a node being one."""
        return [group.name for group in self.cluster.worker for _ in range(group.count)]

    def _price(self) -> Floats:
        """The price of an hour of each worker. Raises InputError where a group states none."""
        price = needs(planned_ranks(self.cluster, self.profiles), PRICE)
        if price is None:
            groups = self.cluster.worker
            unpriced = next(k for k, group in enumerate(groups) if group.price_per_hour is None)
            field = f"worker[{unpriced}].price_per_hour"
            raise InputError(CLUSTER_FILE, field, "nothing", "a price for each group")
        return price

    def check(self) -> str:
        """Solve again with HiGHS; one line confirming the optimum. Raises PypsError if HiGHS finds a better
        one.
        """
        cluster, ranks, plan = self.cluster, self.planned.ranks, self.planned.plan
        problem, coarse = self.planned.problem, 0.0
        price = needs(ranks, PRICE)
        if cluster.limits.price_per_million_samples is not None and price is not None and plan.cost:
            # The plan is the fastest of all that cost no more an hour.
            hourly = Limit(PRICE, price, plan.cost.price_per_hour or 0.0)
            problem, coarse = replace(problem, limits=(*problem.limits, hourly)), COARSE
        if cluster.job.is_bounded:  # no set of workers that costs and is preempted as little is faster
            limits = (*problem.limits, *limits_of_set(cluster, ranks, plan))
            problem, coarse = replace(problem, limits=limits), COARSE
        if problem.may_meet:  # HiGHS cannot follow transfers: the bound alone is checked
            problem = replace(problem, trips=())
            found = solve_within_limits(cluster, ranks, problem)
            return f"{agreement(problem, found.batches.tolist(), coarse)}, of transfers that are not followed"
        if not problem.minimises_iteration:
            found = solve_within_limits(cluster, ranks, problem)
            return agreement(problem, found.batches.tolist(), coarse)
        return agreement(problem, [worker.batch for worker in plan.workers], coarse)
