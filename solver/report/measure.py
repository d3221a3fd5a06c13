"""Which sizes to measure next: those whose uncertainty may move the plan.

A device may be as fast as its band says between two measured batches, but not faster than at the smaller of
the two: more samples never take less time. The plan is made once more with such optimistic curves. If
its iteration is shorter by more than WORTH, another split may win that much, and the unmeasured sizes that it
relies on are named. If not, no split wins more than WORTH, as far as the bands hold.

Devices that are fast only at multiples of 8, 16 or 32 show it at sizes off these. If none has been measured,
one is named; if they take longer, `batch_multiple` is proposed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from pyps.formats import Cluster, Pace, Plan, Profile
from pyps.profiler.curve import on_one_grid
from pyps.profiler.multiples import LEAST, MULTIPLES, at_multiple, shown_multiple
from pyps.solver.costs import cost_of
from pyps.solver.plan import make_plan
from pyps.solver.ranks import multiples_of
from pyps.solver.units import sample_multiple, units_each

WORTH = 0.01  # of the iteration
NEAR = WORTH / 2  # relative: a size this close to a measured one says nothing new
UNKNOWN = 2.0  # how far a curve through two batches may be off
MOST_LOOKS = 16  # rounds of measuring: a curve that needs more changes while it is measured
BETWEEN = 8  # knots between two measured batches


@dataclass(frozen=True)
class NextSize:
    """A size to measure on a group's device, and why."""

    group: str
    profile: str
    batch: int
    why: str


@dataclass(frozen=True)
class NextSizes:
    """may_win: the largest share of the iteration that another split may save. multiples: the batch_multiple
    that a group's device shows.
    """

    may_win: float
    sizes: list[NextSize]
    multiples: dict[str, int]


def next_sizes(cluster: Cluster, profiles: Sequence[Profile], pace: Pace | None = None) -> NextSizes:
    """Return what to measure next for a cluster's plan. profiles: one with a fit for each of its groups.

    Raises as make_plan.
    """
    plan, all_measured = make_plan(cluster, profiles, pace), profiles
    kept = multiples_of(cluster, profiles)
    profiles = [at_multiple(profile, each) for profile, each in zip(profiles, kept, strict=True)]
    hopeful = [_optimistic(profile) for profile in profiles]
    best = make_plan(cluster, hopeful, pace, kept)
    before = _planned_seconds(cluster, plan)
    may_win = 1 - _planned_seconds(cluster, best) / before
    found: list[NextSize] = []
    if may_win > WORTH:
        for k in range(len(profiles)):
            alone = [*profiles[:k], hopeful[k], *profiles[k + 1 :]]
            wins = 1 - _planned_seconds(cluster, make_plan(cluster, alone, pace, kept)) / before
            found += _unmeasured(cluster, profiles[k], k, (best, plan), f"may save {wins:.1%}")
    multiples = {}
    for group, profile in zip(cluster.worker, all_measured, strict=True):
        shown = shown_multiple(profile)
        if shown is not None and sample_multiple(cluster, group, profile) % shown:
            multiples[group.name] = shown * units_each(cluster, profile)
    found += _off_multiples(cluster, all_measured, plan)
    return NextSizes(may_win, found, multiples)


def _planned_seconds(cluster: Cluster, plan: Plan) -> float:
    """The seconds that a plan minimises: without a ring that follows from the shares of a state."""
    by_memory = cluster.sharding is not None and cluster.sharding.shares == "memory"
    return plan.iteration_seconds - (plan.sync.seconds if by_memory and plan.sync is not None else 0.0)


def measured_for(
    cluster: Cluster,
    profiles: Sequence[Profile],
    path: str,
    measure: Callable[[Profile, list[int]], Profile],
    pace: Pace | None = None,
) -> tuple[list[Profile], NextSizes]:
    """Measure a device at the sizes that may move a cluster's plan, until none of its is named any more: then
    no split can win more than WORTH, or other devices have to be measured.

    cluster, profiles, pace: as in next_sizes. path: the profile in the cluster that is the device's. measure:
    returns a profile with more sizes. Returns the profiles, and what is left to measure. Raises as make_plan.
    """
    known = list(profiles)
    for _ in range(MOST_LOOKS):
        found = next_sizes(cluster, known, pace)
        sizes = sorted({one.batch for one in found.sizes if one.profile == path})
        if not sizes:
            break
        mine = next(p for group, p in zip(cluster.worker, known, strict=True) if group.profile == path)
        more = measure(mine, sizes)
        pairs = zip(cluster.worker, known, strict=True)
        known = [more if group.profile == path else profile for group, profile in pairs]
    return known, next_sizes(cluster, known, pace)


