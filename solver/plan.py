"""Makes the plan for a cluster and its profiles: each worker's batch, and what follows from it.

The plan is compared with the even split: the same batch for every worker, with the remainder on the first
ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import (
    MAX_BATCH,
    Cluster,
    CostEstimate,
    Fit,
    Plan,
    PlanWorker,
    Profile,
    R2spSchedule,
    RunTable,
    SyncEstimate,
    WorkerGroup,
)
from pyps.formats.mode import ROUND, Mode, Pace, PlannedRun
from pyps.solver.accumulate import best_size
from pyps.solver.constrained import (
    ConstrainedProblem,
    ConstrainedSolution,
    at_first,
    even_split,
    even_units,
    observed,
)
from pyps.solver.costs import cost_of
from pyps.solver.exact.minmax import Problem, at_index, most_by, rounded, solve, times
from pyps.solver.exact.throughput import Throughput, most_throughput, rates_of
from pyps.solver.jobs.job import assumptions, best_for_job, job_estimate
from pyps.solver.jobs.pareto import PRICE, price_per_million
from pyps.solver.links import LinkCost, in_series
from pyps.solver.local_steps import idle_warning
from pyps.solver.milp.constrained import solve_constrained
from pyps.solver.milp.relaxed import subset_bound
from pyps.solver.mode import bits_of, mode_of, most_exact, stated_policy
from pyps.solver.problem import (
    at_quantile,
    planning_problem,
    solve_within_limits,
    with_noise,
)
from pyps.solver.ranks import PlannedRank, links_of, max_batch_of, needs, planned_ranks, unit_of
from pyps.solver.report.warnings import (
    doubtful_links,
    largest_measured,
    link_warnings,
    short_step,
    unlike_steps,
    unlike_times,
    warnings_of,
)
from pyps.solver.shards import shares_of, with_shares
from pyps.solver.systems.goodput import efficiency_of
from pyps.solver.systems.hps import hps_estimate, hps_modes
from pyps.solver.systems.r2sp import r2sp_schedule, remedies, slowest_alone
from pyps.solver.units import by_rank
from pyps.solver.ways import ways_to_fit

AS_FAST = 1e-9  # relative: where no other split is faster, the one whose steps are alike is kept
MOST_SUM = 1 << 20  # of a global batch that may be proposed, in common multiples: a second
MOST_RATES = 1 << 25  # of a split for throughput: a quarter of a gigabyte, and seconds


def make_plan(
    cluster: Cluster,
    profiles: Sequence[Profile],
    pace: Pace | None = None,
    multiples: Sequence[int] | None = None,
) -> Plan:
    """The plan for a cluster, in the mode that its [run] states.

    cluster: what is planned. profiles: one with a fit for each group of the cluster. pace: of the policy that
    [run] names (pyps.store.policies.Policy.pace); rounds if it names none. multiples: of the samples of each
    group's micro-batches; None: as its profile shows.

    If the job names a quantile, all times are those at the iteration's quantile, and `noise` holds the fitted
    ones. Raises Infeasible, InputError, PypsError.
    """
    if pace is None and cluster.run.policy is not None:
        raise InputError("make_plan", "pace", "nothing", f"the pace of the policy {cluster.run.policy!r}")
    found = planned(cluster, profiles, pace or ROUND, multiples)
    return each_rank(found.plan, found.ranks)


@dataclass(frozen=True)
class Planned:
    """A plan with the ranks and the problem that it was made of; a node is one worker there."""

    ranks: list[PlannedRank]
    problem: ConstrainedProblem
    plan: Plan


def planned(
    cluster: Cluster, profiles: Sequence[Profile], pace: Pace, multiples: Sequence[int] | None = None
) -> Planned:
    """`make_plan` with what the plan is made of."""
    ranks = planned_ranks(cluster, profiles, multiples)
    try:
        ranks = at_quantile(cluster, ranks, pace)
        problem = planning_problem(cluster, ranks, pace)
        return Planned(ranks, problem, plan_ranks(cluster, ranks, problem))
    except Infeasible as error:
        raise Infeasible(error.reason, ways_to_fit(cluster, profiles, pace, ranks, error.nearest)) from None


def plan_ranks(cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem) -> Plan:
    """`make_plan` for the ranks and the planning problem that were made of the cluster and its profiles; a
    node is one worker of this plan.
    """
    pace = constrained.pace
    solution, notes = _fastest_solution(cluster, ranks, constrained)
    modes = _modes(cluster, ranks, pace, solution)
    constrained = _in_shares(cluster, planning_problem(cluster, ranks, pace, modes), ranks, solution)
    valued = replace(observed(constrained, solution.batches), proven_seconds=solution.proven_seconds)
    plan = plan_of(cluster, ranks, constrained, valued, modes)
    notes += [*assumptions(cluster, ranks, plan), *largest_measured(ranks, solution.batches.tolist())]
    plan = msgspec.structs.replace(plan, warnings=plan.warnings + notes)
    if cluster.job.quantile is None:
        return plan
    return with_noise(cluster, ranks, plan, pace, modes, constrained.sync.least_share)


def _in_shares(
    cluster: Cluster,
    constrained: ConstrainedProblem,
    ranks: Sequence[PlannedRank],
    solution: ConstrainedSolution,
) -> ConstrainedProblem:
    """The problem with what the ring carries where the ranks' shares follow their memory."""
    cards = [rank.card for rank in ranks if rank.card is not None and rank.card.state.share is None]
    if not cards:
        return constrained
    at_once = [
        _plan_worker(k, rank, solution, constrained.problem, unit_of(cluster, rank)).micro_batch
        for k, rank in enumerate(ranks)
    ]
    least = min(shares_of(cards, at_once))
    return replace(constrained, sync=replace(constrained.sync, least_share=least))


