"""The bytes that a plan says of each rank are those that it holds, and the most that a step takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sharding_bytes_jobs as jobs
import torch
from peak_bytes import peak_bytes
from ranks import Ranks

from pyps.formats import (
    Cluster,
    Device,
    Fit,
    Job,
    Memory,
    ModelInfo,
    Plan,
    Point,
    Profile,
    Sharding,
    SyncCost,
    WorkerGroup,
    write_json,
)
from pyps.profiler.fit import memory_model
from pyps.solver.plan import make_plan

PARAMETERS = sum(p.numel() for p in jobs.layers().parameters())
BATCHES = (64, 256, 512)
CLOSE = 0.02
WHOLE_BLOCKS = 3  # the one that computes, the next one, and one whose gradients are on their way


def measured_peak(batch: int) -> int:
    """The peak of a step of one process, as a profile has it."""

    def make() -> Any:
        model = jobs.layers()
        return jobs.planned_step(model, torch.optim.AdamW(model.parameters()), None, batch)

    return peak_bytes(make)


@pytest.fixture(scope="module")
def memory() -> Memory:
    found = memory_model([(batch, measured_peak(batch)) for batch in BATCHES], 0)
    assert found is not None
    return found


def device(memory: Memory, seconds: float, most: int) -> Profile:
    line = {"fixed_seconds": 0.01, "per_sample_seconds": seconds}
    return Profile(
        device=Device(name="d"),
        model=ModelInfo(name="layers", parameters=PARAMETERS, optimizer="AdamW"),
        points=[Point(batch=1, seconds=1.0)],
        fit=Fit(kind="affine", trusted_min_batch=1, trusted_max_batch=512, **line),
        memory=Memory(
            fixed_bytes=memory.fixed_bytes, bytes_per_sample=memory.bytes_per_sample, budget_bytes=most
        ),
    )


def planned(memory: Memory, stage: Any, parts: int = 1, each: int = 1) -> Plan:
    """The plan of two kinds of devices, of which the second is slower and has less memory."""
    batches = (900, 400) if stage == 0 else (640 // parts, 320 // parts)
    cluster = Cluster(
        job=Job(global_batch=800 * each),
        worker=[
            WorkerGroup(
                name=f"g{k}",
                count=each,
                profile=f"p{k}",
                bandwidth=1e9,
                max_batch=batch,
                max_accumulation=parts,
            )
            for k, batch in enumerate(batches)
        ],
        sync=SyncCost(kind="ring"),
        sharding=Sharding(
            stage=stage, shares="memory" if stage else "equal", whole=WHOLE_BLOCKS / jobs.BLOCKS
        ),
    )
    budgets = [int(memory.fixed_bytes + memory.bytes_per_sample * batch) for batch in batches]
    profiles = [device(memory, s, most) for s, most in zip((0.001, 0.003), budgets, strict=True)]
    return make_plan(cluster, profiles)


@pytest.mark.parametrize(("stage", "parts"), [(0, 1), (1, 1), (3, 2)])
def test_a_rank_holds_what_its_plan_says(
    ranks: Ranks, tmp_path: Path, memory: Memory, stage: Any, parts: int
) -> None:
    plan = planned(memory, stage, parts)
    write_json(tmp_path / "plan.json", plan)
    found = ranks.run(2, jobs.planned_bytes, str(tmp_path / "plan.json"), stage)
    for worker, held in zip(plan.workers, found, strict=True):
        assert worker.bytes is not None
        assert worker.accumulation == parts
        assert held.pop("peak") == pytest.approx(worker.bytes.total, rel=CLOSE)
        between = {kind: getattr(worker.bytes, kind) for kind in held}
        if stage == 3:  # no block is gathered then
            share = worker.share or 0.0
            between |= dict.fromkeys(("parameters", "gradients"), share * 4 * PARAMETERS)
        assert held == pytest.approx(between, rel=CLOSE)


def test_a_plan_is_a_bound_where_one_pass_frees_activations_as_gradients_come(
    ranks: Ranks, tmp_path: Path, memory: Memory
) -> None:
    plan = planned(memory, 3)
    write_json(tmp_path / "plan.json", plan)
    found = ranks.run(2, jobs.planned_bytes, str(tmp_path / "plan.json"), 3)
    for worker, held in zip(plan.workers, found, strict=True):
        assert worker.bytes is not None
        gathered = worker.bytes.parameters - (worker.share or 0.0) * 4 * PARAMETERS
        least = worker.bytes.total - worker.bytes.gradients - gathered
        assert (1 - CLOSE) * least <= held["peak"]
        assert held["peak"] <= (1 + CLOSE) * worker.bytes.total


def test_ddp_without_bucket_views_holds_its_gradients_twice(
    ranks: Ranks, tmp_path: Path, memory: Memory
) -> None:
    write_json(tmp_path / "plan.json", planned(memory, 0))
    for held in ranks.run(2, jobs.planned_bytes, str(tmp_path / "plan.json"), 0, False):
        assert held["gradients"] == 2 * held["parameters"]


def test_a_run_says_what_ranks_hold_beside_what_the_plan_says(
    ranks: Ranks, tmp_path: Path, memory: Memory
) -> None:
    plan = planned(memory, 1, each=2)
    write_json(tmp_path / "plan.json", plan)
    wanted = [f"{worker.bytes.total / 1e9:.3f}" for worker in plan.workers if worker.bytes is not None]
    for found in ranks.run(4, jobs.reported, str(tmp_path / "plan.json")):
        assert not found["copied"]
        first, *rows = found["report"].splitlines()
        assert first.endswith("held GB planned GB")
        held = [f"{one / 1e9:.3f}" for one in found["held"]]
        assert [row.split()[-2:] for row in rows] == [list(pair) for pair in zip(held, wanted, strict=True)]
        assert found["scalars"]["rank1/held_bytes"] == found["held"][1] > 1e7  # a process with torch in it
