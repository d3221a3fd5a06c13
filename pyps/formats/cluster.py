"""The cluster file: which devices there are, and the global batch."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from pyps.errors import InputError
from pyps.formats.kinds import Batch, Elapsed, Name
from pyps.formats.simulation import Simulation


class Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has to be computed in one iteration."""

    global_batch: Batch


class WorkerGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` like workers; bandwidth in bytes per second, latency in seconds, price in any one currency.

    min_batch binds only if the worker is used; `required` workers may not be left out.
    """

    name: Name
    profile: Name
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    max_batch: Batch | None = None
    min_batch: Batch | None = None
    quantum: Batch = 1
    price_per_hour: Elapsed | None = None
    bandwidth: Annotated[float, Meta(gt=0)] | None = None
    latency: Elapsed | None = None
    required: bool = False

    def worker_names(self) -> list[str]:
        """The names of its ranks: v100-0 .. v100-3, or the plain name of a group of one."""
        return [self.name] if self.count == 1 else [f"{self.name}-{k}" for k in range(self.count)]


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices at hand, in rank order; `profile` paths are resolved against the cluster file's folder."""

    job: Job
    worker: Annotated[list[WorkerGroup], Meta(min_length=1)]
    simulation: Simulation = Simulation()

    def named(self, name: str) -> list[str]:
        """The ranks' names that a name stands for: its own, or those of a group."""
        for group in self.worker:
            names = group.worker_names()
            if name == group.name:
                return names
            if name in names:
                return [name]
        return []


def check_cluster(where: str, cluster: Cluster) -> None:
    names: set[str] = set()
    for k, group in enumerate(cluster.worker):
        for name in group.worker_names():
            if name in names:
                raise InputError(where, f"worker[{k}].name", f"{name!r} a second time", "a name of its own")
            names.add(name)
        if group.min_batch and group.max_batch and group.min_batch > group.max_batch:
            raise InputError(
                where,
                f"worker[{k}].min_batch",
                str(group.min_batch),
                f"at most max_batch = {group.max_batch}",
            )
    _check_simulation(where, cluster)


def _check_simulation(where: str, cluster: Cluster) -> None:
    held: set[str] = set()
    for k, host in enumerate(cluster.simulation.host):
        for name in host.workers:
            _check_named(where, f"simulation.host[{k}].workers", cluster, name)
            if twice := held & set(cluster.named(name)):
                found = f"{min(twice)!r} a second time"
                raise InputError(where, f"simulation.host[{k}].workers", found, "workers of no other host")
            held |= set(cluster.named(name))
    for k, happening in enumerate(cluster.simulation.happening):
        _check_named(where, f"simulation.happening[{k}].worker", cluster, happening.worker)


def _check_named(where: str, field: str, cluster: Cluster, name: str) -> None:
    if not cluster.named(name):
        names = ", ".join(group.name for group in cluster.worker)
        raise InputError(where, field, repr(name), f"a worker or a group: {names}")
