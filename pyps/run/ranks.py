"""The ranks of a run: one RankSpec for each worker of the plan that has a batch, in the plan's order.

A rank may emulate a slower device (a throttle). Workers without a batch get no rank and do not run.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence

import msgspec

from pyps.errors import InputError
from pyps.formats import Fit, Plan, PlanWorker, read_cluster, read_profile
from pyps.formats.mode import FROM_PLAN
from pyps.formats.setup import RankSpec
from pyps.native.values import CostModel
from pyps.profiler.curve import fitted_profile
from pyps.profiler.fit import fit_points, predict_seconds
from pyps.profiler.multiples import fit_at
from pyps.solver.accumulate import seconds_in_parts
from pyps.solver.constrained import even_batches
from pyps.solver.costs import Line, Table
from pyps.solver.jobs.differences import differences
from pyps.solver.links import stated_links
from pyps.solver.online.device import planned_compute_seconds
from pyps.solver.ranks import prior_of
from pyps.solver.systems.r2sp import r2sp_schedule
from pyps.worker.run.settings import ThrottleSpec

SAME_COST = 1e-3  # relative: fits of the same points on unlike machines


def throttles(plan: Plan, where: str, source: str | os.PathLike[str] | None) -> list[ThrottleSpec | None]:
    """The device that each of the plan's workers emulates.

    source None: none. "plan": each worker takes as many times its own CPU time as its profile was throttled.
    A cluster file: each step lasts exactly as long as the cost model of the worker's profile says, provided
    that this machine is faster, and each transfer as long as the file's links take. Raises InputError where
    no profile was throttled, or where the cluster lacks one of the plan's workers.
    """
    if source is None:
        return [None] * len(plan.workers)
    if os.fspath(source) == FROM_PLAN:
        if all(worker.throttle == 1.0 for worker in plan.workers):
            expected = "a plan of profiles made with --throttle, or a cluster file instead of `plan`"
            raise InputError(where, "workers[*].throttle", "1 for all: no emulated device", expected)
        return [ThrottleSpec(factor=worker.throttle) for worker in plan.workers]
    specs: dict[str, ThrottleSpec | None] = {}
    cluster = read_cluster(source)
    for group in cluster.worker:
        fit = fit_at(fitted_profile(group.profile), group.batch_multiple)
        for name in group.worker_names():
            specs[name] = ThrottleSpec(fit=fit, links=stated_links(cluster, group, name))
    for k, worker in enumerate(plan.workers):
        if worker.name not in specs:
            names = ", ".join(list(specs)[:8])
            raise InputError(where, f"workers[{k}].name", repr(worker.name), f"one of {source}: {names}")
    return [specs[worker.name] for worker in plan.workers]


def throttles_by_rank(plan: Plan, specs: Sequence[ThrottleSpec | None]) -> dict[int, ThrottleSpec]:
    """The throttle of each rank of the store that has one. specs: what `throttles` gave."""
    used = [spec for worker, spec in zip(plan.workers, specs, strict=True) if worker.batch > 0]
    return {rank: spec for rank, spec in enumerate(used) if spec is not None}


def other_devices(
    plan: Plan, specs: Sequence[ThrottleSpec | None], source: str | os.PathLike[str] | None
) -> list[str]:
    """In what the devices of a run are not the plan's. specs, source: what `throttles` gave, and for what."""
    if source is None:
        emulated = any(worker.throttle != 1.0 for worker in plan.workers if worker.batch > 0)
        return ["its devices are emulated ones: add --throttle-from plan"] if emulated else []
    found = []
    for worker, spec in zip(plan.workers, specs, strict=True):
        if not worker.batch or worker.fit is None or spec is None or spec.fit is None:
            continue
        planned, now = (predict_seconds(one, worker.batch) for one in (worker.fit, spec.fit))
        if not math.isclose(planned, now, rel_tol=SAME_COST):
            found.append(f"{worker.name}'s profile has changed since: {now / planned:.2f} times the seconds")
    return found


def other_cluster(plan: Plan, source: str | os.PathLike[str] | None) -> list[str]:
    """In what the plan is not that of the cluster file whose devices are emulated. source: as for
    `throttles`.
    """
    if source is None or os.fspath(source) == FROM_PLAN:
        return []
    cluster = read_cluster(source)
    return differences(plan, cluster, [fitted_profile(group.profile) for group in cluster.worker])


