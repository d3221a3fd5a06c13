"""A group and its profile as the solver has them: batches in the plan's unit, whole nodes.

A batch of s times as many units takes the same time and memory: T'(b) = T(b / s). So a profile in samples of
s tokens becomes one in tokens, and the profile of one of a node's s devices, which have equal batches, that
of the node. The node's batches are multiples of s, and each iteration also takes what its devices need to
reduce their gradients among themselves.
"""

from __future__ import annotations

from math import lcm

import msgspec

from pyps.errors import InputError
from pyps.formats import (
    Cluster,
    Fit,
    Forecast,
    LengthMoments,
    NoiseForecast,
    Plan,
    PlanWorker,
    Profile,
    R2spSchedule,
    WorkerGroup,
)
from pyps.solver.lengths import SampleLengths
from pyps.solver.shards import ModelState, of_shard

ALL_REDUCE = 2  # passes of the model over a ring; by the stage of its shards:
PASSES = {0: ALL_REDUCE, 1: ALL_REDUCE + 1, 2: 2, 3: 3}  # of 2 and 3: a reduction, and a gather or two


def scaled(profile: Profile, factor: int) -> Profile:
    """The same device, where a batch counts `factor` times as many."""
    if factor == 1:
        return profile
    points = [msgspec.structs.replace(point, batch=point.batch * factor) for point in profile.points]
    memory, fit = profile.memory, profile.fit
    if memory is not None:
        memory = msgspec.structs.replace(memory, bytes_per_sample=memory.bytes_per_sample / factor)
    return msgspec.structs.replace(
        profile,
        points=points,
        memory=memory,
        max_batch=None if profile.max_batch is None else profile.max_batch * factor,
        fit=None if fit is None else _scaled_fit(fit, factor),
    )


def _scaled_fit(fit: Fit, factor: int) -> Fit:
    return msgspec.structs.replace(
        fit,
        per_sample_seconds=fit.per_sample_seconds / factor,
        trusted_min_batch=fit.trusted_min_batch * factor,
        trusted_max_batch=fit.trusted_max_batch * factor,
        table=None if fit.table is None else [(batch * factor, s) for batch, s in fit.table],
        band=None if fit.band is None else [(batch * factor, low, high) for batch, low, high in fit.band],
    )


def tokens_worth(profile: Profile, lengths: LengthMoments | SampleLengths | None) -> int | None:
    """Return what a sample of the profile counts in tokens: of average cost, where the data's lengths are
    given and the profile knows the cost of each. None: the profile does not say how long its samples were.
    """
    tokens = profile.model.tokens_per_sample
    if lengths is None or profile.lengths is None or tokens is None:
        return tokens
    cost = profile.lengths.cost
    average = cost.mean(lengths.mean, lengths.mean_square)
    return max(1, round(float(cost.seconds(tokens)) / average * lengths.mean))


def units_each(cluster: Cluster, profile: Profile) -> int:
    """Return what a sample of a profile counts, in the job's unit."""
    return 1 if cluster.job.unit == "samples" else tokens_worth(profile, cluster.job.lengths) or 1


def sample_multiple(cluster: Cluster, group: WorkerGroup, profile: Profile) -> int:
    """Return of how many samples a group's batches are multiples; its batch_multiple is in the job's unit."""
    each = units_each(cluster, profile)
    return lcm(group.batch_multiple, each) // each


def of_one_rank(
    cluster: Cluster, group: WorkerGroup, profile: Profile, state: ModelState | None = None
) -> tuple[WorkerGroup, Profile]:
    """The group and the profile of one of its ranks, in the job's unit, with the memory of a shard.

    state: of a sharded model. Raises InputError where the profile lacks what that needs.
    """
    if state is not None:
        profile = of_shard(profile, state)
        group = msgspec.structs.replace(group, required=True)
    if group.parallel == "model" and group.devices > 1:
        group = _priced(group)
    if profile.min_batch is not None:
        least = profile.min_batch * units_each(cluster, profile)
        group = msgspec.structs.replace(group, min_batch=max(group.min_batch or 1, least))
    if cluster.job.unit == "samples":
        return group, profile
    tokens = tokens_worth(profile, cluster.job.lengths)
    if cluster.job.lengths is not None and profile.lengths is None:
        expected = "the cost of lengths, as job.lengths is set: pyps-profile --lengths"
        raise InputError(group.profile, "lengths", "nothing", expected)
    if tokens is None:
        expected = 'the tokens of a sample, as job.unit is "tokens" (1: its batches count tokens)'
        raise InputError(group.profile, "model.tokens_per_sample", "nothing", expected)
    multiple = lcm(group.batch_multiple, 1 if cluster.job.lengths is not None else tokens)
    profile = scaled(profile, tokens)
    held, moments = profile.lengths, cluster.job.lengths
    if held is not None and moments is not None and profile.memory is not None:
        of_token = held.per_token_bytes + held.per_square_bytes * moments.mean_square / moments.mean
        each = of_token or profile.memory.bytes_per_sample
        memory = msgspec.structs.replace(profile.memory, bytes_per_sample=each)
        profile = msgspec.structs.replace(profile, memory=memory)
    return msgspec.structs.replace(group, batch_multiple=multiple), profile


