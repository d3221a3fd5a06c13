"""Who runs as what: from a plan to one line for each rank, with the slower device that it may have to
emulate.

Ranks in the store count the plan's workers that have a batch; those that the plan leaves out do not run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pyps.errors import InputError
from pyps.formats import Fit, Plan, PlanWorker, read_cluster, read_profile
from pyps.profiler.fit import predict_seconds
from pyps.profiler.select import fit_of
from pyps.solver.plan import even_batches
from pyps.worker.settings import ThrottleSpec

FROM_PLAN = "plan"


@dataclass(frozen=True)
class Place:
    """One rank of a run; `throttle` is None where the real device sets the pace."""

    rank: int
    name: str
    batch: int
    predicted_seconds: float | None
    throttle: ThrottleSpec | None

    def throttle_json(self) -> str:
        """For PYPS_THROTTLE: {"factor": F} or {"fit": {...}}, empty without a throttle."""
        if self.throttle is None:
            return ""
        plain = msgspec.to_builtins(self.throttle)
        return msgspec.json.encode({k: v for k, v in plain.items() if v is not None}).decode()


def throttles(plan: Plan, where: str, source: str | os.PathLike[str] | None) -> list[ThrottleSpec | None]:
    """How each of the plan's workers is emulated.

    source None: not at all. "plan": by the factor that its profile was made with, on the CPU time of this
    machine. A cluster file: by the cost model of the profile that the file names for it, exactly, whatever
    this machine's speed (as long as it is the faster one). Raises InputError where nothing is to be emulated,
    or the cluster is not the plan's.
    """
    if source is None:
        return [None] * len(plan.workers)
    if os.fspath(source) == FROM_PLAN:
        if all(worker.throttle == 1.0 for worker in plan.workers):
            expected = "a plan of profiles made with --throttle, or a cluster file instead of `plan`"
            raise InputError(where, "workers[*].throttle", "1 for all: no emulated device", expected)
        return [ThrottleSpec(factor=worker.throttle) for worker in plan.workers]
    specs: dict[str, ThrottleSpec | None] = {}
    for group in read_cluster(source).worker:
        profile = read_profile(group.profile)
        fit = fit_of(profile)
        specs |= dict.fromkeys(group.worker_names(), ThrottleSpec(fit=fit))
    for k, worker in enumerate(plan.workers):
        if worker.name not in specs:
            names = ", ".join(list(specs)[:8])
            raise InputError(where, f"workers[{k}].name", repr(worker.name), f"one of {source}: {names}")
    return [specs[worker.name] for worker in plan.workers]


def line_up(plan: Plan, specs: Sequence[ThrottleSpec | None]) -> list[Place]:
    """The ranks of the store, in order: the plan's workers with a batch."""
    chosen = [(w, spec) for w, spec in zip(plan.workers, specs, strict=True) if w.batch > 0]
    return [
        Place(k, w.name, w.batch, w.predicted_seconds or None, spec) for k, (w, spec) in enumerate(chosen)
    ]


def even_plan(plan: Plan, where: str, fits: Sequence[Fit | None] = ()) -> Plan:
    """The same workers and global batch with batches as equal as they can be, the first ones taking what is
    over.

    `fits`, one for each worker, give the predicted seconds; without, they are 0: not known. Raises InputError
    if the even split breaks a bound.
    """
    n, B = len(plan.workers), plan.global_batch
    if not plan.even_split.feasible or plan.even_split.seconds is None or n > B:
        raise InputError(where, "even_split.feasible", "false", "an even split within all bounds")
    workers = []
    for k, (worker, batch) in enumerate(zip(plan.workers, even_batches(B, n), strict=True)):
        fit = fits[k] if fits else None
        seconds = predict_seconds(fit, batch) if fit is not None else 0.0
        workers.append(_with_batch(worker, batch, B, seconds))
    return msgspec.structs.replace(
        plan, iteration_seconds=plan.even_split.seconds, speedup_over_even=1.0, workers=workers
    )


def _with_batch(worker: PlanWorker, batch: int, global_batch: int, seconds: float) -> PlanWorker:
    return msgspec.structs.replace(
        worker,
        batch=batch,
        micro_batch=batch,
        accumulation=1,
        weight=batch / global_batch,
        predicted_seconds=seconds,
    )
