"""From a cluster and its profiles to a plan: who computes how much, and what that is worth.

The even split beside the plan is the same batch for everyone, the first ranks taking what is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import (
    MAX_BATCH,
    Cluster,
    CostEstimate,
    EvenSplit,
    GoodputInfo,
    NoiseForecast,
    Plan,
    PlanWorker,
    Profile,
    R2spSchedule,
    SyncEstimate,
)
from pyps.solver.exact.minmax import Problem, at_index, solve
from pyps.solver.links import Link
from pyps.solver.milp.constrained import Coupled, Split, solve_coupled, valued
from pyps.solver.milp.pareto import PRICE, within_budget
from pyps.solver.milp.relaxed import subset_bound
from pyps.solver.noise import Noise, forecast, noise_of, too_few
from pyps.solver.ranks import Member, cap_of, cost_of, coupled_of, members_of, needs
from pyps.solver.report.warnings import link_warnings, warnings_of
from pyps.solver.systems.goodput import Worth, best_batch
from pyps.solver.systems.hps import hps_estimate
from pyps.solver.systems.r2sp import r2sp_schedule, remedies

MAX_REPEATS = 1000  # micro-batches that may be proposed


def even_batches(global_batch: int, count: int) -> list[int]:
    """As equal as whole samples allow, the first ranks taking what is over."""
    return [global_batch // count + (k < global_batch % count) for k in range(count)]


def even_split(coupled: Coupled) -> tuple[EvenSplit, list[float]]:
    """Whether an even split keeps every bound, its iteration time, and each worker's seconds."""
    problem = coupled.problem
    batch = np.array(even_batches(problem.global_batch, len(problem.costs)), np.int64)
    cap = problem.costs.last_batch(problem.cap)
    within = (batch >= np.maximum(problem.low, 1)) & (batch <= cap) & (batch % problem.quantum == 0)
    split = valued(coupled, batch)
    seconds = (split.seconds + split.link_seconds).tolist()
    kept = all(limit.need[batch > 0].sum() <= limit.at_most for limit in coupled.limits)
    if not (within.all() and kept):
        return EvenSplit(feasible=False), seconds
    return EvenSplit(feasible=True, seconds=split.iteration_seconds), seconds


def make_plan(cluster: Cluster, profiles: Sequence[Profile]) -> Plan:
    """The plan for a cluster, with one fitted profile a group. Raises Infeasible, InputError, PypsError.

    Where the job names a quantile, all times are those of this quantile, and `noise` has the fitted ones.
    """
    members, program = members_of(cluster, profiles), program_for(cluster, profiles)
    try:
        split = solved(cluster, members, program)
    except Infeasible as error:
        raise Infeasible(error.reason, _with_micro_batches(cluster, profiles, error.nearest)) from None
    made = plan_of(cluster, members, program, split)
    quantile = cluster.job.quantile
    if quantile is None:
        return made
    fitted, noise = coupled_of(cluster, profiles), _noise(members)
    nominal, robust = (
        forecast(fitted, program, batches, noise)
        for batches in (solved(cluster, members, fitted).batches, split.batches)
    )
    quiet = [
        f"{m.group.name}: too few timings to know its noise" for m in members if too_few(m.profile.points)
    ]
    return msgspec.structs.replace(
        made,
        warnings=made.warnings + list(dict.fromkeys(quiet)),
        noise=NoiseForecast(quantile=quantile, nominal=nominal, robust=robust),
    )