def _priced(group: WorkerGroup) -> WorkerGroup:
    """The group with the price and power of all devices of a worker."""
    price, watts = (None if x is None else x * group.devices for x in (group.price_per_hour, group.watts))
    return msgspec.structs.replace(group, price_per_hour=price, watts=watts)


def with_energy(group: WorkerGroup, price_per_kwh: float | None) -> WorkerGroup:
    """The group with the price of its energy in its price an hour."""
    if price_per_kwh is None or group.watts is None:
        return group
    energy = group.watts / 1000 * price_per_kwh
    return msgspec.structs.replace(group, price_per_hour=(group.price_per_hour or 0.0) + energy)


def of_node(group: WorkerGroup, profile: Profile, at_once: int) -> tuple[WorkerGroup, Profile]:
    """A node's group and profile. group, profile: of one of its ranks. at_once: its most samples at once."""
    n = group.ranks_each
    if n == 1:
        return group, profile
    group = msgspec.structs.replace(
        _priced(group),
        max_batch=at_once * n,
        min_batch=(group.min_batch or 1) * n,
        batch_multiple=group.batch_multiple * n,
        free_bytes=None,
    )
    return group, msgspec.structs.replace(scaled(profile, n), memory=None)


def inside_seconds(cluster: Cluster, group: WorkerGroup, model_bytes: float) -> float:
    """Seconds in which a node's devices reduce `model_bytes` of gradients over a ring among themselves."""
    n = group.ranks_each
    if n == 1 or group.inside_bandwidth is None:
        return 0.0
    a_step = group.inside_latency + model_bytes / n / group.inside_bandwidth
    return PASSES[cluster.sharding.stage if cluster.sharding else 0] * (n - 1) * a_step


def by_rank(plan: Plan, workers: list[list[PlanWorker]]) -> Plan:
    """The plan with the ranks of each worker in its place. workers: these ranks, not yet numbered."""
    if all(len(ranks) == 1 for ranks in workers):
        return plan
    first = [0]
    for ranks in workers:
        first.append(first[-1] + len(ranks))
    numbered = [one for ranks in workers for one in ranks]
    return msgspec.structs.replace(
        plan,
        workers=[msgspec.structs.replace(one, rank=k) for k, one in enumerate(numbered)],
        noise=None if plan.noise is None else _noise_by_rank(plan.noise, workers),
        r2sp=_turns_by_rank(plan.r2sp, first),
    )


def _noise_by_rank(noise: NoiseForecast, workers: list[list[PlanWorker]]) -> NoiseForecast:
    def expanded(forecast: Forecast) -> Forecast:
        pairs = zip(forecast.batches, workers, strict=True)
        batches = [batch // len(ranks) for batch, ranks in pairs for _ in ranks]
        return msgspec.structs.replace(forecast, batches=batches)

    nominal, robust = expanded(noise.nominal), expanded(noise.robust)
    return msgspec.structs.replace(noise, nominal=nominal, robust=robust)


def _turns_by_rank(ring: R2spSchedule, first: list[int]) -> R2spSchedule:
    """The ring in which the ranks of a worker share its turn. first: of each worker, its first rank."""
    order, offsets, turns = [], [], []
    ends = [*ring.offsets_seconds[1:], ring.period_seconds]
    seconds = ring.turn_seconds or [0.0] * len(ring.order)
    for worker, begin, end, turn in zip(ring.order, ring.offsets_seconds, ends, seconds, strict=True):
        ranks = range(first[worker], first[worker + 1])
        order += list(ranks)
        offsets += [begin + (end - begin) * k / len(ranks) for k in range(len(ranks))]
        turns += [turn / len(ranks)] * len(ranks)
    return msgspec.structs.replace(
        ring,
        order=order,
        offsets_seconds=offsets,
        turn_seconds=turns if ring.turn_seconds else [],
        gap_seconds=ring.period_seconds / max(len(order), 1),
    )
