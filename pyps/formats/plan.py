"""pyps.plan/1: who computes how much."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from pyps.errors import InputError
from pyps.formats.kinds import Batch, Elapsed, Factor, Name, Seconds, Share

PLAN_SCHEMA = "pyps.plan/1"


class EvenSplit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same batch for everyone, for comparison; `seconds` is absent where it breaks a bound."""

    feasible: bool
    seconds: Seconds | None = None


class PlanWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's share: batch 0 means left out; weight = batch / global batch.

    throttle repeats the profile's, so that a run can emulate the devices that the plan was made for.
    """

    rank: Share
    name: Name
    batch: Share
    micro_batch: Share
    accumulation: Share
    weight: Annotated[float, Meta(ge=0, le=1)]
    predicted_seconds: Elapsed
    fit_error: Elapsed | None = None
    throttle: Factor = 1.0


class R2spSchedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evenly gapped turns in the ring `order` (ranks); feasible is null where no bandwidth is known."""

    feasible: bool | None
    period_seconds: Seconds
    gap_seconds: Seconds
    order: list[Share]
    offsets_seconds: list[Elapsed]


class HpsEstimate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Period with and without overlapping transfer and compute; empty where no bandwidth is known."""

    compute_seconds: Seconds | None = None
    transfer_seconds: Elapsed | None = None
    serial_seconds: Seconds | None = None
    pipelined_seconds: Seconds | None = None


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of the planner; `lower_bound_seconds` is the optimum with fractional batches."""

    schema: Literal["pyps.plan/1"] = "pyps.plan/1"
    global_batch: Batch
    iteration_seconds: Seconds
    lower_bound_seconds: Elapsed
    even_split: EvenSplit
    speedup_over_even: Seconds | None
    workers: Annotated[list[PlanWorker], Meta(min_length=1)]
    r2sp: R2spSchedule
    hps: HpsEstimate
    warnings: list[str]


def check_plan(where: str, plan: Plan) -> None:
    total = 0
    names: set[str] = set()
    for k, worker in enumerate(plan.workers):
        if worker.rank != k:
            raise InputError(where, f"workers[{k}].rank", str(worker.rank), f"{k}: ranks count from 0")
        if worker.name in names:
            raise InputError(
                where, f"workers[{k}].name", f"{worker.name!r} a second time", "a name of its own"
            )
        names.add(worker.name)
        if worker.micro_batch * worker.accumulation != worker.batch:
            found = f"{worker.micro_batch} x {worker.accumulation}"
            raise InputError(
                where, f"workers[{k}].micro_batch", found, f"micro_batch x accumulation = {worker.batch}"
            )
        if not math.isclose(worker.weight, worker.batch / plan.global_batch, rel_tol=1e-9, abs_tol=1e-12):
            expected = f"batch / global_batch = {worker.batch / plan.global_batch}"
            raise InputError(where, f"workers[{k}].weight", str(worker.weight), expected)
        total += worker.batch
    if total != plan.global_batch:
        raise InputError(
            where, "global_batch", str(plan.global_batch), f"the sum of the workers' batches, {total}"
        )