def _optimistic(profile: Profile) -> Profile:
    """The profile with the fastest curve that its band allows."""
    fit = profile.fit
    if fit is None:
        return profile
    cost, measured = cost_of(fit), sorted({point.batch for point in profile.points})
    sizes, lows = [b for b, _, _ in fit.band or []], [low for _, low, _ in fit.band or []]
    last = measured[-1] if profile.max_batch is None else max(profile.max_batch, measured[-1])
    ends = [*([1] if measured[0] > 1 else []), *measured, *([last] if last > measured[-1] else [])]
    if len(ends) == 1:  # batch 1 alone was measured
        return profile
    knots: dict[int, float] = {}
    for a, b in itertools.pairwise(ends):
        for batch in np.unique(np.geomspace(a, b, BETWEEN + 2).round()).astype(int).tolist():
            off = UNKNOWN
            if sizes:  # beyond the band as at its end
                at = min(max(batch, sizes[0]), sizes[-1])
                off = max(1.0, cost.seconds(at) / float(np.interp(at, sizes, lows)))
            knots[batch] = _least(cost.seconds(batch), off, batch, a, b, measured)
            if batch > measured[0]:
                before = max(one for one in measured if one < batch)
                knots[batch] = max(knots[batch], min(cost.seconds(before), cost.seconds(batch)))
    batches = sorted(knots)
    rising = np.maximum.accumulate([knots[batch] for batch in batches])
    table = list(zip(batches, map(float, rising), strict=True))
    return msgspec.structs.replace(
        profile, fit=msgspec.structs.replace(fit, kind="table", table=table, per_sample_seconds=fit.end_slope)
    )


def _least(seconds: float, off: float, batch: int, a: int, b: int, measured: Sequence[int]) -> float:
    """The least seconds of a batch between two knots, of which those measured are certain."""
    part = math.log(batch / a) / math.log(b / a)
    if a in measured and b in measured:
        share = 2 * math.sqrt(part * (1 - part))
    else:
        share = part if a in measured else 1 - part
    return float(seconds / off**share)


def _unmeasured(
    cluster: Cluster, profile: Profile, k: int, plans: Sequence[Plan], why: str
) -> Iterator[NextSize]:
    """The sizes of these plans that a group's device has not been measured at."""
    group = cluster.worker[k]
    measured = [point.batch for point in profile.points]
    named: set[int] = set()
    for plan in plans:
        for worker in plan.workers:
            size = worker.micro_batch // units_each(cluster, profile)
            size = min(size, profile.max_batch or size)  # a shard has room for more than the whole model
            known = any(abs(size / one - 1) <= NEAR for one in [*measured, *named])
            if worker.name in group.worker_names() and size and not known:
                named.add(size)
                yield NextSize(group.name, group.profile, size, why)


def _off_multiples(cluster: Cluster, profiles: Sequence[Profile], plan: Plan) -> Iterator[NextSize]:
    """A size near the plan's of each device that was measured at powers of two or multiples of 8 alone, or of
    which those measured do not tell 8 from 16, or 16 from 32.
    """
    pairs = zip(cluster.worker, profiles, strict=True)
    multiple_of = {group.name: sample_multiple(cluster, group, profile) for group, profile in pairs}
    for group, profile in zip(cluster.worker, profiles, strict=True):
        large = [point.batch for point in profile.points if point.batch >= 2 * LEAST]
        if not large:
            continue
        every, shown = all(batch % LEAST == 0 for batch in large), shown_multiple(profile)
        each, names = units_each(cluster, profile), group.worker_names()
        sizes = [w.micro_batch // each for w in plan.workers if w.name in names and w.micro_batch]
        near = min(large, key=lambda batch: abs(batch - (sizes[0] if sizes else large[-1])))
        between = near * 3 // 2
        measured = [point.batch for point in profile.points]
        if on_one_grid(measured) and between < max(measured) and not between % multiple_of[group.name]:
            why = "all sizes measured are powers of two: steps between them are not seen"
            yield NextSize(group.name, group.profile, between, why)
        if every and multiple_of[group.name] == 1:
            yield NextSize(
                group.name, group.profile, near - 1, f"all sizes measured are multiples of {LEAST}"
            )
        elif shown is not None and shown < MULTIPLES[0]:
            on = [batch for batch in large if batch % shown == 0]
            if all(batch % (2 * shown) == 0 for batch in on):
                size = near // (2 * shown) * 2 * shown - shown
                why = f"it tells multiples of {shown} from those of {2 * shown}"
                if size >= shown:
                    yield NextSize(group.name, group.profile, size, why)
