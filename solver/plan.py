"""From a cluster and its profiles to a plan: who computes how much, and what that is worth.

The even split beside the plan is the same batch for everyone, the first ranks taking what is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyps.formats import Cluster, CostEstimate, EvenSplit, Plan, PlanWorker, Profile, SyncEstimate
from pyps.solver.coupled import Coupled, Split, solve_coupled, valued
from pyps.solver.members import Member, coupled_of, members_of, needs
from pyps.solver.minmax import Problem
from pyps.solver.relaxed import subset_bound
from pyps.solver.schedule import hps_estimate, r2sp_schedule, transfer_seconds

FIT_ERROR_WORTH_A_WARNING = 0.05


def even_batches(global_batch: int, count: int) -> list[int]:
    """As equal as whole samples allow, the first ranks taking what is over."""
    return [global_batch // count + (k < global_batch % count) for k in range(count)]


def even_split(coupled: Coupled) -> tuple[EvenSplit, list[float]]:
    """Whether an even split keeps every bound, its iteration time, and each worker's compute seconds."""
    problem = coupled.problem
    batch = np.array(even_batches(problem.global_batch, len(problem.costs)), np.int64)
    cap = problem.costs.last_batch(problem.cap)
    within = (batch >= np.maximum(problem.low, 1)) & (batch <= cap) & (batch % problem.quantum == 0)
    split = valued(coupled, batch)
    kept = all(limit.need[batch > 0].sum() <= limit.at_most for limit in coupled.limits)
    if not (within.all() and kept):
        return EvenSplit(feasible=False), split.seconds.tolist()
    return EvenSplit(feasible=True, seconds=split.iteration_seconds), split.seconds.tolist()


def make_plan(cluster: Cluster, profiles: Sequence[Profile]) -> Plan:
    """The plan for a cluster, with one fitted profile a group. Raises Infeasible, InputError."""
    members, coupled = members_of(cluster, profiles), coupled_of(cluster, profiles)
    split = solve_coupled(coupled)
    return plan_of(cluster, members, coupled, split)


def plan_of(cluster: Cluster, members: Sequence[Member], coupled: Coupled, split: Split) -> Plan:
    """The plan that a split makes, with everything that follows from it."""
    problem = coupled.problem
    even, _ = even_split(coupled)
    workers = [_planned(rank, member, split, problem) for rank, member in enumerate(members)]
    used = [worker.rank for worker in workers if worker.batch]
    compute = [workers[rank].predicted_seconds for rank in used]
    transfers = [_transfer(members[rank]) for rank in used]
    r2sp = r2sp_schedule(used, compute, transfers)
    return Plan(
        global_batch=problem.global_batch,
        iteration_seconds=split.iteration_seconds,
        lower_bound_seconds=subset_bound(problem, coupled.sync, split.iteration_seconds),
        even_split=even,
        speedup_over_even=even.seconds / split.iteration_seconds if even.seconds else None,
        workers=workers,
        r2sp=r2sp,
        hps=hps_estimate(compute, transfers),
        warnings=[
            *_warnings(members, workers, coupled.loose),
            *_link_warning(r2sp.feasible, compute, transfers),
        ],
        sync=SyncEstimate(kind=coupled.sync.kind, seconds=split.sync_seconds) if cluster.sync else None,
        cost=cost_estimate(members, split),
    )


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
        fit_error=member.fit.leave_one_out_error,
        throttle=member.profile.device.throttle,
    )


def _transfer(member: Member) -> float | None:
    group = member.group
    return transfer_seconds(member.profile.model.parameters, group.bandwidth, group.latency)


def _warnings(members: Sequence[Member], workers: Sequence[PlanWorker], loose: bool) -> list[str]:
    """What a reader should know before trusting the plan; one line a group, not a rank."""
    lines: list[str] = []
    for member, worker in zip(members, workers, strict=True):
        fit, name, batch = member.fit, member.group.name, worker.batch
        low, high = fit.trusted_min_batch, fit.trusted_max_batch
        if batch and not low <= batch <= high:
            lines.append(f"{name}: batch {batch} is outside {low}..{high}, where its fit is trusted")
        if batch and (fit.leave_one_out_error or 0.0) > FIT_ERROR_WORTH_A_WARNING:
            lines.append(f"{name}: the fit misses left-out points by {fit.leave_one_out_error:.1%} (median)")
        if member.profile.device.emulated:
            lines.append(f"{name}: emulated, {member.profile.device.throttle:g} times slower by a throttle")
        if not batch:
            why = "the others finish sooner without it" if loose else "as the limits or the time ask"
            lines.append(f"{worker.name}: left out, {why}")
    models = {member.profile.model.name for member in members}
    if len(models) > 1:
        lines.append(f"the profiles are of different models: {', '.join(sorted(models))}")
    return list(dict.fromkeys(lines))


def _link_warning(
    feasible: bool | None, compute: Sequence[float], transfers: Sequence[float | None]
) -> list[str]:
    if feasible is not False:
        return []
    total = sum(x or 0.0 for x in transfers)
    alone = max(t + (x or 0.0) for t, x in zip(compute, transfers, strict=True))
    return [
        f"r2sp: transfers take {total:.4g} s of a {alone:.4g} s iteration: the link binds, not the workers"
    ]
