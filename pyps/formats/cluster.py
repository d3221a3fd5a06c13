"""The cluster file: the devices, what they share and cost, the global batch; what simulations add."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pyps.errors import InputError
from pyps.formats.kinds import MAX_BATCH, Batch, Bytes, Elapsed, Fraction, Name, Seconds, Unit
from pyps.formats.mode import RunTable, check_run_table

Above = Annotated[float, Meta(gt=0)]


class Jitter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Noise in the time of a device's steps; every step's time is multiplied by all of these factors.

    sigma: of a lognormal factor with mean 1.
    spread: of a uniform factor within 1 +- spread.
    half_normal: of a factor 1 + half_normal * |N(0, 1)|.
    spike_share, spike_factor: this share of the steps takes spike_factor times as long.
    drift, drift_seconds: relative amplitude and period of a sine.
    """

    sigma: Elapsed = 0.0
    spread: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    half_normal: Elapsed = 0.0
    spike_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    spike_factor: Above = 10.0
    drift: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    drift_seconds: Above = 60.0


class Host(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that share one link to the server; `bandwidth` in bytes/s each way.

    The name of a group of workers stands for all of them.
    """

    name: Name
    bandwidth: Above
    workers: Annotated[list[Name], Meta(min_length=1)]


class FaultSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of a worker, `at` seconds after the start.

    slow: for `seconds` (0: to the end) steps take `factor` times as long and `added` seconds more.
    link: for `seconds` (0: to the end) the worker's own link carries a message in `factor` times the time.
    stop: the worker is stopped for `seconds`.
    kill, leave: the worker dies or leaves, and a new one joins after `seconds` (0: never).
    """

    worker: Name
    at: Elapsed
    kind: Literal["slow", "link", "stop", "kill", "leave"]
    seconds: Elapsed = 0.0
    factor: Above = 1.0
    added: Elapsed = 0.0


class Churn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that die, come back, and are replaced, at random times within the first `until` seconds.

    every: seconds that a worker lives on average. away: seconds from its death until its successor joins.
    gone: this share of the workers dies for good, and as many others are absent at first and join.
    noticed: seconds until the others notice a death. seed: of all times.
    """

    every: Above
    until: Above
    away: Above = 60.0
    gone: Annotated[float, Meta(ge=0, le=0.5)] = 0.0
    noticed: Elapsed = 10.0
    seed: Annotated[int, Meta(ge=0)] = 0


class Simulation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster beyond its devices.

    model_bytes: sent each way in a step, at fp32; None: from the profiles' parameters, else 0.
    servers: each holds an equal share of the model.
    server_bandwidth: of each server's link, in bytes/s.
    """

    model_bytes: Bytes | None = None
    server_bandwidth: Above | None = None
    servers: Annotated[int, Meta(ge=1)] = 1
    jitter: Jitter = Jitter()
    host: list[Host] = []
    fault: list[FaultSpec] = []
    churn: Churn | None = None


CLUSTER_FILE = "the cluster file"  # in the errors of those that do not know its name
MOST_WORKERS = 100_000  # in a cluster; their plan takes seconds

Rate = Annotated[float, Meta(gt=0)]
Quantile = Annotated[float, Meta(gt=0, lt=1)]
Available = Annotated[float, Meta(gt=0, le=1)]


class LengthMoments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mean of the data's lengths, in tokens, and the mean of their squares."""

    mean: Annotated[float, Meta(ge=1, le=MAX_BATCH)]
    mean_square: Annotated[float, Meta(ge=1, le=float(MAX_BATCH) ** 2)]


class Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The samples of one iteration. quantile: plan for this quantile of an iteration's time.

    unit: what all batches of this file count. In tokens, a profile's batches are multiplied by its
    model.tokens_per_sample; with `lengths`, the data's, by the tokens of average cost that it takes the time
    of, which profiles measured with --lengths know. target: how many samples to train; the plan says how long
    they take, and their price. deadline_hours: use the cheapest workers that train the target by then;
    budget: those that train it soonest at that price. confidence: of keeping the deadline where workers may
    be taken away; null: on average. price_per_kwh: of energy, which is then part of all prices.
    """

    global_batch: Batch
    quantile: Quantile | None = None
    unit: Unit = "samples"
    lengths: LengthMoments | None = None
    target: Seconds | None = None
    deadline_hours: Above | None = None
    budget: Above | None = None
    confidence: Quantile | None = None
    price_per_kwh: Above | None = None

    @property
    def is_bounded(self) -> bool:
        """Return whether the workers are chosen for the whole job, not for the shortest iteration."""
        return self.deadline_hours is not None or self.budget is not None


class WorkerGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` equal workers; bandwidth in bytes per second, latency in seconds, price in any one currency.

    min_batch binds only if the worker is used; `required` workers may not be left out. Batches are multiples
    of batch_multiple. A batch may be computed in up to max_accumulation micro-batches, each within max_batch.
    price_per_hour, watts and preemptions_per_hour (while it is there) are those of one device. availability:
    the share of time in which it is there; downtime_seconds: for which it is away on average, with which the
    preemptions follow; trace: a CSV file that tells both, with the columns seconds and available.
    free_bytes, measured now, replaces the profile's memory budget. `shares` names [[shared]] tables. Groups
    with the same `together` are used all or not at all.

    devices: of which each worker consists. parallel "model": they compute a batch together (tensor or
    pipeline parallel), as the profile has measured. "data": the worker is a node, used whole or not at all.
    Each of its devices is a rank with an equal batch; bounds and profile are those of one. They share the
    node's `bandwidth`, and reduce their gradients among themselves first, over inside_bandwidth and
    inside_latency.
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
    preemptions_per_hour: Elapsed = 0.0
    availability: Available | None = None
    downtime_seconds: Above | None = None
    trace: Name | None = None
    bandwidth: Rate | None = None
    latency: Elapsed | None = None
    free_bytes: Bytes | None = None
    required: bool = False
    shares: list[Name] = []
    together: Name | None = None
    devices: Annotated[int, Meta(ge=1, le=10_000)] = 1
    parallel: Literal["model", "data"] = "model"
    inside_bandwidth: Rate | None = None
    inside_latency: Elapsed = 0.0

    @property
    def ranks_each(self) -> int:
        """The ranks of one worker: the devices of a node, or 1."""
        return self.devices if self.parallel == "data" else 1

    def unit_names(self) -> list[str]:
        """The names of the group's workers: v100-0 .. v100-3, or the plain name of a group of one."""
        return [self.name] if self.count == 1 else [f"{self.name}-{k}" for k in range(self.count)]

    def worker_names(self) -> list[str]:
        """The names of the group's ranks: those of its workers, or, of nodes, dgx-0-0 .. dgx-1-7."""
        if self.ranks_each == 1:
            return self.unit_names()
        return [f"{name}-{k}" for name in self.unit_names() for k in range(self.devices)]


class SyncCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients are synchronised once an iteration; bandwidth and latency of workers that state none.

    none: at no cost. overlap: the share of a step's compute that is left when the first gradients can travel.
    tail: the share of the synchronisation that is left when the last are ready.
    """

    kind: Literal["none", "ring", "tree", "server"]
    bandwidth: Rate | None = None
    latency: Elapsed = 0.0
    overlap: Fraction = 0.0
    tail: Fraction = 0.0


class Sharding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model whose state is sharded over ranks (ZeRO, FSDP), all of which are used.

    stage: 0 shards nothing (DDP), 1 the optimizer's state, 2 gradients too, 3 parameters too (fully_shard).
    replicas: copies of the sharded model (HSDP), over as many ranks each; of nodes, each has one.
    optimizer_bytes: of its state, for each parameter; by default as the profile's optimizer says. whole: of
    parameters and gradients, what stage 3 holds whole. shares: by the cards' room, or all alike.
    """

    stage: Literal[0, 1, 2, 3]
    shares: Literal["equal", "memory"] = "equal"
    replicas: Batch = 1
    optimizer_bytes: Elapsed | None = None
    whole: Fraction = 0.1


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the sum over all workers in use; price_per_million_samples: at the speed of the plan."""

    price_per_hour: Elapsed | None = None
    price_per_million_samples: Elapsed | None = None
    watts: Elapsed | None = None


class Shared(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link, a host or devices that several workers share.

    A link of `bandwidth` bytes a second each way carries one push and one pull at a time; each arrives
    `latency` seconds later. A host prepares samples_per_second for all its workers together. Workers in use
    have at most as many `devices` together: groups that share these are choices of how to use them.
    """

    name: Name
    bandwidth: Rate | None = None
    latency: Elapsed = 0.0
    samples_per_second: Rate | None = None
    devices: Batch | None = None


class Spot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold what a preemption of a worker costs: seconds of a checkpoint, which the job waits for, and from
    the preemption until the job goes on from its last checkpoint.
    """

    checkpoint_seconds: Above = 30.0
    restart_seconds: Elapsed = 300.0


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
    sharding: Sharding | None = None
    limits: Limits = Limits()
    shared: list[Shared] = []
    spot: Spot = Spot()
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
    groups, names = cluster.worker, set[str]()
    shared = {resource.name for resource in cluster.shared}
    for k, resource in enumerate(cluster.shared):
        if resource.name in {other.name for other in cluster.shared[:k]}:
            found = f"{resource.name!r} a second time"
            raise InputError(where, f"shared[{k}].name", found, "a unique name")
        if (resource.bandwidth, resource.samples_per_second, resource.devices) == (None, None, None):
            raise InputError(where, f"shared[{k}]", "no limit", "bandwidth, samples_per_second or devices")
    workers = sum(group.count * group.ranks_each for group in cluster.worker)
    if workers > MOST_WORKERS:
        k = max(range(len(groups)), key=lambda k: groups[k].count * groups[k].ranks_each)
        raise InputError(
            where, f"worker[{k}].count", f"{workers:,} workers in all", f"at most {MOST_WORKERS:,}"
        )
    named = {name for group in groups for name in group.shares}
    if lost := [k for k, resource in enumerate(cluster.shared) if resource.name not in named]:
        found = f"{cluster.shared[lost[0]].name!r}, which no worker shares"
        raise InputError(where, f"shared[{lost[0]}].name", found, "a name in the shares of a [[worker]]")
    before = set[str]()
    for k, group in enumerate(groups):
        if group.name in before:
            found = f"{group.name!r} a second time"
            raise InputError(where, f"worker[{k}].name", found, "a unique name, or a higher count")
        before.add(group.name)
        for name in group.worker_names():
            if name in names:
                raise InputError(where, f"worker[{k}].name", f"{name!r} a second time", "a unique name")
            names.add(name)
        _check_group(where, f"worker[{k}]", group, cluster.run, shared)
        _check_node(where, f"worker[{k}]", group, cluster)
    _check_sharding(where, cluster)
    _check_choices(where, cluster)
    check_run_table(where, cluster.run)
    if (goodput := cluster.goodput) is not None and goodput.noise is None:
        for key in ("noise_scale", "base_batch"):
            if getattr(goodput, key) is None:
                expected = "a number of samples, or noise: a file that GradientNoise has written"
                raise InputError(where, f"goodput.{key}", "nothing", expected)
    _check_limits(where, cluster)
    _check_simulation(where, cluster)


def _check_group(where: str, field: str, group: WorkerGroup, run: RunTable, shared: set[str]) -> None:
    parts = max(group.max_accumulation, run.accumulation or 1)
    most = None if run.local_steps else group.max_batch and group.max_batch * parts
    if group.min_batch and most and group.min_batch > most:
        expected = f"at most max_batch = {group.max_batch}"
        if parts > 1:
            expected += f" times max_accumulation = {parts}"
        raise InputError(where, f"{field}.min_batch", str(group.min_batch), expected)
    for name in group.shares:
        if name not in shared:
            expected = f"the name of a [[shared]] table: {', '.join(sorted(shared)) or 'there is none'}"
            raise InputError(where, f"{field}.shares", repr(name), expected)


def _check_node(where: str, field: str, group: WorkerGroup, cluster: Cluster) -> None:
    """Check what only nodes have, and what they need."""
    node = group.parallel == "data"
    if group.inside_bandwidth is not None and not node:
        raise InputError(where, f"{field}.inside_bandwidth", "a number", 'nothing without parallel = "data"')
    if not node:
        return
    if cluster.sync is None:
        raise InputError(where, "sync", "nothing", f'a table, as {field}.parallel is "data"')
    if cluster.run.local_steps is not None:
        raise InputError(where, f"{field}.parallel", '"data"', '"model" with run.local_steps')
    if group.inside_bandwidth is None and group.devices > 1 and cluster.sync.kind != "none":
        raise InputError(where, f"{field}.inside_bandwidth", "nothing", "bytes a second between the devices")
    for key in ("max_batch", "min_batch", "batch_multiple"):
        value = getattr(group, key)
        if value is not None and value * group.devices > MAX_BATCH:
            found, most = f"{value} on each of {group.devices} devices", f"at most {MAX_BATCH} on all"
            raise InputError(where, f"{field}.{key}", found, most)


def _check_sharding(where: str, cluster: Cluster) -> None:
    given, groups = cluster.sharding, cluster.worker
    if given is None:
        return
    if cluster.sync is not None and cluster.sync.kind not in ("none", "ring"):
        raise InputError(where, "sync.kind", repr(cluster.sync.kind), '"ring" or "none" with [sharding]')
    if cluster.run.local_steps is not None:
        raise InputError(where, "run.local_steps", str(cluster.run.local_steps), "nothing with [sharding]")
    ranks = {group.ranks_each for group in groups}
    if len(ranks) > 1:
        found = " and ".join(map(str, sorted(ranks)))
        raise InputError(
            where, "sharding", f"workers of {found} ranks", "nodes of equally many devices, or none"
        )
    workers = sum(group.count for group in groups)
    if max(ranks) > 1 and given.replicas > 1:
        raise InputError(where, "sharding.replicas", str(given.replicas), "1: each node has a copy")
    if workers % given.replicas:
        found = f"{given.replicas}, of {workers} workers"
        raise InputError(where, "sharding.replicas", found, "a number that divides the workers")
    if given.shares == "memory":
        _check_unlike_shares(where, cluster, given)


def _check_unlike_shares(where: str, cluster: Cluster, given: Sharding) -> None:
    """Refuse what ranks with unlike shares cannot have: copies, other rounds than theirs."""
    with_memory = 'with sharding.shares = "memory"'
    if given.stage == 0:
        raise InputError(where, "sharding.stage", "0", f"1 to 3, {with_memory}")
    if given.replicas > 1:
        raise InputError(where, "sharding.replicas", str(given.replicas), f"1, {with_memory}")
    if cluster.run.policy not in (None, "bsp"):
        expected = f"bsp, or none, {with_memory}: ranks that divide one state wait for each other"
        raise InputError(where, "run.policy", repr(cluster.run.policy), expected)
    for k, group in enumerate(cluster.worker):
        if group.parallel == "data" and group.devices > 1:
            raise InputError(where, f"worker[{k}].parallel", '"data"', f'"model", {with_memory}')


def _check_choices(where: str, cluster: Cluster) -> None:
    """Refuse groups that share devices and are all used: nothing may count them all."""
    k = next((k for k, shared in enumerate(cluster.shared) if shared.devices is not None), None)
    if k is None:
        return
    for key, given in (("sharding", cluster.sharding), ("run.local_steps", cluster.run.local_steps)):
        if given is not None:
            raise InputError(where, key, f"with shared[{k}].devices", f"no {key}: it counts every worker")


def _check_limits(where: str, cluster: Cluster) -> None:
    """Every worker must state a number for each limited quantity; a bounded job has a target."""
    job = cluster.job
    if job.lengths is not None:
        if job.unit != "tokens":
            raise InputError(where, "job.unit", repr(job.unit), '"tokens", as job.lengths is set')
        if job.lengths.mean_square < (1 - 1e-9) * job.lengths.mean**2:
            expected = f"at least the square of the mean, {job.lengths.mean**2:g}"
            raise InputError(where, "job.lengths.mean_square", f"{job.lengths.mean_square:g}", expected)
    if job.confidence is not None and job.deadline_hours is None:
        raise InputError(where, "job.deadline_hours", "nothing", "hours, as job.confidence is set")
    for k, group in enumerate(cluster.worker):
        _check_presence(where, f"worker[{k}]", group)
    for name in ("deadline_hours", "budget"):
        if getattr(job, name) is None:
            continue
        if job.target is None:
            raise InputError(where, "job.target", "nothing", f"the samples to train, as job.{name} is set")
        if job.price_per_kwh is None:
            _check_stated(where, cluster, "price_per_hour", f"job.{name}")
    if job.price_per_kwh is not None:
        _check_stated(where, cluster, "watts", "job.price_per_kwh")
    needs = {"price_per_million_samples": "price_per_hour"}
    for limit in cluster.limits.__struct_fields__:
        key = needs.get(limit, limit)
        priced = key == "price_per_hour" and job.price_per_kwh is not None
        if getattr(cluster.limits, limit) is not None and not priced:
            _check_stated(where, cluster, key, f"limits.{limit}")


def _check_presence(where: str, field: str, group: WorkerGroup) -> None:
    """How often a device is there is said once: by its rate, by its availability, or by a trace."""
    stated = [group.availability is not None, group.trace is not None]
    if all(stated) or (stated[1] and group.preemptions_per_hour):
        other = "availability" if stated[0] else "preemptions_per_hour"
        raise InputError(where, f"{field}.{other}", "a number", "nothing: the trace tells it")
    if stated[0] and bool(group.downtime_seconds) == bool(group.preemptions_per_hour):
        expected = "one of the two, as availability is set: the other follows"
        found = "both" if group.downtime_seconds else "nothing"
        raise InputError(where, f"{field}.downtime_seconds, preemptions_per_hour", found, expected)
    if group.downtime_seconds and not stated[0]:
        raise InputError(where, f"{field}.availability", "nothing", "a share, as downtime_seconds is set")


def _check_stated(where: str, cluster: Cluster, key: str, why: str) -> None:
    """Raises InputError where a group lacks a key. why: what needs it."""
    for k, group in enumerate(cluster.worker):
        if getattr(group, key) is None:
            raise InputError(where, f"worker[{k}].{key}", "nothing", f"a number, as {why} is set")


def _check_simulation(where: str, cluster: Cluster) -> None:
    held: set[str] = set()
    links = {resource.name for resource in cluster.shared if resource.bandwidth is not None}
    for k, host in enumerate(cluster.simulation.host):
        if host.name in links:
            found = f"{host.name!r} a second time"
            raise InputError(where, f"simulation.host[{k}].name", found, "a name of no other link")
        links.add(host.name)
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
