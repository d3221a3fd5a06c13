"""The bytes that a plan says of each rank are those that it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sharding_jobs as jobs
from ranks import Ranks

from pyps.formats import (
    Cluster,
    Device,
    Fit,
    Job,
    Memory,
    ModelInfo,
    Point,
    Profile,
    Sharding,
    SyncCost,
    WorkerGroup,
    write_json,
)
from pyps.solver.plan import make_plan

PARAMETERS = sum(p.numel() for p in jobs.layers().parameters())
CLOSE = 0.02
KINDS = ("parameters", "gradients", "optimizer")


def device(seconds: float, each: float) -> Profile:
    """A device whose memory holds 100 kB and this many bytes for each parameter."""
    line = {"fixed_seconds": 0.01, "per_sample_seconds": seconds}
    return Profile(
        device=Device(name="d"),
        model=ModelInfo(name="layers", parameters=PARAMETERS, optimizer="AdamW"),
        points=[Point(batch=1, seconds=1.0)],
        fit=Fit(kind="affine", trusted_min_batch=1, trusted_max_batch=64, **line),
        memory=Memory(
            fixed_bytes=100_000 + 16 * PARAMETERS,
            bytes_per_sample=6 * 2 * 64 * 4.0,
            budget_bytes=100_000 + int(each * PARAMETERS),
        ),
    )


@pytest.mark.parametrize(("stage", "each"), [(1, (16, 12)), (3, (14, 6))])
def test_a_rank_holds_what_its_plan_says(
    ranks: Ranks, tmp_path: Path, stage: Any, each: tuple[float, float]
) -> None:
    cluster = Cluster(
        job=Job(global_batch=12),
        worker=[WorkerGroup(name=f"g{k}", profile=f"p{k}", bandwidth=1e9) for k in range(2)],
        sync=SyncCost(kind="ring"),
        sharding=Sharding(stage=stage, shares="memory", whole=0.0),
    )
    plan = make_plan(
        cluster, [device(seconds, own) for seconds, own in zip((0.001, 0.003), each, strict=True)]
    )
    write_json(tmp_path / "plan.json", plan)
    first, second = (worker.share or 0.0 for worker in plan.workers)
    assert first > 1.2 * second > 0
    found = ranks.run(2, jobs.planned_bytes, str(tmp_path / "plan.json"), stage)
    for worker, held in zip(plan.workers, found, strict=True):
        planned = {kind: getattr(worker.bytes, kind) for kind in KINDS}
        assert held == pytest.approx(planned, rel=CLOSE)
