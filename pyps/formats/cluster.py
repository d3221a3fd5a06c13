"""The cluster file: which devices there are, what they share, what is paid, and the global batch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pyps.errors import InputError
from pyps.formats.kinds import Batch, Bytes, Elapsed, Name, Seconds

Rate = Annotated[float, Meta(gt=0)]
Quantile = Annotated[float, Meta(gt=0, lt=1)]


class Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has to be computed in one iteration; quantile: plan for this one of each worker's noisy time."""

    global_batch: Batch
    quantile: Quantile | None = None


class WorkerGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` like workers; bandwidth in bytes per second, latency in seconds, price in any one currency.

    min_batch binds only if the worker is used; `required` workers may not be left out. A batch may be
    computed in up to max_accumulation micro-batches, each within max_batch. price_per_hour and watts are
    those of one worker. free_bytes, measured now, takes the place of the profile's memory budget. `shares`
    names [[shared]] tables; groups with the same `together` are used all or not at all.
    """

    name: Name
    profile: Name
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    max_batch: Batch | None = None
    min_batch: Batch | None = None
    max_accumulation: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    quantum: Batch = 1
    price_per_hour: Elapsed | None = None
    watts: Elapsed | None = None
    bandwidth: Rate | None = None
    latency: Elapsed | None = None
    free_bytes: Bytes | None = None
    required: bool = False
    shares: list[Name] = []
    together: Name | None = None

    def worker_names(self) -> list[str]:
        """The names of its ranks: v100-0 .. v100-3, or the plain name of a group of one."""
        return [self.name] if self.count == 1 else [f"{self.name}-{k}" for k in range(self.count)]


class SyncCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients come together once an iteration; bandwidth and latency where a worker names none."""

    kind: Literal["ring", "tree", "server"]
    bandwidth: Rate | None = None
    latency: Elapsed = 0.0


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all workers in use may need together."""

    price_per_hour: Elapsed | None = None
    watts: Elapsed | None = None


class Shared(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link or a host that several workers use.

    Over a link of `bandwidth` bytes a second their pushes and pulls go one after another, each with
    `latency` seconds a way; a host prepares samples_per_second for all of its workers together.
    """

    name: Name
    bandwidth: Rate | None = None
    latency: Elapsed = 0.0
    samples_per_second: Rate | None = None


class GoodputInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a larger batch is worth: gradient noise scale in samples, and the batch to compare with."""

    noise_scale: Seconds
    base_batch: Batch
    max_batch: Batch | None = None


class Quantization(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """error_budget: the largest relative error (rms) of one quantized push or pull; 0 keeps 32 bits."""

    error_budget: Elapsed = 0.0


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices at hand, in rank order; `profile` paths are resolved against the cluster file's folder."""

    job: Job
    worker: Annotated[list[WorkerGroup], Meta(min_length=1)]
    sync: SyncCost | None = None
    limits: Limits = Limits()
    shared: list[Shared] = []
    goodput: GoodputInfo | None = None
    quantization: Quantization = Quantization()


def check_cluster(where: str, cluster: Cluster) -> None:
    names: set[str] = set()
    shared = {resource.name for resource in cluster.shared}
    for k, resource in enumerate(cluster.shared):
        if resource.name in {other.name for other in cluster.shared[:k]}:
            found = f"{resource.name!r} a second time"
            raise InputError(where, f"shared[{k}].name", found, "a name of its own")
        if resource.bandwidth is None and resource.samples_per_second is None:
            raise InputError(where, f"shared[{k}]", "no limit", "bandwidth or samples_per_second")
    for k, group in enumerate(cluster.worker):
        for name in group.worker_names():
            if name in names:
                raise InputError(where, f"worker[{k}].name", f"{name!r} a second time", "a name of its own")
            names.add(name)
        _check_group(where, f"worker[{k}]", group, shared)
    _check_limits(where, cluster)


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
    """A limit on what a worker does not state would be no limit."""
    for key in ("price_per_hour", "watts"):
        if getattr(cluster.limits, key) is None:
            continue
        for k, group in enumerate(cluster.worker):
            if getattr(group, key) is None:
                expected = f"a number, as limits.{key} is set"
                raise InputError(where, f"worker[{k}].{key}", "nothing", expected)
