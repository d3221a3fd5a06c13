"""From a cluster and its profiles to a plan: who computes how much, and what that is worth.

A worker's cap is the least of what the cluster file, the profile and its memory model allow. The even split
beside the plan is the same batch for everyone, the first ranks taking what is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Cluster, EvenSplit, Fit, Plan, PlanWorker, Profile, WorkerGroup
from pyps.solver.costs import Cost, Costs, Line, Table
from pyps.solver.minmax import Problem, Solution, solve, times
from pyps.solver.relaxed import relaxed_seconds
from pyps.solver.schedule import hps_estimate, r2sp_schedule, transfer_seconds

FIT_ERROR_WORTH_A_WARNING = 0.05


@dataclass(frozen=True)
class Member:
    """One rank: its group in the cluster file, its profile, and the fit in that profile."""

    name: str
    group: WorkerGroup
    profile: Profile
    fit: Fit


def members_of(cluster: Cluster, profiles: Sequence[Profile]) -> list[Member]:
    """The ranks in file order; profiles has one entry a group. Raises InputError where a fit is missing."""
    members = []
    for group, profile in zip(cluster.worker, profiles, strict=True):
        if profile.fit is None:
            raise InputError(group.profile, "fit", "nothing", "a fitted cost model")
        members += [Member(name, group, profile, profile.fit) for name in group.worker_names()]
    return members


def cost_of(fit: Fit) -> Cost:
    """The cost model that a fit describes."""
    if fit.kind in ("convex", "table"):
        return Table(tuple(fit.table or ()))
    return Line(fit.fixed_seconds, fit.per_sample_seconds, fit.floor_seconds if fit.kind == "knee" else 0.0)


def cap_of(group: WorkerGroup, profile: Profile) -> int:
    """The largest batch that the cluster file, the profile and the memory model all allow; 0 if none."""
    caps = [cap for cap in (group.max_batch, profile.max_batch) if cap is not None]
    if memory := profile.memory:
        caps.append(max(0, int((memory.budget_bytes - memory.fixed_bytes) // memory.bytes_per_sample)))
    return min([MAX_BATCH, *caps])


def problem_of(cluster: Cluster, profiles: Sequence[Profile]) -> Problem:
    """The integer program of a cluster. Raises Infeasible naming a required worker that can take no batch."""
    members = members_of(cluster, profiles)
    for k, (group, profile) in enumerate(zip(cluster.worker, profiles, strict=True)):
        cap, quantum = cap_of(group, profile), group.quantum
        least = -(-(group.min_batch or 1) // quantum) * quantum
        if group.required and cap // quantum * quantum < least:
            raise Infeasible(
                f"worker[{k}] {group.name!r} is required, but its batch must be at least {least} "
                f"and at most {cap} in steps of {quantum}",
                "lower min_batch or quantum, raise max_batch, or do not require it",
            )
    return Problem.of(
        Costs.stack([cost_of(member.fit) for member in members]),
        cluster.job.global_batch,
        low=[member.group.min_batch or 1 for member in members],
        cap=[cap_of(member.group, member.profile) for member in members],
        quantum=[member.group.quantum for member in members],
        required=[member.group.required for member in members],
    )


def even_batches(global_batch: int, count: int) -> list[int]:
    """As equal as whole samples allow, the first ranks taking what is over."""
    return [global_batch // count + (k < global_batch % count) for k in range(count)]


def even_split(problem: Problem) -> tuple[EvenSplit, list[float]]:
    """Whether an even split keeps every bound, its iteration time, and each worker's seconds."""
    batch = np.array(even_batches(problem.global_batch, len(problem.costs)), np.int64)
    cap = problem.costs.last_batch(problem.cap)
    within = (batch >= np.maximum(problem.low, 1)) & (batch <= cap) & (batch % problem.quantum == 0)
    seconds = times(problem.costs, batch)
    if not within.all():
        return EvenSplit(feasible=False), seconds.tolist()
    return EvenSplit(feasible=True, seconds=float(seconds.max())), seconds.tolist()


def make_plan(cluster: Cluster, profiles: Sequence[Profile]) -> Plan:
    """The plan for a cluster, with one fitted profile a group. Raises Infeasible, InputError."""
    members, problem = members_of(cluster, profiles), problem_of(cluster, profiles)
    solution = solve(problem)
    even, _ = even_split(problem)
    workers = [_planned(rank, member, solution, problem) for rank, member in enumerate(members)]
    used = [worker.rank for worker in workers if worker.batch]
    compute = [workers[rank].predicted_seconds for rank in used]
    transfers = [_transfer(members[rank]) for rank in used]
    r2sp = r2sp_schedule(used, compute, transfers)
    return Plan(
        global_batch=problem.global_batch,
        iteration_seconds=solution.iteration_seconds,
        lower_bound_seconds=relaxed_seconds(problem, solution.iteration_seconds),
        even_split=even,
        speedup_over_even=even.seconds / solution.iteration_seconds if even.seconds else None,
        workers=workers,
        r2sp=r2sp,
        hps=hps_estimate(compute, transfers),
        warnings=[*_warnings(members, workers), *_link_warning(r2sp.feasible, compute, transfers)],
    )


def _planned(rank: int, member: Member, solution: Solution, problem: Problem) -> PlanWorker:
    batch = int(solution.batches[rank])
    return PlanWorker(
        rank=rank,
        name=member.name,
        batch=batch,
        micro_batch=batch,
        accumulation=1,
        weight=batch / problem.global_batch,
        predicted_seconds=float(solution.seconds[rank]),
        fit_error=member.fit.leave_one_out_error,
        throttle=member.profile.device.throttle,
    )


def _transfer(member: Member) -> float | None:
    group = member.group
    return transfer_seconds(member.profile.model.parameters, group.bandwidth, group.latency)


def _warnings(members: Sequence[Member], workers: Sequence[PlanWorker]) -> list[str]:
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
            lines.append(f"{worker.name}: left out, the others finish sooner without it")
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
