"""Turns a cluster file and its profiles into the ranks to plan, and these into the arrays of the solvers.

A rank's largest batch is the least that the cluster file, the profile and its memory model allow, times the
micro-batches that it may accumulate, or the local steps that it may take. Its time is the fitted one plus, if
its link is known, a push and a pull, with the bytes of its codecs; in a pipeline these overlap. Over a
[[shared]] link the transfers of a round's workers meet, first all pushes and then all pulls; those of other
paces do not, and pushes leave pulls their bandwidth. With [sync] the transfers are counted there instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Cluster, Fit, Profile, WorkerGroup, read_profile
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.mode import ROUND, Mode, Pace
from pyps.profiler.curve import check_whole, fit_of
from pyps.profiler.multiples import at_multiple, kept_multiple
from pyps.solver.accumulate import accumulated
from pyps.solver.constrained import ConstrainedProblem, Limit, Resource
from pyps.solver.costs import Cost, Costs, Floats, cost_of
from pyps.solver.exact.minmax import Bools, Problem
from pyps.solver.exact.parts import InParts, at_once_within
from pyps.solver.lengths import SampleLengths
from pyps.solver.links import (
    BYTES_PER_PARAMETER,
    WIRE_BYTES,
    LinkCost,
    link_cost,
    overlapped_seconds,
    shared_links,
    transfer_seconds,
)
from pyps.solver.local_steps import local_groups, round_samples
from pyps.solver.mode import bits_of, mode_of
from pyps.solver.motion import Trip
from pyps.solver.shards import Card, ModelState, pool_of, states_of
from pyps.solver.sync import Sync
from pyps.solver.units import (
    ALL_REDUCE,
    PASSES,
    inside_seconds,
    of_node,
    of_one_rank,
    sample_multiple,
    scaled,
    tokens_worth,
    units_each,
    with_energy,
)

STORE = "store"  # how a link was measured that is a store on the worker's own machine
TURNS = "turns"  # the name of the server's link, which one worker at a time uses


@dataclass(frozen=True)
class PlannedRank:
    """A rank to plan: its name, its group in the cluster file, its profile, and the fit in that profile.

    A node is planned as one rank, with the group and profile of the whole (pyps.solver.units); `one` has
    those of a rank of it. quantile: plan for this quantile of its times; None: for the job's, if that names
    one. inside_seconds: in which a node's devices reduce their gradients among themselves.
    averaged: fp32 values of each parameter that travel with it. multiple: of how many samples its
    micro-batches are multiples, as its device is slower off these and its fit says nothing of others.
    state: of a sharded model.
    """

    name: str
    group: WorkerGroup
    profile: Profile
    fit: Fit
    quantile: float | None = None
    one: tuple[WorkerGroup, Profile] | None = None
    inside_seconds: float = 0.0
    averaged: int = 0
    multiple: int = 1
    state: ModelState | None = None

    @property
    def card(self) -> Card | None:
        """Its card, where it holds part of a sharded model; of a node, that of a rank of it."""
        group, profile = self.one or (self.group, self.profile)
        if self.state is None or profile.memory is None:
            return None
        budget = profile.memory.budget_bytes if group.free_bytes is None else group.free_bytes
        return Card(self.state, profile.memory, budget)

    @property
    def one_profile(self) -> Profile:
        """The profile of the rank, or of a rank of the node."""
        return self.profile if self.one is None else self.one[1]

    @property
    def link(self) -> LinkCost | None:
        """The cost of its link to the store; None if the bandwidth or the model's size is unknown."""
        measured = self.profile.link if self.group.bandwidth is None else None
        duplex = measured is None or measured.via != STORE
        return link_cost(self.profile.model.parameters, self.bandwidth, self.latency, duplex, self.averaged)

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


