"""The cluster file: the devices, what they share, what they cost, and the global batch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pyps.errors import InputError
from pyps.formats.kinds import Batch, Bytes, Elapsed, Name, Seconds
from pyps.formats.mode import RunTable, check_run_table
from pyps.formats.simulation import Simulation

MOST_WORKERS = 100_000  # in a cluster; their plan takes seconds

Rate = Annotated[float, Meta(gt=0)]
Part = Annotated[float, Meta(ge=0, le=1)]
Quantile = Annotated[float, Meta(gt=0, lt=1)]


class Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The samples of one iteration. quantile: plan for this quantile of an iteration's time."""

    global_batch: Batch
    quantile: Quantile | None = None


class WorkerGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` equal workers; bandwidth in bytes per second, latency in seconds, price in any one currency.

    min_batch binds only if the worker is used; `required` workers may not be left out. Batches are multiples
    of batch_multiple. A batch may be computed in up to max_accumulation micro-batches, each within max_batch.
    price_per_hour and watts are those of one worker. free_bytes, measured now, replaces the profile's memory
    budget. `shares` names [[shared]] tables. Groups with the same `together` are used all or not at all.
    """

    name: Name
    profile: Name
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    max_batch: Batch | None = None
    min_batch: Batch | None = None
    max_accumulation: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    batch_multiple: Batch = 1
    price_per_hour: Elapsed | None = None
    watts: Elapsed | None = None
    bandwidth: Rate | None = None
    latency: Elapsed | None = None
    free_bytes: Bytes | None = None
    required: bool = False
    shares: list[Name] = []
    together: Name | None = None

    def worker_names(self) -> list[str]:
        """The names of the group's ranks: v100-0 .. v100-3, or the plain name of a group of one."""
        return [self.name] if self.count == 1 else [f"{self.name}-{k}" for k in range(self.count)]


class SyncCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients are synchronised once an iteration; bandwidth and latency of workers that state none.

    none: at no cost. overlap: the share of a step's compute that is left when the first gradients can travel.
    tail: the share of the synchronisation that is left when the last are ready.
    """

    kind: Literal["none", "ring", "tree", "server"]
    bandwidth: Rate | None = None
    latency: Elapsed = 0.0
    overlap: Part = 0.0
    tail: Part = 1.0


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the sum over all workers in use; price_per_million_samples: at the speed of the plan."""

    price_per_hour: Elapsed | None = None
    price_per_million_samples: Elapsed | None = None
    watts: Elapsed | None = None


class Shared(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link or a host that several workers share.

    A link of `bandwidth` bytes a second each way carries one push and one pull at a time; each arrives
    `latency` seconds later. A host prepares samples_per_second for all its workers together.
    """

    name: Name
    bandwidth: Rate | None = None
    latency: Elapsed = 0.0
    samples_per_second: Rate | None = None


class GoodputInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How useful a larger batch is: the gradient noise scale in samples, and the batch to compare with.

    noise: a file with both, as GradientNoise writes it, relative to the cluster file's folder.
    """

    noise: Name | None = None
    noise_scale: Seconds | None = None
    base_batch: Batch | None = None
    max_batch: Batch | None = None


class Quantization(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """error_budget: the largest relative error (rms) of one quantized push or pull; 0 keeps 32 bits. If the
    planner chooses the bits, the default allows 8.
    """

    error_budget: Elapsed | None = None


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices, in rank order; `profile` paths are relative to the cluster file's folder."""

    job: Job
    worker: Annotated[list[WorkerGroup], Meta(min_length=1)]
    run: RunTable = RunTable()
    sync: SyncCost | None = None
    limits: Limits = Limits()
    shared: list[Shared] = []
    goodput: GoodputInfo | None = None
    quantization: Quantization = Quantization()
    simulation: Simulation = Simulation()

    def named(self, name: str) -> list[str]:
        """The names of the ranks that `name` denotes: a single rank, or all ranks of a group."""
        for group in self.worker:
            names = group.worker_names()
            if name == group.name:
                return names
            if name in names:
                return [name]
        return []


def check_cluster(where: str, cluster: Cluster) -> None:
    """Raises InputError, naming the file `where`, if names or limits of the cluster do not fit together."""
    names: set[str] = set()
    shared = {resource.name for resource in cluster.shared}
    for k, resource in enumerate(cluster.shared):
        if resource.name in {other.name for other in cluster.shared[:k]}:
            found = f"{resource.name!r} a second time"
            raise InputError(where, f"shared[{k}].name", found, "a unique name")
        if resource.bandwidth is None and resource.samples_per_second is None:
            raise InputError(where, f"shared[{k}]", "no limit", "bandwidth or samples_per_second")
    workers = sum(group.count for group in cluster.worker)
    if workers > MOST_WORKERS:
        k = max(range(len(cluster.worker)), key=lambda k: cluster.worker[k].count)
        raise InputError(
            where, f"worker[{k}].count", f"{workers:,} workers in all", f"at most {MOST_WORKERS:,}"
        )
    groups = [group.name for group in cluster.worker]
    for k, group in enumerate(cluster.worker):
        if group.name in groups[:k]:
            found = f"{group.name!r} a second time"
            raise InputError(where, f"worker[{k}].name", found, "a unique name, or a higher count")
        for name in group.worker_names():
            if name in names:
                raise InputError(where, f"worker[{k}].name", f"{name!r} a second time", "a unique name")
            names.add(name)
        _check_group(where, f"worker[{k}]", group, shared)
    check_run_table(where, cluster.run)
    if (goodput := cluster.goodput) is not None and goodput.noise is None:
        for key in ("noise_scale", "base_batch"):
            if getattr(goodput, key) is None:
                expected = "a number of samples, or noise: a file that GradientNoise has written"
                raise InputError(where, f"goodput.{key}", "nothing", expected)
    _check_limits(where, cluster)
    _check_simulation(where, cluster)


def _check_group(where: str, field: str, group: WorkerGroup, shared: set[str]) -> None:
    most = group.max_batch and group.max_batch * group.max_accumulation
    if group.min_batch and most and group.min_batch > most:
        expected = f"at most max_batch = {group.max_batch}"
        if group.max_accumulation > 1:
            expected += f" times max_accumulation = {group.max_accumulation}"
        raise InputError(where, f"{field}.min_batch", str(group.min_batch), expected)
    for name in group.shares:
        if name not in shared:
            expected = f"the name of a [[shared]] table: {', '.join(sorted(shared)) or 'there is none'}"
            raise InputError(where, f"{field}.shares", repr(name), expected)


def _check_limits(where: str, cluster: Cluster) -> None:
    """Every worker must state a number for each limited quantity."""
    needs = {"price_per_million_samples": "price_per_hour"}
    for limit in cluster.limits.__struct_fields__:
        key = needs.get(limit, limit)
        if getattr(cluster.limits, limit) is None:
            continue
        for k, group in enumerate(cluster.worker):
            if getattr(group, key) is None:
                expected = f"a number, as limits.{limit} is set"
                raise InputError(where, f"worker[{k}].{key}", "nothing", expected)


def _check_simulation(where: str, cluster: Cluster) -> None:
    held: set[str] = set()
    for k, host in enumerate(cluster.simulation.host):
        for name in host.workers:
            _check_named(where, f"simulation.host[{k}].workers", cluster, name)
            if twice := held & set(cluster.named(name)):
                found = f"{min(twice)!r} a second time"
                raise InputError(where, f"simulation.host[{k}].workers", found, "workers of no other host")
            held |= set(cluster.named(name))
    for k, fault in enumerate(cluster.simulation.fault):
        _check_named(where, f"simulation.fault[{k}].worker", cluster, fault.worker)


def _check_named(where: str, field: str, cluster: Cluster, name: str) -> None:
    if not cluster.named(name):
        names = ", ".join(group.name for group in cluster.worker)
        raise InputError(where, field, repr(name), f"a worker or a group: {names}")
