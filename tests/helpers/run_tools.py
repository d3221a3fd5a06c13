"""Plans, setups and step records for tests of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pyps.formats import EvenSplit, HpsEstimate, Plan, PlannedRun, PlanWorker, R2spSchedule
from pyps.formats.records import Span, StepRecord
from pyps.formats.setup import RankSpec, RunSetup


def make_plan(batches: Sequence[int] = (5, 3), throttle: float = 1.0, feasible: bool = True) -> Plan:
    """A plan for workers device-0, device-1, ... with these batches; `feasible`: of the even split."""
    total = sum(batches)
    workers = [
        PlanWorker(
            rank=k,
            name=f"device-{k}",
            batch=b,
            micro_batch=b,
            accumulation=1,
            weight=b / total,
            predicted_seconds=0.1,
            throttle=throttle,
        )
        for k, b in enumerate(batches)
    ]
    return Plan(
        global_batch=total,
        iteration_seconds=0.1,
        lower_bound_seconds=0.09,
        even_split=EvenSplit(feasible=feasible, seconds=0.2 if feasible else None),
        speedup_over_even=2.0 if feasible else None,
        workers=workers,
        r2sp=make_ring(len(batches)),
        hps=HpsEstimate(),
        warnings=[],
    )


def make_local_plan(steps: Sequence[int] = (3, 2), size: int = 4, policy: str = "bsp") -> Plan:
    """A plan of so many local steps of `size` samples for each worker."""
    plan = make_plan([size * count for count in steps])
    workers = [
        msgspec.structs.replace(worker, micro_batch=size, accumulation=count, max_batch=size)
        for worker, count in zip(plan.workers, steps, strict=True)
    ]
    mode = PlannedRun(policy=policy, local_steps=sum(steps) // len(steps))
    return msgspec.structs.replace(plan, workers=workers, run=mode)


def make_ring(workers: int) -> R2spSchedule:
    """A schedule of R2SP with equal gaps, whose feasibility is unknown."""
    return R2spSchedule(
        feasible=None,
        period_seconds=0.1,
        gap_seconds=0.05,
        order=list(range(workers)),
        offsets_seconds=[0.05 * k for k in range(workers)],
    )


def make_setup(batches: Mapping[int, int], names: Sequence[str] = (), **changes: object) -> RunSetup:
    """The setup of a synchronous run of ranks with these batches, by rank; `changes`: of its fields."""
    ranks = tuple(RankSpec(k, names[k] if names else f"device-{k}", b, 0.1) for k, b in batches.items())
    setup = RunSetup(
        store="s",
        host="here",
        script="train.py",
        policy="bsp",
        even=False,
        seed=0,
        samples=1000,
        predicted_iteration_seconds=0.1,
        ranks=ranks,
    )
    return msgspec.structs.replace(setup, **changes)


def make_record(rank: int, step: int, batch: int, spans: list[Span], loss: float | None = None) -> StepRecord:
    """The record of a synchronous step that trained its whole batch; its version is `step`."""
    return StepRecord(
        rank=rank,
        pid=100 + rank,
        step=step,
        round=step,
        plan=0,
        first=0,
        samples=batch,
        batch=batch,
        version=step,
        staleness=0,
        sources=2,
        loss=loss,
        spans=spans,
    )