def planned_ranks(
    cluster: Cluster, profiles: Sequence[Profile], multiples: Sequence[int] | None = None
) -> list[PlannedRank]:
    """The ranks of a cluster in file order, a node as one.

    profiles: one a group. multiples: of the samples of each group's micro-batches; None: as the profiles
    show. Raises InputError if a fit is missing, or what the job's unit or sharding needs.
    """
    ranks = []
    multiples = multiples_of(cluster, profiles) if multiples is None else multiples
    pairs = zip(profiles, multiples, strict=True)
    profiles = [_steps_once(cluster, at_multiple(profile, each)) for profile, each in pairs]
    parts = cluster.run.accumulation or 1
    states = states_of(cluster, profiles)
    each_group = zip(cluster.worker, profiles, states, strict=True)
    of_ranks = [of_one_rank(cluster, group, profile, state) for group, profile, state in each_group]
    at_once = [max_batch_of(group, profile) for group, profile in of_ranks]
    _check_least(cluster, of_ranks)
    if cluster.job.unit == "tokens":  # micro-batches have whole samples, too
        tokens = [units_each(cluster, profile) for _, profile in of_ranks]
        at_once = [most // each * each for most, each in zip(at_once, tokens, strict=True)]
        bounded = [
            msgspec.structs.replace(group, max_batch=most)
            for (group, _), most in zip(of_ranks, at_once, strict=True)
        ]
        of_ranks = [(group, profile) for group, (_, profile) in zip(bounded, of_ranks, strict=True)]
    cluster = msgspec.structs.replace(cluster, worker=[group for group, _ in of_ranks])
    fits = [_fit_of(group, profile) for group, profile in of_ranks]
    least = [(profile.min_batch or 1) * units_each(cluster, profile) for _, profile in of_ranks]
    groups = local_groups(cluster, at_once, [cost_of(fit) for fit in fits], least)
    found = zip(groups, of_ranks, at_once, multiples, states, strict=True)
    for group, (_, profile), most, multiple, state in found:
        group = msgspec.structs.replace(group, max_accumulation=max(parts, group.max_accumulation))
        node, whole = of_node(group, profile, most // group.batch_multiple * group.batch_multiple)
        assert whole.fit is not None
        rank = PlannedRank(
            group.name,
            node,
            whole,
            whole.fit,
            one=(group, profile),
            averaged=cluster.run.average_moments or 0,
            multiple=multiple if multiple * units_each(cluster, profile) <= most else 1,
            state=state,
        )
        synchronised = cluster.sync is not None and cluster.sync.kind != "none"
        if group.ranks_each > 1 and synchronised and group.inside_bandwidth is not None:
            size = float(BYTES_PER_PARAMETER * _parameters(rank))
            rank = replace(rank, inside_seconds=inside_seconds(cluster, group, size))
        rank = replace(rank, group=with_energy(rank.group, cluster.job.price_per_kwh))
        ranks += [replace(rank, name=name) for name in group.unit_names()]
    return ranks


def multiples_of(cluster: Cluster, profiles: Sequence[Profile]) -> list[int]:
    """The multiple that each group's device shows, where its batches keep to it; else 1."""
    pairs = zip(cluster.worker, profiles, strict=True)
    return [kept_multiple(profile, sample_multiple(cluster, group, profile)) for group, profile in pairs]


def _steps_once(cluster: Cluster, profile: Profile) -> Profile:
    """The profile with the optimizer's time in its fit; without it where each local step takes one."""
    if profile.fit is None:
        return profile
    fit = fit_of(profile)
    if cluster.run.local_steps is not None:
        fit = msgspec.structs.replace(fit, optimizer_seconds=None)
    return msgspec.structs.replace(profile, fit=fit)


def _check_least(cluster: Cluster, groups: Sequence[tuple[WorkerGroup, Profile]]) -> None:
    """Raise InputError for a group whose min_batch is above what its profile allows: it would be left out."""
    for k, (group, profile) in enumerate(groups):
        parts = max(group.max_accumulation, cluster.run.accumulation or 1)
        most = None if profile.max_batch is None else profile.max_batch * parts
        if group.min_batch is None or most is None or group.required or cluster.run.local_steps:
            continue  # a required one is refused, with a remedy
        if group.min_batch > most:
            expected = f"at most {most}, as {group.profile} has max_batch = {profile.max_batch}"
            field = f"worker[{k}].min_batch, of {group.name!r}"
            raise InputError(CLUSTER_FILE, field, str(group.min_batch), expected)


def _fit_of(group: WorkerGroup, profile: Profile) -> Fit:
    check_whole(group.profile, profile)
    if profile.fit is None:
        raise InputError(group.profile, "fit", "nothing", "a fitted cost model")
    return profile.fit


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
    """The min-max problem of a cluster's ranks, without transfers. factors: multiply the times, one entry a
    rank.

    Raises Infeasible naming a required worker that can take no batch.
    """
    _check_required(ranks)
    factors = factors or [1.0] * len(ranks)
    at_once = np.array([most_at_once(cluster, rank) for rank in ranks], np.int64)
    repeats = np.array([rank.group.max_accumulation for rank in ranks], np.int64)
    pool, within = pool_of([rank.card for rank in ranks]), None
    if pool is not None and (repeats > 1).any():
        workers = _in_parts(cluster, ranks, factors, at_once.tolist())
        within = at_once_within(workers, round_samples(cluster), pool.at_most)
        pool, at_once = None, at_once if within is None else within
    if cluster.run.local_steps is None:
        costs = Costs.stack(_accumulated(cluster, ranks, factors, at_once.tolist()))
    else:  # a local step's size is given
        costs = Costs.stack([cost_of(rank.fit, f) for rank, f in zip(ranks, factors, strict=True)])
        costs = costs.accumulated(np.maximum(at_once, 1))
        at_once = at_once if costs.micro is None else np.minimum(costs.micro, at_once)
    most = np.minimum(at_once * repeats, MAX_BATCH)
    inside = np.array([rank.inside_seconds for rank in ranks])
    if inside.any():
        costs = replace(costs, transfer=inside)
    problem = Problem.of(
        costs,
        round_samples(cluster),
        min_batch=[rank.group.min_batch or 1 for rank in ranks],
        max_batch=most,
        batch_multiple=[rank.group.batch_multiple for rank in ranks],
        required=[rank.group.required for rank in ranks],
    )
    return replace(problem, pool=pool, at_once=within, local_steps=cluster.run.local_steps or 1)


def _in_parts(
    cluster: Cluster, ranks: Sequence[PlannedRank], factors: Sequence[float], at_once: Sequence[int]
) -> list[InParts]:
    """The ranks with what their micro-batches take of the memory of all."""
    return [
        InParts(
            cost=cost_of(rank.fit, factor),
            once=factor * (rank.fit.optimizer_seconds or 0.0),
            at_once=most,
            unit=unit_of(cluster, rank) if rank.group.max_accumulation > 1 else 1,
            repeats=rank.group.max_accumulation,
            least=rank.group.min_batch or 1,
            multiple=rank.group.batch_multiple,
            each=rank.card.memory.bytes_per_sample if rank.card is not None else 0.0,
        )
        for rank, factor, most in zip(ranks, factors, at_once, strict=True)
    ]


def _accumulated(
    cluster: Cluster, ranks: Sequence[PlannedRank], factors: Sequence[float], at_once: Sequence[int]
) -> list[Cost]:
    """The cost of each rank's batch in the micro-batches that it may use. at_once: samples of each rank."""
    found: dict[tuple[int, float, int, int, int, int], Cost] = {}
    keys = []
    for rank, factor, most in zip(ranks, factors, at_once, strict=True):
        repeats, multiple, unit = (
            rank.group.max_accumulation,
            rank.group.batch_multiple,
            unit_of(cluster, rank),
        )
        keys.append((id(rank.fit), factor, most, repeats, multiple, unit))
        if keys[-1] not in found:
            cost = cost_of(rank.fit, factor)
            splits = repeats > 1 and most >= unit and most * repeats >= multiple
            total = round_samples(cluster)
            once = factor * (rank.fit.optimizer_seconds or 0.0)
            parts = accumulated(cost, once, most, repeats, unit, multiple, total) if splits else cost
            found[keys[-1]] = parts
    return [found[key] for key in keys]


def unit_of(cluster: Cluster, rank: PlannedRank) -> int:
    """Return what a micro-batch of a rank has whole: samples, or the multiples of them that its device needs,
    in the job's unit, of each rank of a node.
    """
    return rank.group.ranks_each * units_each(cluster, rank.profile) * rank.multiple


def most_at_once(cluster: Cluster, rank: PlannedRank) -> int:
    """The most samples that a rank computes at once: in micro-batches, whole ones."""
    most = max_batch_of(rank.group, rank.profile)
    if rank.group.max_accumulation == 1 or cluster.run.local_steps is not None:
        return most
    unit = unit_of(cluster, rank)
    return most // unit * unit


def links_of(cluster: Cluster, ranks: Sequence[PlannedRank]) -> list[list[LinkCost]]:
    """The links that each rank's transfers cross: its shared links, or its own; with [sync], none."""
    if cluster.sync is not None:
        return [[] for _ in ranks]
    found = []
    for rank in ranks:
        shared = shared_links(cluster, rank.group)
        links = [
            link_cost(_parameters(rank), x.bytes_per_second, x.latency_seconds, averaged=rank.averaged)
            for x in shared
        ]
        found.append([link for link in links or [rank.link] if link is not None])
    return found


def _check_required(ranks: Sequence[PlannedRank]) -> None:
    groups = {rank.group.name: rank for rank in ranks}
    for k, rank in enumerate(groups.values()):
        group = rank.group
        at_once, multiple = max_batch_of(group, rank.profile), group.batch_multiple
        most, least = at_once * group.max_accumulation, -(-(group.min_batch or 1) // multiple) * multiple
        if group.required and most // multiple * multiple < least and rank.card is not None:
            raise Infeasible(f"worker[{k}] {group.name!r} has no memory for a batch of {least}")
        if group.required and most // multiple * multiple < least:
            raise Infeasible(
                f"worker[{k}] {group.name!r} is required, but its batch must be at least {least} "
                f"and at most {most} in steps of {multiple}"
            )


def sync_of(cluster: Cluster, ranks: Sequence[PlannedRank], modes: Sequence[Mode]) -> Sync:
    """Return how gradients are synchronised, with the bytes of these codecs.

    Raises InputError if a bandwidth or the model's size is missing.
    """
    given = cluster.sync
    if given is None or given.kind == "none":
        return Sync.of("none", len(ranks))
    latency, message = [], []
    for rank, mode in zip(ranks, modes, strict=True):
        bandwidth = rank.bandwidth if rank.bandwidth is not None else given.bandwidth
        if bandwidth is None:
            expected = "bytes a second, here, in [sync], or measured by pyps-profile link"
            raise InputError(CLUSTER_FILE, f"{rank.group.name}.bandwidth", "nothing", expected)
        latency.append(rank.latency if rank.latency is not None else given.latency)
        bytes_each_way = sum(WIRE_BYTES[bits] for bits in bits_of(mode)) / 2 + 4 * rank.averaged
        message.append(bytes_each_way * _parameters(rank) / bandwidth)
    flat = ranks[0].group.ranks_each == 1  # otherwise the shards are inside each node
    stage = 0 if cluster.sharding is None else cluster.sharding.stage
    found = Sync.of(
        given.kind,
        len(ranks),
        latency,
        message,
        overlap=given.overlap,
        tail=given.tail,
        passes=PASSES[stage] if flat else ALL_REDUCE,
        replicas=cluster.sharding.replicas if cluster.sharding is not None and flat else 1,
    )
    return replace(found, equal_passes=ALL_REDUCE if stage == 1 else 0)


def _parameters(rank: PlannedRank) -> int:
    found = rank.profile.model.parameters
    if found is None:
        expected = "the model's number of parameters"
        raise InputError(rank.group.profile, "model.parameters", "nothing", expected)
    return found


def constrained_problem_of(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    factors: Sequence[float] = (),
    pace: Pace = ROUND,
    modes: Sequence[Mode] | None = None,
) -> ConstrainedProblem:
    """The whole problem of a cluster's ranks: batches, transfers, synchronisation and side constraints.

    cluster, ranks: what is planned. factors: multiply the times, one entry a rank. pace: of the policy.
    modes: of each rank; None: the fewest bits and the deepest pipeline that [run] allows.
    """
    modes = [mode_of(cluster, pace).fastest] * len(ranks) if modes is None else modes
    limits = [
        Limit(key, need, at_most)
        for key in ("price_per_hour", "watts")
        if (at_most := getattr(cluster.limits, key)) is not None and (need := needs(ranks, key)) is not None
    ]
    limits += _device_limits(cluster, ranks)
    labels = dict.fromkeys(rank.group.together for rank in ranks if rank.group.together is not None)
    together = [np.flatnonzero([rank.group.together == label for rank in ranks]) for label in labels]
    problem = problem_of(cluster, ranks, factors)
    constrained = ConstrainedProblem(
        problem,
        sync_of(cluster, ranks, modes),
        tuple(limits),
        together=tuple(group for group in together if len(group) > 1),
        pace=pace,
        link_seconds=problem.costs.transfer,
        ranks_each=np.array([rank.group.ranks_each for rank in ranks], np.int64),
    )
    return _with_transfers(constrained, cluster, ranks, modes)


def _device_limits(cluster: Cluster, ranks: Sequence[PlannedRank]) -> list[Limit]:
    """For devices that groups share: the workers in use have no more of them."""
    found = []
    for shared in cluster.shared:
        if shared.devices is not None:
            each = [rank.group.devices if shared.name in rank.group.shares else 0 for rank in ranks]
            table = f"shared.{shared.name}"
            found.append(Limit("devices", np.array(each, float), shared.devices, table))
    return found


def needs(ranks: Sequence[PlannedRank], key: str) -> Floats | None:
    """price_per_hour or watts of every rank; None if one rank states none."""
    values = [getattr(rank.group, key) for rank in ranks]
    return None if None in values else np.array(values, float)


def _with_transfers(
    constrained: ConstrainedProblem,
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    modes: Sequence[Mode],
) -> ConstrainedProblem:
    """The problem with every rank's transfers, in its mode: in its cost, and on the links that are shared."""
    links, shares = links_of(cluster, ranks), [set(rank.group.shares) for rank in ranks]
    depths = np.array([mode.depth for mode in modes])
    waits = constrained.pace.kind == "round" and not (depths > 1).any()  # transfers meet after compute
    shared = [one for one in cluster.shared if one.bandwidth is not None and cluster.sync is None]
    on_shared = np.array([bool(names & {one.name for one in shared}) for names in shares])
    seconds = np.array([transfer_seconds(x, *bits_of(m)) for x, m in zip(links, modes, strict=True)])
    resources = _resources(cluster, shares, ranks, modes, overlaps=not waits)
    if constrained.pace.kind == "turns" and seconds.any():
        resources.append(Resource(TURNS, np.ones(len(ranks), bool), seconds, overlaps=True))
    if not seconds.any():
        return replace(constrained, resources=tuple(resources))
    latency = np.array([2 * sum(link.latency_seconds for link in crossed) for crossed in links])
    own = np.where(waits & on_shared, latency, seconds)  # the rest takes turns with others'
    added = np.where(depths > 1, 0.0, own)
    least = [
        overlapped_seconds(crossed, *bits_of(mode), mode.depth) if mode.depth > 1 else 0.0
        for crossed, mode in zip(links, modes, strict=True)
    ]
    costs = replace(
        constrained.problem.costs,
        transfer=added if added.any() else None,
        overlap=np.array(least) if any(least) else None,
    )
    problem = replace(constrained.problem, costs=costs)
    trips = _trips(cluster, links, ranks, modes) if on_shared.any() else ()
    return replace(constrained, problem=problem, resources=tuple(resources), link_seconds=own, trips=trips)


def _trips(
    cluster: Cluster,
    links: Sequence[Sequence[LinkCost]],
    ranks: Sequence[PlannedRank],
    modes: Sequence[Mode],
) -> tuple[Trip, ...]:
    """Every rank's transfers; none where one crosses several shared links. links: that each crosses."""
    found, names = [], dict[str, int]()
    for k, (crossed, rank, mode) in enumerate(zip(links, ranks, modes, strict=True)):
        if len(crossed) > 1:
            return ()
        link = crossed[0] if crossed else LinkCost(0.0, 0.0)
        push, pull = bits_of(mode)
        up, down, latency = link.one_way_seconds(push), link.one_way_seconds(pull), link.latency_seconds
        if not link.duplex:  # one transfer follows the other
            up, down, latency = link.seconds(push, pull), 0.0, 0.0
        shared = [one.shared for one in shared_links(cluster, rank.group)]
        number = names.setdefault(shared[0], len(ranks) + len(names)) if shared else k
        found.append(Trip(number, up, down, latency, mode.depth))
    return tuple(found)


def _resources(
    cluster: Cluster,
    shares: Sequence[set[str]],
    ranks: Sequence[PlannedRank],
    modes: Sequence[Mode],
    overlaps: bool,
) -> list[Resource]:
    """The shared links and hosts; of a link where transfers do not meet, each direction.

    cluster: names them. shares: the names of each rank. ranks, modes: of which the transfers are. overlaps:
    transfers do not meet.
    """
    found = []
    for shared in cluster.shared:
        if shared.bandwidth is None and shared.samples_per_second is None:
            continue
        sharing: Bools = np.array([shared.name in names for names in shares])
        ways = np.zeros((2, len(ranks)))
        if shared.bandwidth is not None:
            for k in np.flatnonzero(sharing).tolist():
                if link := link_cost(
                    _parameters(ranks[k]), shared.bandwidth, shared.latency, averaged=ranks[k].averaged
                ):
                    ways[:, k] = [link.one_way_seconds(bits) for bits in bits_of(modes[k])]
        if overlaps and shared.bandwidth is not None:
            found += [Resource(shared.name, sharing, way, None, True) for way in ways]
        else:
            found.append(Resource(shared.name, sharing, ways.sum(0), overlaps=overlaps))
        if shared.samples_per_second is not None:
            found[-1] = replace(found[-1], samples_per_second=shared.samples_per_second)
    return found


def prior_of(
    profile: Profile | str | os.PathLike[str] | None, lengths: SampleLengths | None = None
) -> tuple[Cost | None, int]:
    """The device's cost model and its largest batch; None and no bound without a profile.

    lengths: of samples; batches then count tokens of average cost. Fits the measured points if the profile
    has no fit. Raises InputError for a file that is no profile.
    """
    if profile is None:
        return None, MAX_BATCH
    if not isinstance(profile, Profile):
        profile = read_profile(Path(profile))
    if lengths is not None:
        profile = scaled(profile, tokens_worth(profile, lengths) or lengths.each)
    fit = fit_of(profile)
    return cost_of(fit), max_batch_of(WorkerGroup(name="rank", profile="profile"), profile)