def _fastest_solution(
    cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem
) -> tuple[ConstrainedSolution, list[str]]:
    """Return the solution with the shortest longest step, and what is not proven; or a faster split."""
    if cluster.job.is_bounded:
        solution, notes = best_for_job(cluster, ranks, constrained)
        return observed(constrained, solution.batches), notes
    if constrained.may_meet and (constrained.minimises_iteration or cluster.run.local_steps is None):
        return solve_within_limits(cluster, ranks, constrained), []
    most = _most_throughput(cluster, ranks, constrained)
    try:
        joint = observed(constrained, solve_within_limits(cluster, ranks, constrained).batches)
    except Infeasible:
        if most is None:
            raise
        return observed(constrained, most.batches), []  # whose longest step is too long for the price's front
    if constrained.minimises_iteration or cluster.run.local_steps is not None:
        return joint, []
    found, serial = [joint], msgspec.structs.replace(cluster, run=RunTable())
    with contextlib.suppress(Infeasible):
        batches = solve_within_limits(serial, ranks, planning_problem(serial, ranks)).batches
        found.append(observed(constrained, batches))
    if even_split(constrained)[0].feasible:
        found.append(observed(constrained, even_units(constrained)))
    if not joint.meets and most is not None:
        found.append(observed(constrained, most.batches))
    found = [one for one in found if one is joint or _is_affordable(cluster, ranks, one)]
    best = min(found, key=lambda solution: solution.iteration_seconds)
    return (joint if joint.iteration_seconds <= best.iteration_seconds * (1 + AS_FAST) else best), []


def _is_affordable(cluster: Cluster, ranks: Sequence[PlannedRank], solution: ConstrainedSolution) -> bool:
    """Return whether its samples cost no more than the cluster file allows."""
    most, price = cluster.limits.price_per_million_samples, needs(ranks, PRICE)
    if most is None or price is None:
        return True
    return price_per_million(solution, float(price[solution.batches > 0].sum())) <= most


def _most_throughput(
    cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem
) -> Throughput | None:
    """Return the split with the most samples a second, where no worker waits; None of too many to try."""
    stated = cluster.run.local_steps is not None or cluster.job.is_bounded
    if constrained.pace.kind != "free" or stated or rates_of(constrained) > MOST_RATES:
        return None
    most, price = cluster.limits.price_per_million_samples, needs(ranks, PRICE)
    with contextlib.suppress(Infeasible):  # solve_within_limits refuses it with what would help
        return most_throughput(constrained, None if most is None or price is None else (price, most))
    return None


