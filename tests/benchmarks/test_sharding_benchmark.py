"""The benchmarks of sharding: one untimed round of a small model; limits of a GPU that were planned right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import ddp
import gpu_sharding
import pytest
import sharding


@pytest.mark.thorough
def test_one_round() -> None:
    chosen = {"rounds": 1, "steps": 1, "width": 16, "blocks": 2, "batch": 4}
    found = ddp.launch("steps", chosen, [[], []], script="sharding_ranks.py")[0]
    assert len(found["seconds"]) == 7
    _, text = sharding.said(found)
    assert all(way in text for way in found["seconds"])


def test_what_is_said_of_bounds() -> None:
    names = ["DDP", "shard_optimizer, 1:1", "shard_optimizer, 2:1", "FSDP2", "shard, 1:1", "shard, 2:1"]
    seconds = {name: [[1.0, 1.0]] * 3 for name in names}
    seconds |= {name: [[0.7, 1.0], [0.75, 1.0], [0.9, 1.0]] for name in names[4:]}
    well, text = sharding.said({"seconds": seconds, "parameters": 25_000_000})
    assert well
    assert "0.750 of FSDP2" in text
    seconds["shard_optimizer, 2:1"] = [[1.06, 1.0]] * 3
    assert not sharding.said({"seconds": seconds, "parameters": 25_000_000})[0]


def test_limits_of_a_gpu_are_refused_without_one() -> None:
    command = [sys.executable, str(gpu_sharding.__file__), "--blocks", "4"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert done.stderr == "gpu_sharding: torch sees no CUDA device; the limits are those of a GPU\n"


@pytest.mark.parametrize("stage", gpu_sharding.LIMITS)
def test_limits_hold_unlike_shares_alone(stage: int) -> None:
    """By the planner's count, with a block's room for all else."""
    blocks, parameters = 24, 24_000_000
    limits = [each * parameters for each in gpu_sharding.LIMITS[stage]]
    room = 4 * parameters / blocks

    def fits(shares: Sequence[float]) -> bool:
        held = [gpu_sharding.planned_bytes(parameters, stage, share, blocks) for share in shares]
        return all(one + room <= limit for one, limit in zip(held, limits, strict=True))

    assert fits(gpu_sharding.SHARES[stage])
    assert not fits(gpu_sharding.EQUAL)
