"""FSDP2 runs that stop and go on: bit for bit with as many ranks, and every sample once with others."""

from __future__ import annotations

from pathlib import Path

import fsdp_jobs as jobs
import pytest
import torch
from ranks import Ranks
from sampled import sampled


@pytest.mark.parametrize(("split", "replicas"), sampled([([5, 3, 2], 1), ([4, 3, 2, 3], 2)], 1))
def test_a_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, split: list[int], replicas: int) -> None:
    """Also with replicas of shards (HSDP), and unlike numbers of micro-batches."""
    count = len(split)
    whole = ranks.run(count, jobs.train, tmp_path / "a", 9, split, replicas)
    before = ranks.run(count, jobs.train, tmp_path / "b", 6, split, replicas, 4)
    after = ranks.run(count, jobs.train, tmp_path / "b", 9, split, replicas, 0, True)
    for rank in range(count):
        assert whole[rank]["taken"] == before[rank]["taken"][:4] + after[rank]["taken"]
        for one, other in zip(whole[rank]["model"], after[rank]["model"], strict=True):
            assert torch.equal(one, other)


def test_other_ranks_go_on_and_take_every_sample_once(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks.run(3, jobs.train, tmp_path, 2, [5, 3, 2], 1, 2)
    after = ranks.run(2, jobs.train, tmp_path, 5, [6, 4], 1, 0, True)
    epoch = [k for rank in (*before, *after) for chosen in rank["taken"] for k in chosen]
    assert sorted(epoch) == list(range(jobs.LENGTH))


def test_a_ddp_run_goes_on_sharded_and_back(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, jobs.from_ddp, tmp_path, [5, 3]) == [True, True]
