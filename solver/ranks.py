"""What a cluster file and its profiles say, as the arrays that the solvers take.

A worker's cap is the least of what the cluster file, the profile and its memory model allow, times the
micro-batches that it may accumulate. Its time is the fitted one and, where its link is known, a push and a
pull; not so where [sync] or [[shared]] says otherwise how its values travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Cluster, Fit, Profile, WorkerGroup
from pyps.solver.costs import Cost, Costs, Floats, Line, Table
from pyps.solver.exact.minmax import Problem
from pyps.solver.links import BYTES_PER_PARAMETER, Link, link_of
from pyps.solver.milp.constrained import Coupled, Limit, Resource
from pyps.solver.sync import Sync


@dataclass(frozen=True)
class Member:
    """One rank: its group in the cluster file, its profile, and the fit in that profile."""

    name: str
    group: WorkerGroup
    profile: Profile
    fit: Fit

    @property
    def link(self) -> Link | None:
        """Its way to the store; None where the cluster file and the profile lack a figure."""
        return link_of(self.profile.model.parameters, self.bandwidth, self.latency)

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second: of the cluster file, else as measured in the profile."""
        measured = self.profile.link.bytes_per_second if self.profile.link else None
        return measured if self.group.bandwidth is None else self.group.bandwidth

    @property
    def latency(self) -> float | None:
        """Seconds: of the cluster file, else as measured in the profile."""
        measured = self.profile.link.latency_seconds if self.profile.link else None
        return measured if self.group.latency is None else self.group.latency


def members_of(cluster: Cluster, profiles: Sequence[Profile]) -> list[Member]:
    """The ranks in file order; profiles has one entry a group. Raises InputError where a fit is missing."""
    members = []
    for group, profile in zip(cluster.worker, profiles, strict=True):
        if profile.fit is None:
            raise InputError(group.profile, "fit", "nothing", "a fitted cost model")
        members += [Member(name, group, profile, profile.fit) for name in group.worker_names()]
    return members


def cost_of(fit: Fit, factor: float = 1.0) -> Cost:
    """The cost model that a fit describes, every time `factor` as long."""
    if fit.kind in ("convex", "table"):
        knots = list(fit.table or ()) + (_continued(fit) if fit.kind == "convex" else [])
        return Table(tuple((batch, factor * seconds) for batch, seconds in knots))
    floor = fit.floor_seconds if fit.kind == "knee" else 0.0
    return Line(factor * fit.fixed_seconds, factor * fit.per_sample_seconds, factor * floor)


def _continued(fit: Fit) -> list[tuple[int, float]]:
    """A convex polygon goes on at its last slope, as its profile predicts; a table ends where it ends."""
    table = fit.table or []
    if len(table) < 2 or table[-1][0] == MAX_BATCH:
        return []
    (b0, s0), (b1, s1) = table[-2:]
    return [(MAX_BATCH, s1 + (s1 - s0) / (b1 - b0) * (MAX_BATCH - b1))]