def _modes(
    cluster: Cluster, ranks: Sequence[PlannedRank], pace: Pace, solution: ConstrainedSolution
) -> list[Mode]:
    """Each rank's codecs and depth: the most exact and shallowest with which the solution is as fast."""

    def valued(modes: Sequence[Mode]) -> ConstrainedSolution:
        return observed(planning_problem(cluster, ranks, pace, modes), solution.batches)

    return most_exact(mode_of(cluster, pace), links_of(cluster, ranks), solution, valued)


def all_used_from(constrained: ConstrainedProblem) -> int | None:
    """The smallest global batch with which the solver leaves no worker out; None where it is not so simple,
    or far away.

    It is one sample more than the others finish before the slowest worker has finished its smallest batch.
    """
    if constrained.has_side_constraints:
        return None
    try:
        bounds = rounded(constrained.problem)
        latest = float(times(bounds.costs, bounds.min_batch).max())
        least = int(most_by(bounds, math.nextafter(latest, 0.0)).sum()) + 1
        if not constrained.problem.global_batch < least <= _farthest(bounds):
            return None
        found = solve_constrained(replace(constrained, problem=replace(bounds, global_batch=least)))
    except Infeasible:
        return None
    return least if found.batches.all() else None


def _farthest(problem: Problem) -> int:
    """The largest global batch that may be proposed: a search for sums of unlike multiples must end."""
    return min(MAX_BATCH, MOST_SUM * math.gcd(*problem.batch_multiple.tolist()))


def plan_of(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    constrained: ConstrainedProblem,
    solution: ConstrainedSolution,
    modes: Sequence[Mode],
) -> Plan:
    """The plan with this solution's batches, and all that follows from them.

    cluster, ranks, constrained: what was planned. solution: of this problem. modes: of each rank.
    """
    problem, seconds = constrained.problem, solution.iteration_seconds
    even, _ = even_split(constrained)
    workers = [
        _plan_worker(k, rank, solution, problem, unit_of(cluster, rank)) for k, rank in enumerate(ranks)
    ]
    used = [worker.rank for worker in workers if worker.batch]
    compute = [float(solution.seconds[k]) for k in used]
    crossed = links_of(cluster, ranks)
    links = [in_series(crossed[k]) or ranks[k].link for k in used]
    here = [modes[k] for k in used]
    designs = hps_modes(compute, links, cluster.quantization.error_budget or 0.0)
    in_rounds = cluster.run.local_steps is not None  # then other samples are not another global batch
    r2sp = _turns(constrained, used, compute, links, here)
    if in_rounds and (found := r2sp.remedies) is not None:
        r2sp = msgspec.structs.replace(r2sp, remedies=msgspec.structs.replace(found, global_batch=None))
    per_million = cluster.limits.price_per_million_samples
    tied = constrained.may_forbid or cluster.job.is_bounded or per_million is not None
    warnings = warnings_of(ranks, workers, problem, tied)
    warnings += [*unlike_steps(cluster, ranks), *unlike_times(ranks), *doubtful_links(cluster, ranks)]
    warnings += short_step(ranks, solution.step_seconds.tolist())
    warnings += _of_times(cluster, ranks, constrained, solution, workers)
    if constrained.pace.kind == "turns" or not (cluster.run.is_stated or cluster.sync):
        warnings += link_warnings(r2sp, slowest_alone(compute, links, here))
    efficiency, steps = cluster.goodput and efficiency_of(cluster.goodput), cluster.run.local_steps or 1
    goodput = efficiency.estimate(cluster.job.global_batch, seconds / steps) if efficiency else None
    return Plan(
        unit=cluster.job.unit,
        global_batch=problem.global_batch,
        iteration_seconds=seconds,
        lower_bound_seconds=_lower_bound(cluster, ranks, constrained, solution),
        even_split=even,
        speedup_over_even=even.seconds / seconds if even.seconds else None,
        workers=_with_modes(cluster, workers, modes, dict(zip(used, designs, strict=False))),
        r2sp=r2sp,
        hps=hps_estimate(compute, links, designs),
        warnings=warnings,
        run=_run_mode(cluster, workers) if cluster.run.is_stated else None,
        sync=SyncEstimate(kind=constrained.sync.kind, seconds=solution.sync_seconds)
        if cluster.sync
        else None,
        cost=cost_estimate(ranks, solution),
        goodput=goodput,
        target=job_estimate(cluster, ranks, solution),
    )


