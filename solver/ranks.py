"""Turns a cluster file and its profiles into the ranks to plan, and these into the arrays of the solvers.

A rank's largest batch is the least that the cluster file, the profile and its memory model allow, times the
micro-batches that it may accumulate. Its time is the fitted one plus, if its link is known, a push and a
pull. With [sync] or [[shared]] the transfers are counted there instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Cluster, Fit, Profile, WorkerGroup
from pyps.solver.costs import Cost, Costs, Floats, Line, Table
from pyps.solver.exact.minmax import Problem
from pyps.solver.links import BYTES_PER_PARAMETER, LinkCost, link_cost
from pyps.solver.milp.constrained import ConstrainedProblem, Limit, Resource
from pyps.solver.sync import Sync


@dataclass(frozen=True)
class PlannedRank:
    """A rank to plan: its name, its group in the cluster file, its profile, and the fit in that profile."""

    name: str
    group: WorkerGroup
    profile: Profile
    fit: Fit

    @property
    def link(self) -> LinkCost | None:
        """The cost of its link to the store; None if the bandwidth or the model's size is unknown."""
        return link_cost(self.profile.model.parameters, self.bandwidth, self.latency)

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second: from the cluster file, else as measured in the profile."""
        measured = self.profile.link.bytes_per_second if self.profile.link else None
        return measured if self.group.bandwidth is None else self.group.bandwidth

    @property
    def latency(self) -> float | None:
        """Seconds: from the cluster file, else as measured in the profile."""
        measured = self.profile.link.latency_seconds if self.profile.link else None
        return measured if self.group.latency is None else self.group.latency


def planned_ranks(cluster: Cluster, profiles: Sequence[Profile]) -> list[PlannedRank]:
    """The ranks of a cluster in file order. profiles: one a group. Raises InputError if a fit is missing."""
    ranks = []
    for group, profile in zip(cluster.worker, profiles, strict=True):
        if profile.fit is None:
            raise InputError(group.profile, "fit", "nothing", "a fitted cost model")
        ranks += [PlannedRank(name, group, profile, profile.fit) for name in group.worker_names()]
    return ranks


def cost_of(fit: Fit, factor: float = 1.0) -> Cost:
    """The cost model of a fit, with every time multiplied by `factor`."""
    if fit.kind in ("convex", "table"):
        knots = list(fit.table or ()) + (_continued(fit) if fit.kind == "convex" else [])
        return Table(tuple((batch, factor * seconds) for batch, seconds in knots))
    floor = fit.floor_seconds if fit.kind == "knee" else 0.0
    return Line(factor * fit.fixed_seconds, factor * fit.per_sample_seconds, factor * floor)


def _continued(fit: Fit) -> list[tuple[int, float]]:
    """The knot that continues a convex polygon at its last slope, up to the largest possible batch."""
    table = fit.table or []
    if len(table) < 2 or table[-1][0] == MAX_BATCH:
        return []
    (b0, s0), (b1, s1) = table[-2:]
    return [(MAX_BATCH, s1 + (s1 - s0) / (b1 - b0) * (MAX_BATCH - b1))]


def max_batch_of(group: WorkerGroup, profile: Profile) -> int:
    """The most samples at once that the cluster file, the profile and the memory model all allow; 0 if none.

    In the memory model b samples take fixed + per sample * b bytes of the budget, or of the group's
    free_bytes. Raises InputError if the group states free_bytes and the profile has no memory model.
    """
    limits = [limit for limit in (group.max_batch, profile.max_batch) if limit is not None]
    if memory := profile.memory:
        budget = memory.budget_bytes if group.free_bytes is None else group.free_bytes
        limits.append(max(0, int((budget - memory.fixed_bytes) // memory.bytes_per_sample)))
    elif group.free_bytes is not None:
        raise InputError(
            group.profile, "memory", "nothing", f"a memory model, as {group.name!r} has free_bytes"
        )
    return min([MAX_BATCH, *limits])


def problem_of(cluster: Cluster, ranks: Sequence[PlannedRank], factors: Sequence[float] = ()) -> Problem:
    """The min-max problem of a cluster's ranks. factors: multiply the times, one entry a rank.

    Raises Infeasible naming a required worker that can take no batch.
    """
    _check_required(cluster, ranks)
    factors = factors or [1.0] * len(ranks)
    costs = Costs.stack([cost_of(rank.fit, f) for rank, f in zip(ranks, factors, strict=True)])
    at_once = np.array([max_batch_of(rank.group, rank.profile) for rank in ranks], np.int64)
    repeats = np.array([rank.group.max_accumulation for rank in ranks], np.int64)
    most = at_once
    if (repeats > 1).any():
        costs = costs.accumulated(np.maximum(at_once, 1))
        micro = at_once if costs.micro is None else np.minimum(costs.micro, at_once)
        most = np.minimum(micro * repeats, MAX_BATCH)
    return Problem.of(
        replace(costs, transfer=_transfers(cluster, ranks)),
        cluster.job.global_batch,
        min_batch=[rank.group.min_batch or 1 for rank in ranks],
        max_batch=most,
        batch_multiple=[rank.group.batch_multiple for rank in ranks],
        required=[rank.group.required for rank in ranks],
    )


def _transfers(cluster: Cluster, ranks: Sequence[PlannedRank]) -> Floats | None:
    """Seconds of each rank's push and pull over its own link; None if there is nothing to add."""
    if cluster.sync is not None:
        return None
    shared = {one.name for one in cluster.shared if one.bandwidth is not None}
    own = [None if shared & set(rank.group.shares) else rank.link for rank in ranks]
    return np.array([link.seconds() if link else 0.0 for link in own]) if any(own) else None


