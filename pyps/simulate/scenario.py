"""The input of a simulation: workers with cost models, links and faults; from a cluster file or Python."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import (
    MAX_BATCH,
    Cluster,
    Jitter,
    Mode,
    Plan,
    PlanWorker,
    Profile,
    WorkerGroup,
    read_cluster,
    read_plan,
)
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.plan import TurnSchedule, plan_turns
from pyps.profiler.curve import fitted_profile
from pyps.profiler.fit import predict_seconds
from pyps.profiler.multiples import fit_at
from pyps.simulate.clock import LinkClass, Network
from pyps.simulate.faults import NOTICED_SECONDS, Fault, stated_faults
from pyps.solver.constrained import even_batches
from pyps.solver.costs import Costs
from pyps.solver.exact.minmax import Problem, solve
from pyps.solver.jobs.differences import differences
from pyps.solver.links import WIRE_BYTES, LinkSlowdown, LinkSpec, link_slowdowns, shared_links
from pyps.solver.mode import bits_of, stated_policy
from pyps.solver.plan import make_plan
from pyps.solver.ranks import PlannedRank
from pyps.store.policies import policy_named

FP32_BYTES = 4
StrPath = str | os.PathLike[str]
NO_JITTER = Jitter()
PLAIN = Mode()
DRAWS = 128  # at a time


@dataclass(frozen=True)
class SimWorker:
    """One rank. `cost`: seconds of a step as a function of the batch. `bandwidth` (bytes/s) and `latency` (s)
    are those of its own link; `host` names a shared link instead. `micro_batch`: the most samples computed at
    once; 0: no limit. `max_samples`: the samples that fit in its memory; 0: no limit. `recorded`: seconds of
    its first steps in a real run, whatever their size; `cost` and jitter give the later ones. `up_share`,
    `down_share`: of the scenario's bytes, in this worker's codecs. `depth`: steps under way in a pipeline; 0:
    2. `mode`: the planned codecs. `link_slowdowns`: by which factor its own link is slower, and when.
    `planned`: its line of the plan, with what is known of its device and the bounds of its batch, for
    rebalancing; None: its cost is known, and `max_samples` is its only bound. `optimizer_seconds`: of `cost`,
    which a batch in micro-batches takes once.
    """

    name: str
    batch: int
    cost: Callable[[int], float]
    jitter: Jitter = NO_JITTER
    slowdowns: tuple[Slowdown, ...] = ()
    bandwidth: float = math.inf
    latency: float = 0.0
    host: str = ""
    micro_batch: int = 0
    max_samples: int = 0
    recorded: tuple[float, ...] = ()
    up_share: float = 1.0
    down_share: float = 1.0
    depth: int = 0
    mode: Mode = PLAIN
    link_slowdowns: tuple[LinkSlowdown, ...] = ()
    planned: PlanWorker | None = None
    optimizer_seconds: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A cluster in virtual time. `down_bytes` and `up_bytes` are one pull and one push of one worker.
    `policy`, `round_timeout` (seconds): the plan's, where they are stated. `pipelined`: the plan has several
    steps of a worker under way. `schedule`: the planned turns, for policies that take turns; None: in the
    order of ranks. `local`: each micro-batch of a worker is a local step. `merges`: the times that a worker
    pulls between two pushes, and goes on from there; not where workers wait for rounds, take turns, or have a
    pipeline. `differences`: in what a given plan is not the cluster file's. `too_large`: the workers whose
    even batches do not fit. `noticed`: seconds until the others notice a death.
    """

    workers: tuple[SimWorker, ...]
    up_bytes: float = 0.0
    down_bytes: float = 0.0
    server_bandwidth: float = math.inf
    hosts: dict[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    schedule: TurnSchedule | None = None
    local: bool = False
    merges: int = 0
    policy: str = ""
    round_timeout: float | None = None
    pipelined: bool = False
    differences: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()
    noticed: float = NOTICED_SECONDS

    def __post_init__(self) -> None:
        if not self.workers:
            raise InputError("scenario", "workers", "none", "at least one")
        for w in self.workers:
            if w.batch < 1:
                raise InputError("scenario", f"{w.name}.batch", str(w.batch), "at least 1")
            if w.link_slowdowns and (w.host or math.isinf(w.bandwidth)):
                found = "a slower link" + (f" behind {w.host}" if w.host else "")
                raise InputError("scenario", f"{w.name}.link", found, "a bandwidth of the worker's own")
            if w.host and w.host not in self.hosts:
                raise InputError("scenario", f"{w.name}.host", repr(w.host), f"one of {sorted(self.hosts)}")
        if self.schedule is not None and len(self.schedule.order) != len(self.workers):
            found = f"{len(self.schedule.order)} turns"
            raise InputError("scenario", "schedule", found, f"one for each of {len(self.workers)} workers")

    @property
    def batches(self) -> tuple[int, ...]:
        """Samples of a step, by rank."""
        return tuple(w.batch for w in self.workers)

    @property
    def global_batch(self) -> int:
        """Samples of a step of all ranks."""
        return sum(self.batches)


def scenario_of(path: StrPath, *, even: bool = False, plan_path: StrPath | None = None) -> Scenario:
    """Read a cluster file; each worker gets the batch, codecs and the turn that the planner gives it in the
    mode of the file's [run], or an `even` share.

    path: the cluster file. even: batches as equal as their multiples allow, and turns in the order of ranks.
    plan_path: a plan for this cluster; None: plan it. Raises InputError, Infeasible.
    """
    cluster = _readable(path)
    profiles = {group.name: fitted_profile(group.profile) for group in cluster.worker}
    plan = _plan(path, cluster, profiles, plan_path)
    scenario = planned_scenario(cluster, profiles, plan, str(plan_path or path), even=even)
    if plan_path is None:
        return scenario
    fitted = [profiles[group.name] for group in cluster.worker]
    stated = plan.run.policy if plan.run else scenario.policy
    return replace(scenario, policy=stated, differences=tuple(differences(plan, cluster, fitted)))


def planned_scenario(
    cluster: Cluster,
    profiles: Mapping[str, Profile],
    plan: Plan,
    where: str = CLUSTER_FILE,
    *,
    even: bool = False,
) -> Scenario:
    """The scenario of a cluster and its plan; arguments as of `scenario_of`.

    profiles: by the names of groups. where: the file of the plan, for errors.
    """
    batches = [w.batch for w in plan.workers]
    if even:
        if any(shared.devices is not None for shared in cluster.shared):
            raise InputError(where, "shared.devices", "with an even split", "groups that share no devices")
        batches = _even_batches(plan)
    local = plan.run is not None and plan.run.local_steps is not None
    built = {n: w for g in cluster.worker for n, w in _workers(cluster, g, profiles[g.name]).items()}
    workers = tuple(
        _as_planned(built[w.name], plan, w, batch, even=even, local=local)
        for w, batch in zip(plan.workers, batches, strict=True)
        if batch > 0
    )
    simulation, used = cluster.simulation, [worker.name for worker in workers]
    size = _model_bytes(cluster, list(profiles.values()))
    bandwidth = simulation.server_bandwidth
    links = {one.shared: one for group in cluster.worker for one in shared_links(cluster, group)}
    return Scenario(
        workers,
        up_bytes=size,
        down_bytes=size,
        server_bandwidth=bandwidth * simulation.servers if bandwidth else math.inf,
        hosts={name: link.bytes_per_second for name, link in links.items()}
        | {host.name: host.bandwidth for host in simulation.host},
        faults=tuple(stated_faults(cluster, used)),
        schedule=None if even else plan_turns(plan, where),
        local=local,
        policy=cluster.run.policy or "",
        round_timeout=(plan.run or cluster.run).round_timeout,
        pipelined=plan.run is not None and plan.run.depth != 1,
        too_large=tuple(_too_large(plan, batches)) if even else (),
        noticed=simulation.churn.noticed if simulation.churn is not None else NOTICED_SECONDS,
    )


def _even_batches(plan: Plan) -> list[int]:
    """The global batch split over all workers evenly: the largest batch is as small as their multiples allow.

    Raises Infeasible if no such batches sum to it.
    """
    multiples = [worker.batch_multiple for worker in plan.workers]
    if max(multiples) == 1:
        return even_batches(plan.global_batch, len(multiples))
    alike = Costs.lines(np.zeros(len(multiples)), 1.0)  # so the last to finish has the largest batch
    problem = Problem.of(alike, plan.global_batch, batch_multiple=multiples, required=True)
    try:
        found: list[int] = solve(problem).batches.tolist()
    except Infeasible as error:
        raise Infeasible(f"an even split in batch multiples: {error.reason}", error.nearest) from None
    return found


def _too_large(plan: Plan, batches: Sequence[int]) -> Iterator[str]:
    """The workers of a plan that take fewer samples than these."""
    for worker, batch in zip(plan.workers, batches, strict=True):
        most = (worker.max_batch or MAX_BATCH) * worker.max_accumulation
        if batch > most:
            yield f"{worker.name} has {batch}, of at most {most}"


def networks_of(scenario: Scenario) -> tuple[list[int], tuple[Network, Network]]:
    """The link class of each worker (-1: transfers take no time), and the networks down and up."""
    keys: dict[tuple[str, float, int], int] = {}
    kinds = []
    for k, w in enumerate(scenario.workers):
        changes = k if w.link_slowdowns else -1  # a link that changes is a class of its own
        key = (w.host, scenario.hosts[w.host], -1) if w.host else ("", w.bandwidth, changes)
        unlimited = math.isinf(scenario.server_bandwidth) and math.isinf(key[1])
        kinds.append(-1 if unlimited else keys.setdefault(key, len(keys)))
    down, up = (
        Network(scenario.server_bandwidth, [LinkClass(bandwidth, bool(host)) for host, bandwidth, _ in keys])
        for _ in range(2)
    )
    return kinds, (down, up)


def _readable(path: StrPath) -> Cluster:
    """A cluster file of what a simulation has. Raises InputError."""
    cluster = read_cluster(path)
    unit, sync = cluster.job.unit, cluster.sync
    if unit != "samples":
        raise InputError(str(path), "job.unit", repr(unit), '"samples": a simulation counts those')
    if sync is not None and sync.kind != "none":
        expected = "bandwidths instead: a simulation has a server"
        raise InputError(str(path), "sync.kind", repr(sync.kind), expected)
    return cluster


def _as_planned(
    worker: SimWorker, plan: Plan, planned: PlanWorker, batch: int, *, even: bool, local: bool
) -> SimWorker:
    """A worker with its batch, and the codecs and depth of the plan's mode."""
    most = planned.max_batch or 0
    averaged = (plan.run.average_moments or 0) if plan.run is not None else 0
    mode = plan.mode_of(planned)
    up, down = (share + averaged for share in byte_shares(mode))
    in_parts = local or planned.max_accumulation > 1  # an even batch that is too large is computed at once
    return replace(
        worker,
        batch=batch,
        micro_batch=0 if even and not in_parts else planned.most_at_once,
        max_samples=0 if even else most,
        up_share=up,
        down_share=down,
        depth=_pipeline_depth(plan, planned),
        mode=mode,
        planned=planned if planned.batch else None,
        optimizer_seconds=0.0 if local or planned.fit is None else planned.fit.optimizer_seconds or 0.0,
    )


def _pipeline_depth(plan: Plan, worker: PlanWorker) -> int:
    """The steps under way of a worker in a pipeline: those planned; of a plan for none, 2 or more."""
    if plan.run is not None and plan.run.depth != 1:
        return plan.mode_of(worker).depth
    return max(2, worker.mode.depth) if worker.mode is not None else 2


def byte_shares(mode: Mode) -> tuple[float, float]:
    """Bytes of a worker's pushes and pulls, relative to those at 32 bits."""
    push, pull = bits_of(mode)
    return WIRE_BYTES[push] / WIRE_BYTES[32], WIRE_BYTES[pull] / WIRE_BYTES[32]


def _plan(source: StrPath, cluster: Cluster, profiles: dict[str, Profile], path: StrPath | None) -> Plan:
    """The plan in a file, or a new one."""
    if path is None:
        pace = policy_named(stated_policy(cluster.run), source=f"{source}: run.policy").pace
        return make_plan(cluster, [profiles[group.name] for group in cluster.worker], pace)
    plan = read_plan(path)
    found, expected = [w.name for w in plan.workers], [n for g in cluster.worker for n in g.worker_names()]
    if found != expected:
        raise InputError(str(path), "workers", ", ".join(found), f"the cluster's: {', '.join(expected)}")
    return plan


def _workers(cluster: Cluster, group: WorkerGroup, profile: Profile) -> dict[str, SimWorker]:
    simulation = cluster.simulation
    fit = fit_at(profile, group.batch_multiple)
    cost, rank = partial(predict_seconds, fit), PlannedRank(group.name, group, profile, fit)
    bandwidth, latency = (group.bandwidth, group.latency) if cluster.sync else (rank.bandwidth, rank.latency)
    host_of = {n: h.name for h in simulation.host for name in h.workers for n in cluster.named(name)}
    found = {}
    for name in group.worker_names():
        slow = tuple(
            Slowdown(h.at, h.at + h.seconds if h.seconds else math.inf, h.factor, h.added)
            for h in simulation.fault
            if h.kind == "slow" and name in cluster.named(h.worker)
        )
        shared = _shared_link(cluster, group) if name not in host_of else None
        found[name] = SimWorker(
            name,
            batch=1,
            cost=cost,
            jitter=simulation.jitter,
            slowdowns=slow,
            link_slowdowns=link_slowdowns(cluster, name),
            bandwidth=bandwidth or math.inf,
            latency=shared.latency_seconds if shared else latency or 0.0,
            host=shared.shared if shared else host_of.get(name, ""),
        )
    return found


def _shared_link(cluster: Cluster, group: WorkerGroup) -> LinkSpec | None:
    """The [[shared]] link that a group's transfers cross, not its own. Raises InputError for several."""
    found = shared_links(cluster, group)
    if len(found) > 1:
        names, expected = ", ".join(one.shared for one in found), "one link, or a [[simulation.host]]"
        raise InputError(CLUSTER_FILE, f"{group.name}.shares", names, expected)
    return found[0] if found else None


def _model_bytes(cluster: Cluster, profiles: list[Profile]) -> float:
    """Bytes of the model: as the file says, else of the largest model in the profiles."""
    if cluster.simulation.model_bytes is not None:
        return float(cluster.simulation.model_bytes)
    return float(FP32_BYTES * max(profile.model.parameters or 0 for profile in profiles))


@dataclass(frozen=True)
class Slowdown:
    """From `begin` to `end` (seconds) every step takes `factor` times as long, and `added` seconds more."""

    begin: float
    end: float = math.inf
    factor: float = 1.0
    added: float = 0.0


class DeviceModel:
    """Compute times of one worker: its cost model, times the jitter of real devices.

    seconds(b, t) = (T(b) + added(t)) * lognormal * uniform * half-normal * spike * drift(t) * co-tenants(t)

    Every worker has its own random stream, so that no draw depends on the order of events.
    cost: seconds of a step as a function of its batch, without jitter. jitter, slowdowns: what changes them.
    seed, rank: of the random stream. recorded: seconds of the first steps, which replace the model's.
    """

    def __init__(
        self,
        cost: Callable[[int], float],
        jitter: Jitter,
        slowdowns: tuple[Slowdown, ...],
        seed: int,
        rank: int,
        recorded: tuple[float, ...] = (),
    ) -> None:
        self._cost, self._jitter, self._slowdowns = cost, jitter, slowdowns
        self._draw = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(rank,)))
        self._phase = self._draw.uniform(0.0, 2.0 * math.pi)
        self._plain = not slowdowns and jitter.drift == 0.0
        self._factors: list[float] = []
        self._costs: dict[int, float] = {}
        self._recorded = list(reversed(recorded))

    def seconds(self, batch: int, now: float) -> float:
        """Seconds that a step of `batch` samples takes if it begins at `now` (seconds)."""
        if self._recorded:
            return self._recorded.pop()
        if not self._factors:
            self._factors = self._new_factors()
        if batch not in self._costs:
            self._costs[batch] = self._cost(batch)
        base, factor = self._costs[batch], self._factors.pop()
        if self._plain:
            return base * factor
        for s in self._slowdowns:
            if s.begin <= now < s.end:
                base, factor = base + s.added, factor * s.factor
        j = self._jitter
        return base * factor * (1.0 + j.drift * math.sin(2.0 * math.pi * now / j.drift_seconds + self._phase))

    def _new_factors(self) -> list[float]:
        """DRAWS factors: lognormal with mean 1, uniform around 1, half-normal above 1, and rare spikes."""
        j = self._jitter
        normal = self._draw.standard_normal(DRAWS)
        factors = np.exp(j.sigma * normal - 0.5 * j.sigma**2)
        factors *= self._draw.uniform(1.0 - j.spread, 1.0 + j.spread, DRAWS)
        factors = np.where(self._draw.random(DRAWS) < j.spike_share, factors * j.spike_factor, factors)
        if j.half_normal:
            factors *= 1.0 + j.half_normal * np.abs(self._draw.standard_normal(DRAWS))
        drawn: list[float] = factors.tolist()
        return drawn
