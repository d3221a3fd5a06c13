"""The problem that a plan solves: with the fitted times, or with those of a quantile of the measured noise.

A job that names a quantile is planned with the times of which an iteration ends at that quantile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from pyps.errors import Infeasible
from pyps.formats import Cluster, NoiseForecast, Plan
from pyps.formats.mode import ROUND, Mode, Pace
from pyps.solver.constrained import ConstrainedProblem, ConstrainedSolution, even_units, observed
from pyps.solver.costs import Floats, Ints, cost_of
from pyps.solver.exact.followed import alone, best_followed
from pyps.solver.exact.minmax import Problem
from pyps.solver.exact.throughput import most_throughput
from pyps.solver.goal import fastest_goal, within_price
from pyps.solver.jobs.pareto import PRICE, within_budget
from pyps.solver.milp.constrained import solve_constrained
from pyps.solver.noise import Noise, forecast, iteration_quantile, levels, noise_of, too_few
from pyps.solver.ranks import PlannedRank, constrained_problem_of, needs
from pyps.solver.report.warnings import Remark, in_lines

QUANTILE_ROUNDS = 4


def planning_problem(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    pace: Pace = ROUND,
    modes: Sequence[Mode] | None = None,
) -> ConstrainedProblem:
    """The problem that a cluster's plan solves: with the fitted times, or each rank's or the job's quantile.

    cluster, ranks, pace, modes: as in pyps.solver.ranks.constrained_problem_of.
    """
    return constrained_problem_of(cluster, ranks, factors_of(cluster, ranks), pace, modes)


def solve_within_limits(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    constrained: ConstrainedProblem,
    name_least: bool = True,
) -> ConstrainedSolution:
    """The fastest solution within every limit, including the price of samples.

    cluster, ranks: what is planned. constrained: their problem. name_least: a refusal names the least price
    of samples, which takes longer. Raises Infeasible.
    """
    if constrained.may_meet and (constrained.minimises_iteration or cluster.run.local_steps is None):
        return _fastest_followed(cluster, ranks, constrained)
    budget, price = cluster.limits.price_per_million_samples, needs(ranks, PRICE)
    if budget is None or price is None:
        return solve_constrained(constrained)
    return within_budget(constrained, price, budget, name_least)


def _fastest_followed(
    cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem
) -> ConstrainedSolution:
    """The fastest solution within every limit, where transfers meet on shared links, and what is proven.

    Raises Infeasible.
    """
    price, lower = needs(ranks, PRICE), alone(constrained)
    most = cluster.limits.price_per_million_samples
    least = solve_within_limits(cluster, ranks, lower)
    bound = least.iteration_seconds if constrained.minimises_iteration else 0.0
    goal = fastest_goal()
    if most is not None and price is not None:
        goal = within_price(price, most * 3600 * constrained.problem.global_batch / 1e6)
    elif constrained.pace.kind == "free" and (found := most_throughput(lower)) is not None:
        bound = constrained.problem.global_batch / (found.samples_per_second * (1 + found.gap))
    starts = [least.batches]
    with contextlib.suppress(Infeasible):
        apart = replace(constrained, trips=())
        starts.append(solve_within_limits(cluster, ranks, apart, name_least=False).batches)
    starts += [] if constrained.pace.sized else [even_units(constrained)]
    best = best_followed(constrained, goal, starts, bound, plain=most is None)
    if best is None:
        raise Infeasible(f"no split of {constrained.problem.global_batch} was found within the limits")
    return replace(observed(constrained, best.batches), proven_seconds=best.proven)


def at_quantile(cluster: Cluster, ranks: Sequence[PlannedRank], pace: Pace = ROUND) -> list[PlannedRank]:
    """The ranks with the quantile of each one's times with which an iteration ends at the job's quantile.

    Which workers are used, and how much each loses by being slow, follows from the split, and the split from
    the quantiles: so a few rounds, of which the soonest quantile of the iteration is kept. Raises as
    make_plan.
    """
    quantile, noise = cluster.job.quantile, _noise(ranks)
    if quantile is None or not planning_problem(cluster, ranks, pace).minimises_iteration:
        return list(ranks)
    fitted = constrained_problem_of(cluster, ranks, (), pace)
    found: list[tuple[float, list[PlannedRank]]] = []
    trial = [replace(rank, quantile=quantile ** (1 / len(ranks))) for rank in ranks]
    for _ in range(QUANTILE_ROUNDS):
        batches = solve_within_limits(cluster, trial, planning_problem(cluster, trial, pace)).batches
        found.append((iteration_quantile(fitted, batches, noise, quantile), trial))
        used = batches > 0
        speeds = np.where(used, _marginal_speeds(fitted.problem, batches), 0.0)
        shares = levels(quantile, noise, speeds)
        following = [replace(rank, quantile=share) for rank, share in zip(ranks, shares, strict=True)]
        if following == trial:
            break
        trial = following
    return min(found, key=lambda one: one[0])[1]


def _marginal_speeds(problem: Problem, batches: Ints) -> Floats:
    """Return how many samples a second more time adds to each worker's batch."""
    more = np.maximum(batches, 1) + np.maximum(1, batches // 10)
    rise = problem.costs.compute(more) - problem.costs.compute(np.maximum(batches, 1))
    flat = problem.costs.compute(np.maximum(batches, 1)) / np.maximum(batches, 1) * (more - batches)
    return (more - batches) / np.where(np.isfinite(rise) & (rise > 0), rise, flat)


def with_noise(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    plan: Plan,
    pace: Pace,
    modes: Sequence[Mode],
    least_share: float | None = None,
) -> Plan:
    """The plan with the forecasts of its split and of the one for the fitted times. least_share: of Sync."""
    fitted, noise = constrained_problem_of(cluster, ranks, (), pace, modes), _noise(ranks)
    fitted = replace(fitted, sync=replace(fitted.sync, least_share=least_share))
    quantile, planned = cluster.job.quantile or 0.5, np.array([worker.batch for worker in plan.workers])
    by = iteration_quantile(fitted, planned, noise, quantile)
    nominal, robust = (
        forecast(fitted, batches, noise, quantile, by)
        for batches in (solve_within_limits(cluster, ranks, fitted).batches, planned)
    )
    quiet = [r.group.name for r in ranks if too_few(r.profile.points)]
    too_quiet = "too few timings to estimate"
    unknown = in_lines([Remark(name, f"{too_quiet} its noise", f"{too_quiet} noise") for name in quiet])
    return msgspec.structs.replace(
        plan,
        warnings=plan.warnings + unknown,
        noise=NoiseForecast(quantile=quantile, nominal=nominal, robust=robust),
    )


def factors_of(cluster: Cluster, ranks: Sequence[PlannedRank]) -> list[float]:
    """Return the factor of each rank's fitted times for its quantile, or the job's; empty without one."""
    quantile = cluster.job.quantile
    if quantile is None:
        return []
    pairs = zip(ranks, _noise(ranks), strict=True)
    return [noise.factor(rank.quantile or quantile) for rank, noise in pairs]


def _noise(ranks: Sequence[PlannedRank]) -> list[Noise]:
    """The noise of each rank, computed once a profile."""
    cache: dict[int, Noise] = {}
    for rank in ranks:
        if id(rank.profile) not in cache:
            cache[id(rank.profile)] = noise_of(rank.profile.points, cost_of(rank.fit))
    return [cache[id(rank.profile)] for rank in ranks]
