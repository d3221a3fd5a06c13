"""Changes with which a sharded model fits, each planned with before it is proposed; what memory is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Cluster, Profile, check_cluster
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.mode import Pace
from pyps.solver.constrained import ConstrainedProblem
from pyps.solver.milp.constrained import solve_constrained
from pyps.solver.problem import planning_problem, solve_within_limits
from pyps.solver.ranks import PlannedRank, planned_ranks
from pyps.solver.shards import GATHERED

GIB = 2**30
STEPS = 64  # of a GiB that may be proposed
MOST_GIB = 1024
MOST_GROUPS = 8  # of which more memory is tried


def ways_to_fit(cluster: Cluster, profiles: Sequence[Profile], pace: Pace) -> str:
    """The smallest changes of a refused cluster with [sharding] that each make it fit; "" if none was found.

    Shares that follow the memory; the group whose cards need least more; the nearest global batch; a stage.
    """
    given, ranks = cluster.sharding, planned_ranks(cluster, profiles)
    assert given is not None

    def fits(changed: Cluster, cards: Sequence[Profile] = profiles) -> bool:
        try:
            check_cluster(CLUSTER_FILE, changed)
            planned = planned_ranks(changed, cards)
            solve_within_limits(changed, planned, planning_problem(changed, planned, pace), name_least=False)
        except (Infeasible, InputError):
            return False
        return True

    def sharded(**changes: object) -> Cluster:
        return msgspec.structs.replace(cluster, sharding=msgspec.structs.replace(given, **changes))

    ways = []
    if given.shares == "equal" and fits(sharded(shares="memory")):
        ways.append('set sharding.shares to "memory"')
    ways += _more_memory(cluster, profiles, fits)
    if batch := _nearest_batch(cluster, ranks, fits):
        ways.append(f"set global_batch to {batch}")
    stages = (stage for stage in range(given.stage + 1, GATHERED + 1) if fits(sharded(stage=stage)))
    ways += [f"set sharding.stage to {stage}" for stage in stages][:1]
    return " or ".join(ways)


def _more_memory(
    cluster: Cluster, profiles: Sequence[Profile], fits: Callable[[Cluster, Sequence[Profile]], bool]
) -> list[str]:
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
        group, profile, memory = groups[k], cards[k], cards[k].memory
        assert memory is not None
        if group.free_bytes is not None:
            groups[k] = msgspec.structs.replace(group, free_bytes=group.free_bytes + more)
        room = profile.max_batch and profile.max_batch + int(more // memory.bytes_per_sample)
        memory = msgspec.structs.replace(memory, budget_bytes=memory.budget_bytes + more)
        cards[k] = msgspec.structs.replace(profile, memory=memory, max_batch=room and min(MAX_BATCH, room))
    return msgspec.structs.replace(cluster, worker=groups), cards


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


def _nearest_batch(
    cluster: Cluster, ranks: Sequence[PlannedRank], fits: Callable[[Cluster], bool]
) -> int | None:
    """The largest smaller global batch that fits, or the least of all workers if that is larger."""

    def has(batch: int) -> bool:
        job = msgspec.structs.replace(cluster.job, global_batch=batch)
        return fits(msgspec.structs.replace(cluster, job=job))

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


def worth_of_memory(ranks: Sequence[PlannedRank], constrained: ConstrainedProblem) -> dict[str, float]:
    """The seconds of an iteration that one GiB more on each card of a group saves, by the group's name.

    Under "" those that as much more for all together saves, where no card's own batch may grow.
    """
    before, found = solve_constrained(constrained).iteration_seconds, dict[str, float]()
    problem, cards = constrained.problem, [rank.card for rank in ranks]
    each = np.array([math.inf if card is None else card.memory.bytes_per_sample for card in cards])
    names = np.array([rank.group.name for rank in ranks])
    for name in ["", *dict.fromkeys(names.tolist())][: MOST_GROUPS + 1]:
        mine = names == name
        more = (
            np.where(mine, GIB // each, 0).astype(np.int64) // problem.batch_multiple * problem.batch_multiple
        )
        pool = problem.pool
        if pool is not None:
            pool = replace(pool, at_most=pool.at_most + GIB * max(1, int(mine.sum())))
        roomier = replace(problem, max_batch=np.minimum(problem.max_batch + more, MAX_BATCH), pool=pool)
        after = solve_constrained(replace(constrained, problem=roomier)).iteration_seconds
        found[name] = before - after
    return found
