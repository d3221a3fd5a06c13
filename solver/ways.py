"""Changes with which a refused cluster has a plan, each tried before it is proposed; what memory is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as changed
from typing import Any

from msgspec.structs import replace

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Cluster, Profile, WorkerGroup, check_cluster
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.mode import Pace
from pyps.solver.constrained import ConstrainedProblem
from pyps.solver.jobs.job import best_for_job
from pyps.solver.local_steps import round_samples
from pyps.solver.problem import planning_problem, solve_within_limits
from pyps.solver.ranks import PlannedRank, max_batch_of, planned_ranks
from pyps.solver.report.warnings import cut_short
from pyps.solver.shards import GATHERED

GIB = 2**30
STEPS = 64  # of a GiB that may be proposed
MOST_GIB = 1024
MOST_DOUBLINGS = 8  # of micro-batches
MOST_GROUPS = 8  # of which more memory is tried
MAX_REPEATS = 1000  # micro-batches that may be proposed


HasPlan = Callable[..., bool]  # whether a cluster, and profiles in place of its own, has a plan


def ways_to_fit(
    cluster: Cluster, profiles: Sequence[Profile], pace: Pace, ranks: Sequence[PlannedRank], nearest: str
) -> str:
    """Return the changes of a refused cluster that each give it a plan; "" if none was found.

    ranks: its own. nearest: what the solver proposes, of bounds and the batch.
    """

    def fits(changed: Cluster, cards: Sequence[Profile] = profiles) -> bool:
        try:
            check_cluster(CLUSTER_FILE, changed)
            planned = planned_ranks(changed, cards)
            problem = planning_problem(changed, planned, pace)
            solve_within_limits(changed, planned, problem, name_least=False)
            if changed.job.is_bounded:
                best_for_job(changed, planned, problem)
        except (Infeasible, InputError):
            return False
        return True

    if cluster.sharding is not None:
        return _sharded(cluster, profiles, ranks, fits) or nearest
    ways = [nearest or " or ".join(_without_required(cluster, ranks, fits))]
    repeats = -(-round_samples(cluster) // max(sum(max_batch_of(r.group, r.profile) for r in ranks), 1))
    least = min(rank.group.max_accumulation for rank in ranks)
    if least < repeats <= MAX_REPEATS and fits(_accumulating(cluster, repeats)):
        ways.append(f"allow every worker max_accumulation = {repeats}")
    return ", or ".join(filter(None, ways)) + cut_short(round_samples(cluster), ranks)


def _accumulating(cluster: Cluster, parts: int) -> Cluster:
    """The cluster whose workers may all have so many micro-batches."""
    more = [replace(group, max_accumulation=max(group.max_accumulation, parts)) for group in cluster.worker]
    return replace(cluster, worker=more)


def _without_required(cluster: Cluster, ranks: Sequence[PlannedRank], fits: HasPlan) -> Iterator[str]:
    """The changes of the required groups with which there is a split."""
    for name, rank in {rank.group.name: rank for rank in ranks if rank.group.required}.items():
        parts = -(-(rank.group.min_batch or 1) // max(1, max_batch_of(rank.group, rank.profile)))
        changes: dict[str, dict[str, Any]] = {f"do not require {name!r}": {"required": False}}
        if rank.group.max_accumulation < parts <= MAX_REPEATS:
            raised = f"raise max_accumulation of {name!r} to {parts}"
            changes = {raised: {"max_accumulation": parts}} | changes
        for way, change in changes.items():
            groups = [replace(one, **change) if one.name == name else one for one in cluster.worker]
            if fits(replace(cluster, worker=groups)):
                yield way


def _sharded(
    cluster: Cluster, profiles: Sequence[Profile], ranks: Sequence[PlannedRank], fits: HasPlan
) -> str:
    """The smallest changes of a cluster with [sharding].

    Shares that follow the memory; the group whose cards need least more; micro-batches; the nearest global
    batch; a stage.
    """
    given = cluster.sharding
    assert given is not None

    def sharded(**changes: object) -> Cluster:
        return replace(cluster, sharding=replace(given, **changes))

    job = replace(cluster.job, deadline_hours=None, budget=None, confidence=None)
    if fits(replace(cluster, job=job)):
        return ""  # its memory is not why
    ways = []
    if given.shares == "equal" and fits(sharded(shares="memory")):
        ways.append('set sharding.shares to "memory"')
    ways += _more_memory(cluster, profiles, fits)
    most = max(group.max_accumulation for group in cluster.worker)
    doubled = (2**k for k in range(1, MOST_DOUBLINGS) if 2**k > most)
    parts = next((parts for parts in doubled if fits(_accumulating(cluster, parts))), None)
    ways += [] if parts is None else [f"allow every worker max_accumulation = {parts}"]
    if batch := _nearest_batch(cluster, ranks, fits):
        ways.append(f"set global_batch to {batch}")
    stages = (stage for stage in range(given.stage + 1, GATHERED + 1) if fits(sharded(stage=stage)))
    ways += [f"set sharding.stage to {stage}" for stage in stages][:1]
    return " or ".join(ways)


def _more_memory(cluster: Cluster, profiles: Sequence[Profile], fits: HasPlan) -> list[str]:
    """The group that fits with the least more memory on each card; all of them, if none does alone."""
    if any(profile.memory is None for profile in profiles):
        return []
    best, found = MOST_GIB * STEPS + 1, list[str]()
    alone = [(repr(group.name), [k]) for k, group in enumerate(cluster.worker)]
    for name, those in [*alone[:MOST_GROUPS], ("every card", [*range(len(alone))])]:

        def enough(steps: int, those: list[int] = those) -> bool:
            return fits(*with_memory(cluster, profiles, those, steps * GIB // STEPS))

        if not (found and len(those) == len(alone)) and (least := _least(enough, best)) is not None:
            best, found = least, [f"give {name} {least / STEPS:.6g} GiB more memory"]
    return found


def with_memory(
    cluster: Cluster, profiles: Sequence[Profile], those: Sequence[int], more: int
) -> tuple[Cluster, list[Profile]]:
    """The cluster and the profiles where each card of those groups has so many bytes more."""
    groups, cards = list(cluster.worker), list(profiles)
    for k in those:
        groups[k], cards[k] = _with_more(groups[k], cards[k], more)
    return replace(cluster, worker=groups), cards


def _with_more(group: WorkerGroup, profile: Profile, more: int) -> tuple[WorkerGroup, Profile]:
    memory = profile.memory
    assert memory is not None
    if group.free_bytes is not None:
        group = replace(group, free_bytes=group.free_bytes + more)
    room = profile.max_batch and profile.max_batch + int(more // memory.bytes_per_sample)
    memory = replace(memory, budget_bytes=memory.budget_bytes + more)
    return group, replace(profile, memory=memory, max_batch=room and min(MAX_BATCH, room))


def _least(fits: Callable[[int], bool], below: int) -> int | None:
    """The least number from 1 to below - 1 that fits, where all larger ones do; None if there is none."""
    low, high = 0, 1
    while high < below - 1 and not fits(high):
        low, high = high, min(2 * high, below - 1)
    if high >= below or not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _nearest_batch(cluster: Cluster, ranks: Sequence[PlannedRank], fits: HasPlan) -> int | None:
    """The largest smaller global batch that fits, or the least of all workers if that is larger."""

    def has(batch: int) -> bool:
        return fits(replace(cluster, job=replace(cluster.job, global_batch=batch)))

    multiples = [rank.group.batch_multiple for rank in ranks]
    step, total = math.gcd(*multiples), cluster.job.global_batch
    pairs = zip(ranks, multiples, strict=True)
    least = sum(-(-(rank.group.min_batch or 1) // multiple) * multiple for rank, multiple in pairs)
    if least > MAX_BATCH or not has(least):
        return None
    if least >= total:
        return least
    low, high = least // step, -(-total // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has(middle * step) else (low, middle)
    return max(least, low * step)


def worth_of_memory(
    cluster: Cluster, ranks: Sequence[PlannedRank], constrained: ConstrainedProblem
) -> dict[str, float]:
    """The seconds of an iteration that one GiB more on each card of a group saves, by the group's name.

    cluster, ranks, constrained: a sharded model as planned. Under "" those that a GiB more for all cards
    together saves, where no card's own batch may grow and batches are computed at once.
    """

    def seconds(more: Sequence[PlannedRank]) -> float:
        problem = planning_problem(cluster, more, constrained.pace)
        return solve_within_limits(cluster, more, problem).iteration_seconds

    before, found, pool = seconds(ranks), dict[str, float](), constrained.problem.pool
    if pool is not None:
        problem = changed(constrained.problem, pool=changed(pool, at_most=pool.at_most + GIB))
        after = solve_within_limits(cluster, ranks, changed(constrained, problem=problem))
        found[""] = before - after.iteration_seconds
    for name in list(dict.fromkeys(rank.group.name for rank in ranks))[:MOST_GROUPS]:
        more = [_roomier(rank, GIB) if rank.group.name == name else rank for rank in ranks]
        found[name] = before - seconds(more)
    return found


def _roomier(rank: PlannedRank, more: int) -> PlannedRank:
    """A rank that is no node, on a card with so many bytes more."""
    group, profile = _with_more(rank.group, rank.profile, more)
    return changed(rank, group=group, profile=profile, one=(group, profile))