def _check_required(cluster: Cluster, ranks: Sequence[PlannedRank]) -> None:
    profiles = {rank.group.name: rank.profile for rank in ranks}
    for k, group in enumerate(cluster.worker):
        at_once, multiple = max_batch_of(group, profiles[group.name]), group.batch_multiple
        most, least = at_once * group.max_accumulation, -(-(group.min_batch or 1) // multiple) * multiple
        if group.required and most // multiple * multiple < least:
            raise Infeasible(
                f"worker[{k}] {group.name!r} is required, but its batch must be at least {least} "
                f"and at most {most} in steps of {multiple}",
                _way_out(least, group, at_once),
            )


def _way_out(least: int, group: WorkerGroup, at_once: int) -> str:
    if at_once:
        return f"raise max_accumulation to {-(-least // at_once)}, lower min_batch, or do not require it"
    return f"free memory for {least} samples, or do not require {group.name!r}"


def sync_of(cluster: Cluster, ranks: Sequence[PlannedRank]) -> Sync:
    """How gradients are synchronised. Raises InputError if a bandwidth or the model's size is missing."""
    given = cluster.sync
    if given is None or given.kind == "none":
        return Sync.of("none", len(ranks))
    latency, message = [], []
    for rank in ranks:
        bandwidth = rank.bandwidth if rank.bandwidth is not None else given.bandwidth
        if bandwidth is None:
            expected = "bytes a second, here, in [sync], or measured by pyps-profile link"
            raise InputError(rank.group.name, "bandwidth", "nothing", expected)
        latency.append(rank.latency if rank.latency is not None else given.latency)
        message.append(BYTES_PER_PARAMETER * _parameters(rank) / bandwidth)
    return Sync.of(given.kind, len(ranks), latency, message)


def _parameters(rank: PlannedRank) -> int:
    found = rank.profile.model.parameters
    if found is None:
        expected = "the model's number of parameters"
        raise InputError(rank.group.profile, "model.parameters", "nothing", expected)
    return found


def constrained_problem_of(
    cluster: Cluster, ranks: Sequence[PlannedRank], factors: Sequence[float] = ()
) -> ConstrainedProblem:
    """The whole problem of a cluster's ranks: batches, synchronisation and side constraints.

    factors: multiply the times, one entry a rank.
    """
    limits = [
        Limit(key, need, at_most)
        for key in ("price_per_hour", "watts")
        if (at_most := getattr(cluster.limits, key)) is not None and (need := needs(ranks, key)) is not None
    ]
    labels = dict.fromkeys(rank.group.together for rank in ranks if rank.group.together is not None)
    together = [np.flatnonzero([rank.group.together == label for rank in ranks]) for label in labels]
    return ConstrainedProblem(
        problem_of(cluster, ranks, factors),
        sync_of(cluster, ranks),
        tuple(limits),
        tuple(_resources(cluster, ranks)),
        tuple(group for group in together if len(group) > 1),
    )


def needs(ranks: Sequence[PlannedRank], key: str) -> Floats | None:
    """price_per_hour or watts of every rank; None if one rank states none."""
    values = [getattr(rank.group, key) for rank in ranks]
    return None if None in values else np.array(values, float)


def _resources(cluster: Cluster, ranks: Sequence[PlannedRank]) -> list[Resource]:
    found = []
    for shared in cluster.shared:
        sharing = np.array([shared.name in rank.group.shares for rank in ranks])
        seconds = np.zeros(len(ranks))
        if shared.bandwidth is not None:
            for k in np.flatnonzero(sharing):
                link = link_cost(_parameters(ranks[int(k)]), shared.bandwidth, shared.latency)
                seconds[k] = link.seconds() if link else 0.0
        found.append(Resource(shared.name, sharing, seconds, shared.samples_per_second))
    return found