def _doubtful_gain(
    ranks: Sequence[PlannedRank], constrained: ConstrainedProblem, solution: ConstrainedSolution
) -> list[str]:
    """A warning of a gain over the even split that is within the error of the profiles."""
    even, _ = even_split(constrained)
    if not even.seconds or np.array_equal(even_units(constrained), solution.batches):
        return []
    gain = even.seconds / solution.iteration_seconds - 1
    error = max(rank.fit.leave_one_out_error or 0.0 for rank in ranks)  # at a batch that was not measured
    if gain > error:
        return []
    found = f"an even split takes {gain:.1%} longer by the profiles, which are off by {error:.1%}"
    return [f"{found}: it may be as fast; measure more batches, or run both"]


def _of_times(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    constrained: ConstrainedProblem,
    solution: ConstrainedSolution,
    workers: Sequence[PlanWorker],
) -> list[str]:
    """Warnings of how long iterations take, and of workers that are left out."""
    warnings, seconds = [], solution.iteration_seconds
    if (first := at_first(constrained, solution)) is not None:
        ends = f"{1e3 * seconds:.4g} ms once the fastest workers are as far ahead as they may be"
        warnings.append(f"an iteration takes {1e3 * first:.4g} ms at first, for up to hundreds, then {ends}")
    if constrained.minimises_iteration:
        warnings += idle_warning(cluster, workers, seconds)
        if not cluster.job.is_bounded and cluster.limits.price_per_million_samples is None:
            warnings += _doubtful_gain(ranks, constrained, solution)
    in_rounds = cluster.run.local_steps is not None  # then other samples are not another global batch
    if (
        not all(worker.batch for worker in workers)
        and not in_rounds
        and (least := all_used_from(constrained)) is not None
    ):
        warnings.append(f"from a global batch of {least:,} on, all workers would be used")
    return warnings


def _lower_bound(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    constrained: ConstrainedProblem,
    solution: ConstrainedSolution,
) -> float:
    """Seconds below which no split can be; 0 where none is known."""
    most = None if solution.meets else _most_throughput(cluster, ranks, constrained)
    if most is not None:
        seconds = constrained.problem.global_batch / (most.samples_per_second * (1 + most.gap))
        return min(seconds, solution.iteration_seconds)  # but for rounding
    proven = min(solution.proven_seconds, solution.iteration_seconds)
    if not constrained.minimises_iteration:
        return proven
    sync = replace(constrained.sync, least_share=None)  # with which a ring carries least
    return max(proven, subset_bound(constrained.problem, sync, solution.iteration_seconds))


def _run_mode(cluster: Cluster, workers: Sequence[PlanWorker]) -> PlannedRun:
    """The mode that the plan is made for."""
    return PlannedRun(
        policy=stated_policy(cluster.run),
        round_timeout=cluster.run.round_timeout,
        depth=cluster.run.depth or 1,
        local_steps=cluster.run.local_steps,
        local_batch=max(w.micro_batch for w in workers) if cluster.run.local_batch else None,
        average_moments=cluster.run.average_moments,
    )


def _with_modes(
    cluster: Cluster,
    workers: Sequence[PlanWorker],
    modes: Sequence[Mode],
    designs: Mapping[int, Mode],
) -> list[PlanWorker]:
    """The workers, each with the mode that the plan is made for, or with what would hide its transfers.

    modes: that it is made for. designs: of pipelines, by rank.
    """
    found = []
    for worker, mode in zip(workers, modes, strict=True):
        design, chosen = designs.get(worker.rank), mode if cluster.run.is_stated else None
        if chosen is None:
            chosen = design
        elif cluster.run.depths[1] == 1:
            chosen = msgspec.structs.replace(chosen, depth=design.depth if design is not None else 1)
        found.append(msgspec.structs.replace(worker, mode=chosen))
    return found