def _with_micro_batches(cluster: Cluster, profiles: Sequence[Profile], nearest: str) -> str:
    """The way out that a refusal names, and how many micro-batches for everyone would be one as well."""
    caps = [cap_of(group, p) * group.count for group, p in zip(cluster.worker, profiles, strict=True)]
    repeats = -(-cluster.job.global_batch // max(sum(caps), 1))
    groups = [
        msgspec.structs.replace(group, max_accumulation=max(group.max_accumulation, repeats))
        for group in cluster.worker
    ]
    if groups == cluster.worker or repeats > MAX_REPEATS:
        return nearest
    wide = msgspec.structs.replace(cluster, worker=groups)
    try:
        solved(wide, members_of(wide, profiles), program_for(wide, profiles))
    except Infeasible:
        return nearest
    return f"{nearest}, or allow every worker max_accumulation = {repeats}"


def solved(cluster: Cluster, members: Sequence[Member], program: Coupled) -> Split:
    """The fastest split within every limit, that on the price of samples included. Raises Infeasible."""
    budget, price = cluster.limits.price_per_million_samples, needs(members, PRICE)
    if budget is None or price is None:
        return solve_coupled(program)
    return within_budget(program, price, budget)


def program_for(cluster: Cluster, profiles: Sequence[Profile]) -> Coupled:
    """The program that a cluster's plan solves: by the fitted times, or by the job's quantile of them."""
    quantile = cluster.job.quantile
    if quantile is None:
        return coupled_of(cluster, profiles)
    factors = [one.factor(quantile) for one in _noise(members_of(cluster, profiles))]
    return coupled_of(cluster, profiles, factors)


def _noise(members: Sequence[Member]) -> list[Noise]:
    cache: dict[int, Noise] = {}
    for member in members:
        if id(member.profile) not in cache:
            cache[id(member.profile)] = noise_of(member.profile.points, cost_of(member.fit))
    return [cache[id(member.profile)] for member in members]


def best_global_batch(cluster: Cluster, profiles: Sequence[Profile]) -> int:
    """The global batch of highest goodput, by the cluster's noise scale. Raises InputError without one."""
    info, members = _goodput_info(cluster), members_of(cluster, profiles)
    worth, most = Worth(info.noise_scale, info.base_batch), info.max_batch or MAX_BATCH
    within_limits = partial(solved, cluster, members)
    return best_batch(program_for(cluster, profiles), worth, most, within_limits)[0]


def _goodput_info(cluster: Cluster) -> GoodputInfo:
    if cluster.goodput is None:
        raise InputError("the cluster file", "goodput", "nothing", "noise_scale and base_batch, in samples")
    return cluster.goodput


def plan_of(cluster: Cluster, members: Sequence[Member], coupled: Coupled, split: Split) -> Plan:
    """The plan that a split makes, with everything that follows from it."""
    problem, worth = coupled.problem, cluster.goodput
    even, _ = even_split(coupled)
    workers = [_planned(rank, member, split, problem) for rank, member in enumerate(members)]
    used = [worker.rank for worker in workers if worker.batch]
    compute = [float(split.seconds[rank]) for rank in used]
    links = [members[rank].link for rank in used]
    r2sp = _turns(coupled, members, used, compute)
    goodput = Worth(worth.noise_scale, worth.base_batch) if worth else None
    return Plan(
        global_batch=problem.global_batch,
        iteration_seconds=split.iteration_seconds,
        lower_bound_seconds=subset_bound(problem, coupled.sync, split.iteration_seconds),
        even_split=even,
        speedup_over_even=even.seconds / split.iteration_seconds if even.seconds else None,
        workers=workers,
        r2sp=r2sp,
        hps=hps_estimate(used, compute, links, cluster.quantization.error_budget),
        warnings=warnings_of(members, workers, coupled.loose) + link_warnings(r2sp, compute, links),
        sync=SyncEstimate(kind=coupled.sync.kind, seconds=split.sync_seconds) if cluster.sync else None,
        cost=cost_estimate(members, split),
        goodput=goodput.estimate(problem.global_batch, split.iteration_seconds) if goodput else None,
    )


def _turns(
    coupled: Coupled, members: Sequence[Member], used: Sequence[int], compute: Sequence[float]
) -> R2spSchedule:
    """The ring, and where it does not fit, what would make it fit."""
    links = [members[rank].link for rank in used]
    ring = r2sp_schedule(used, compute, links)
    known = [link for link in links if link is not None]
    if ring.feasible is not False:
        return ring

    same = at_index(coupled.problem, np.array(used))

    def at(batch: int) -> tuple[list[float], list[Link]] | None:
        try:
            split = solve(replace(same, global_batch=batch))
        except Infeasible:
            return None
        kept = np.flatnonzero(split.batches > 0).tolist()
        computing = same.costs.take(np.array(kept)).compute(split.batches[kept])
        return computing.tolist(), [known[k] for k in kept]

    found = remedies(compute, known, coupled.problem.global_batch, at)
    return msgspec.structs.replace(ring, remedies=found)


def cost_estimate(members: Sequence[Member], split: Split) -> CostEstimate | None:
    """Price and power of the workers in use; None where the cluster file states neither for all."""
    used = split.batches > 0
    price, watts = needs(members, "price_per_hour"), needs(members, "watts")
    if price is None and watts is None:
        return None
    hourly = None if price is None else float(price[used].sum())
    samples_per_hour = 3600 * int(split.batches.sum()) / split.iteration_seconds
    return CostEstimate(
        price_per_hour=hourly,
        price_per_million_samples=None if hourly is None else 1e6 * hourly / samples_per_hour,
        watts=None if watts is None else float(watts[used].sum()),
    )


def _planned(rank: int, member: Member, split: Split, problem: Problem) -> PlanWorker:
    batch = int(split.batches[rank])
    micro = batch if problem.costs.micro is None else min(batch, int(problem.costs.micro[rank]))
    return PlanWorker(
        rank=rank,
        name=member.name,
        batch=batch,
        micro_batch=micro,
        accumulation=-(-batch // micro) if micro else 1,
        weight=batch / problem.global_batch,
        predicted_seconds=float(split.seconds[rank] + split.link_seconds[rank]),
        link_seconds=float(split.link_seconds[rank]),
        fit_error=member.fit.leave_one_out_error,
        throttle=member.profile.device.throttle,
        max_batch=min(cap_of(member.group, member.profile), MAX_BATCH) or None,
        max_accumulation=member.group.max_accumulation,
        fit=msgspec.structs.replace(member.fit, band=None),
        memory=member.profile.memory,
    )