def rank_specs(plan: Plan, specs: Sequence[ThrottleSpec | None]) -> list[RankSpec]:
    """The ranks of the store, in order; `specs`: the throttle of each of the plan's workers."""
    with_batch = [(w, spec) for w, spec in zip(plan.workers, specs, strict=True) if w.batch > 0]
    ranks = []
    for k, (w, spec) in enumerate(with_batch):
        seconds = w.predicted_seconds or None
        compute = planned_compute_seconds(w) if seconds else None
        ranks.append(RankSpec(k, w.name, w.batch, seconds, spec is not None, compute, w.link_seconds))
    return ranks


def new_rank(rank: int, profile: str | os.PathLike[str] | None) -> RankSpec:
    """A rank that the plan does not have, named after its device, or this machine."""
    name = read_profile(profile).device.name if profile is not None else socket.gethostname()
    return RankSpec(rank, name, 0)


def cost_model_of(profile: str | os.PathLike[str]) -> CostModel:
    """A profile's cost model as a line; of a table, one fitted to its knots. Raises InputError."""
    cost, most = prior_of(fitted_profile(profile))
    if isinstance(cost, Table):
        line = fit_points(cost.points[:-1] if len(cost.points) > 2 else cost.points)  # the last is far away
        cost = Line(line.fixed_seconds, line.per_sample_seconds, line.floor_seconds)
    if not isinstance(cost, Line):
        raise InputError(os.fspath(profile), "points", "none", "measured points")
    return CostModel(cost.fixed_seconds, cost.per_sample_seconds, cost.floor_seconds, most)


def even_plan(plan: Plan, where: str, fits: Sequence[Fit | None] = ()) -> Plan:
    """The same workers and global batch with equal batches; the first ones take the remainder.

    `fits`, one for each worker, give the predicted seconds; without them these are 0, which means unknown.
    Raises InputError if the even split breaks a bound.
    """
    n, B = len(plan.workers), plan.global_batch
    if not plan.even_split.feasible or plan.even_split.seconds is None or n > B:
        raise InputError(where, "even_split.feasible", "false", "an even split within all bounds")
    workers = []
    for k, (worker, batch) in enumerate(zip(plan.workers, even_batches(B, n), strict=True)):
        fit = fits[k] if fits else None
        workers.append(_with_batch(plan, worker, batch, fit, 0.0))
    return msgspec.structs.replace(
        plan,
        iteration_seconds=plan.even_split.seconds,
        speedup_over_even=1.0,
        workers=workers,
        r2sp=r2sp_schedule(range(n), [plan.even_split.seconds] * n, [None] * n),
    )


def with_split(plan: Plan, split: Sequence[int]) -> Plan:
    """The plan with the batches that its ranks have now, by store rank, in place of its own.

    Unchanged where a rank is away or left out, or has joined, so that others have its share.
    """
    planned = sum(worker.batch > 0 for worker in plan.workers)
    if sum(split) != plan.global_batch or len(split) != planned or not all(split):
        return plan
    batches = iter(split)
    workers = []
    for worker in plan.workers:
        batch = next(batches) if worker.batch > 0 else 0
        if batch != worker.batch:
            seconds = worker.predicted_seconds * batch / worker.batch
            worker = _with_batch(plan, worker, batch, worker.fit, seconds)
        workers.append(worker)
    return msgspec.structs.replace(plan, workers=workers)


def _with_batch(plan: Plan, worker: PlanWorker, batch: int, fit: Fit | None, seconds: float) -> PlanWorker:
    """A worker of a plan with another batch, and the transfers that it has; `seconds` it takes where no fit
    says so.
    """
    micro = min(batch, worker.micro_batch if worker.accumulation > 1 else worker.max_batch or batch)
    if fit is not None and batch:
        seconds = seconds_in_parts(fit, batch, micro)
        if plan.run is None or plan.mode_of(worker).depth == 1:
            seconds += worker.link_seconds
        elif worker.batch and worker.predicted_seconds > planned_compute_seconds(worker):  # transfers bind
            seconds = max(seconds, worker.predicted_seconds)
    return msgspec.structs.replace(
        worker,
        batch=batch,
        micro_batch=micro,
        accumulation=max(1, -(-batch // max(micro, 1))),
        weight=batch / plan.global_batch,
        predicted_seconds=seconds,
    )