def _turns(
    constrained: ConstrainedProblem,
    used: Sequence[int],
    compute: Sequence[float],
    links: Sequence[LinkCost | None],
    modes: Sequence[Mode],
) -> R2spSchedule:
    """The ring, with the remedies if its turns do not fit.

    constrained: what was planned. used: the ranks in use; compute, links, modes: of each of these.
    """
    ring = r2sp_schedule(used, compute, links, modes)
    known = [  # links on which 32 bits take as long as the mode's do
        replace(link, model_seconds=link.wire_seconds(*bits_of(mode)) / 2 - link.averaged_seconds)
        for link, mode in zip(links, modes, strict=True)
        if link is not None
    ]
    if ring.feasible is not False:
        return ring

    same = at_index(constrained.problem, np.array(used))

    def at(batch: int) -> tuple[list[float], list[LinkCost]] | None:
        if batch > _farthest(same):
            return None
        try:
            split = solve(replace(same, global_batch=batch))
        except Infeasible:
            return None
        kept = np.flatnonzero(split.batches > 0).tolist()
        computing = same.costs.take(np.array(kept)).compute(split.batches[kept])
        return computing.tolist(), [known[k] for k in kept]

    overlap = any(mode.depth > 1 for mode in modes)
    bits = max(max(bits_of(mode)) for mode in modes)
    found = remedies(compute, known, constrained.problem.global_batch, at, bits, overlap)
    return msgspec.structs.replace(ring, remedies=found)


def cost_estimate(ranks: Sequence[PlannedRank], solution: ConstrainedSolution) -> CostEstimate | None:
    """Price and power of the workers in use; None if the cluster file states neither for all."""
    used = solution.batches > 0
    price, watts = needs(ranks, PRICE), needs(ranks, "watts")
    if price is None and watts is None:
        return None
    hourly = None if price is None else float(price[used].sum())
    return CostEstimate(
        price_per_hour=hourly,
        price_per_million_samples=None if hourly is None else price_per_million(solution, hourly),
        watts=None if watts is None else float(watts[used].sum()),
    )


def each_rank(plan: Plan, ranks: Sequence[PlannedRank]) -> Plan:
    """The plan with all ranks of its nodes. ranks: those that it was made for."""
    found = []
    for worker, rank in zip(plan.workers, ranks, strict=True):
        n = rank.group.ranks_each
        group, profile = rank.one or (rank.group, rank.profile)
        one = msgspec.structs.replace(
            worker,
            batch=worker.batch // n,
            micro_batch=worker.micro_batch // n,
            weight=worker.batch // n / plan.global_batch,
            **_bounds(group, profile, profile.fit or rank.fit),
        )
        names = [f"{worker.name}-{k}" for k in range(n)] if n > 1 else [worker.name]
        found.append([msgspec.structs.replace(one, name=name) for name in names])
    made = by_rank(plan, found)
    cards = [rank.card for rank in ranks for _ in range(rank.group.ranks_each)]
    return msgspec.structs.replace(made, workers=with_shares(made.workers, cards))


def _bounds(group: WorkerGroup, profile: Profile, fit: Fit) -> dict[str, Any]:
    """The fields of a plan's worker with which a run can change its batch."""
    return {
        "max_batch": min(max_batch_of(group, profile), MAX_BATCH) or None,
        "fit": msgspec.structs.replace(fit, band=None),
        "memory": profile.memory,
        "min_batch": group.min_batch or 1,
        "batch_multiple": group.batch_multiple,
    }


def _plan_worker(
    k: int, rank: PlannedRank, solution: ConstrainedSolution, problem: Problem, unit: int
) -> PlanWorker:
    """unit: what a micro-batch has whole."""
    batch, repeats = int(solution.batches[k]), rank.group.max_accumulation
    micro = batch if problem.costs.micro is None else min(batch, int(problem.costs.micro[k]))
    if batch and repeats > 1 and problem.costs.micro is None:
        at_once = (
            max_batch_of(rank.group, rank.profile) if problem.at_once is None else int(problem.at_once[k])
        )
        once = rank.fit.optimizer_seconds or 0.0
        micro = best_size(cost_of(rank.fit), once, batch, at_once, repeats, unit)
    return PlanWorker(
        rank=k,
        name=rank.name,
        batch=batch,
        micro_batch=micro,
        accumulation=-(-batch // micro) if micro else 1,
        weight=batch / problem.global_batch,
        predicted_seconds=float(solution.step_seconds[k]),
        link_seconds=float(solution.link_seconds[k]),
        throttle=rank.profile.device.throttle,
        max_accumulation=rank.group.max_accumulation,
        required=rank.group.required,
        length_cost=rank.profile.lengths.cost if rank.profile.lengths else None,
        **_bounds(rank.group, rank.profile, rank.fit),
    )