def cap_of(group: WorkerGroup, profile: Profile) -> int:
    """The most samples at once that the cluster file, the profile and the memory model all allow; 0 if none.

    By the memory model b samples take fixed + per sample * b of the budget, or of the group's free_bytes.
    """
    caps = [cap for cap in (group.max_batch, profile.max_batch) if cap is not None]
    if memory := profile.memory:
        budget = memory.budget_bytes if group.free_bytes is None else group.free_bytes
        caps.append(max(0, int((budget - memory.fixed_bytes) // memory.bytes_per_sample)))
    elif group.free_bytes is not None:
        raise InputError(
            group.profile, "memory", "nothing", f"a memory model, as {group.name!r} has free_bytes"
        )
    return min([MAX_BATCH, *caps])


def problem_of(cluster: Cluster, profiles: Sequence[Profile], factors: Sequence[float] = ()) -> Problem:
    """The integer program of a cluster; factors, one a rank, lengthen its times.

    Raises Infeasible naming a required worker that can take no batch.
    """
    _check_required(cluster, profiles)
    members = members_of(cluster, profiles)
    factors = factors or [1.0] * len(members)
    costs = Costs.stack([cost_of(m.fit, f) for m, f in zip(members, factors, strict=True)])
    at_once = np.array([cap_of(m.group, m.profile) for m in members], np.int64)
    repeats = np.array([m.group.max_accumulation for m in members], np.int64)
    cap = at_once
    if (repeats > 1).any():
        costs = costs.accumulated(np.maximum(at_once, 1))
        micro = at_once if costs.micro is None else np.minimum(costs.micro, at_once)
        cap = np.minimum(micro * repeats, MAX_BATCH)
    return Problem.of(
        replace(costs, once=_transfers(cluster, members)),
        cluster.job.global_batch,
        low=[member.group.min_batch or 1 for member in members],
        cap=cap,
        quantum=[member.group.quantum for member in members],
        required=[member.group.required for member in members],
    )


def _transfers(cluster: Cluster, members: Sequence[Member]) -> Floats | None:
    """Seconds of each worker's push and pull over its own link; None where there are none to add."""
    if cluster.sync is not None:
        return None
    shared = {one.name for one in cluster.shared if one.bandwidth is not None}
    own = [None if shared & set(m.group.shares) else m.link for m in members]
    return np.array([link.seconds() if link else 0.0 for link in own]) if any(own) else None


def _check_required(cluster: Cluster, profiles: Sequence[Profile]) -> None:
    for k, (group, profile) in enumerate(zip(cluster.worker, profiles, strict=True)):
        cap, quantum = cap_of(group, profile) * group.max_accumulation, group.quantum
        least = -(-(group.min_batch or 1) // quantum) * quantum
        if group.required and cap // quantum * quantum < least:
            raise Infeasible(
                f"worker[{k}] {group.name!r} is required, but its batch must be at least {least} "
                f"and at most {cap} in steps of {quantum}",
                _way_out(least, group, cap_of(group, profile)),
            )


def _way_out(least: int, group: WorkerGroup, at_once: int) -> str:
    if at_once:
        return f"raise max_accumulation to {-(-least // at_once)}, lower min_batch, or do not require it"
    return f"free memory for {least} samples, or do not require {group.name!r}"


def sync_of(cluster: Cluster, members: Sequence[Member]) -> Sync:
    """How gradients come together. Raises InputError where a bandwidth or the model's size is missing."""
    given = cluster.sync
    if given is None or given.kind == "none":
        return Sync.of("none", len(members))
    latency, message = [], []
    for member in members:
        group, parameters = member.group, member.profile.model.parameters
        bandwidth = member.bandwidth if member.bandwidth is not None else given.bandwidth
        if bandwidth is None:
            expected = "bytes a second, here, in [sync], or measured by pyps-profile link"
            raise InputError(group.name, "bandwidth", "nothing", expected)
        latency.append(member.latency if member.latency is not None else given.latency)
        message.append(BYTES_PER_PARAMETER * _parameters(group, parameters) / bandwidth)
    return Sync.of(given.kind, len(members), latency, message)


def _parameters(group: WorkerGroup, parameters: int | None) -> int:
    if parameters is None:
        raise InputError(group.profile, "model.parameters", "nothing", "the model's number of parameters")
    return parameters


def coupled_of(cluster: Cluster, profiles: Sequence[Profile], factors: Sequence[float] = ()) -> Coupled:
    """The whole program of a cluster: batches, synchronisation, and what ties the workers together."""
    members = members_of(cluster, profiles)
    limits = [
        Limit(key, need, at_most)
        for key in ("price_per_hour", "watts")
        if (at_most := getattr(cluster.limits, key)) is not None and (need := needs(members, key)) is not None
    ]
    labels = dict.fromkeys(m.group.together for m in members if m.group.together is not None)
    together = [np.flatnonzero([m.group.together == label for m in members]) for label in labels]
    return Coupled(
        problem_of(cluster, profiles, factors),
        sync_of(cluster, members),
        tuple(limits),
        tuple(_resources(cluster, members)),
        tuple(group for group in together if len(group) > 1),
    )


def needs(members: Sequence[Member], key: str) -> Floats | None:
    """price_per_hour or watts of every worker; None where one states none."""
    values = [getattr(member.group, key) for member in members]
    return None if None in values else np.array(values, float)


def _resources(cluster: Cluster, members: Sequence[Member]) -> list[Resource]:
    found = []
    for shared in cluster.shared:
        mine = np.array([shared.name in member.group.shares for member in members])
        seconds = np.zeros(len(members))
        for k in np.flatnonzero(mine):
            member = members[int(k)]
            if shared.bandwidth is not None:
                parameters = _parameters(member.group, member.profile.model.parameters)
                link = link_of(parameters, shared.bandwidth, shared.latency)
                seconds[k] = link.seconds() if link else 0.0
        found.append(Resource(shared.name, mine, seconds, shared.samples_per_second))
    return found
