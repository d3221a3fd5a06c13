"""Tensor-parallel groups as data-parallel ranks: a batch for each group, and the gradient of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensor_parallel_jobs as jobs
import torch
from device import DEVICE
from ranks import Ranks

from pyps.solver import Line

EXACT = 1e-12
KINDS = ["FSDP2", "DDP"]

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="one GPU is not four")
torch.set_num_threads(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batches", "parts"), [([13, 4], [1, 1]), ([9, 6], [3, 2])])
def test_the_gradient_is_the_one_of_one_process(
    ranks: Ranks, kind: str, batches: list[int], parts: list[int]
) -> None:
    for errors in ranks.run(4, jobs.errors, kind, batches, parts):
        assert max(errors) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_peers_with_unlike_batches_are_named(ranks: Ranks, kind: str) -> None:
    for rank, said in enumerate(ranks.run(4, jobs.unlike_peers, kind)):
        first = rank - rank % 2
        assert f"[(5, 8)] on rank {first}, [(4, 8)] on rank {first + 1}; expected the same" in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_says_the_same_on_all_ranks(ranks: Ranks, kind: str) -> None:
    said = ranks.run(4, jobs.causes, kind)
    assert {cause for cause, _ in said} == {"EQUAL_WEIGHTS"}
    assert max(error for _, error in said) == pytest.approx(min(error for _, error in said), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_is_that_of_the_whole_gradient(ranks: Ranks, kind: str) -> None:
    for found, right in ranks.run(4, jobs.noise, kind, [9, 5]):
        assert found == pytest.approx(right, rel=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_peers_have_the_same_batches(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Whatever each of them measures: the first one's times count."""
    costs, folder = [Line(0.01, 0.001), Line(0.01, 0.003)], tmp_path / "kept"
    found = ranks.run(4, jobs.trained, kind, costs, 20, folder)
    for one, peer in (found[:2], found[2:]):
        assert one["rank"] == peer["rank"]
        assert one["seen"] == peer["seen"]
    assert len({str(one["splits"]) for one in found}) == 1
    first, second = found[0]["splits"][0]
    assert first > 2 * second
    if kind == "DDP":
        assert all("expected one that went through fully_shard" in one["said"] for one in found)
        return
    again = ranks.run(4, jobs.trained, kind, costs, 20, folder)
    epochs = [sorted(k for one in run[::2] for rows in one["seen"] for k in rows) for run in (found, again)]
    assert epochs[0] == epochs[1]
    assert (folder / "noise.json").exists()
