"""benchmarks/sharding.py runs, untimed: one round of a small model."""

from __future__ import annotations

import ddp
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
