"""shard: a run is that of one process, and each rank holds its share of parameters, gradients and states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sharding_bytes_jobs as counting
import sharding_checkpoint_jobs as saving
import sharding_jobs as jobs
from ranks import Ranks
from sampled import sampled

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "sharding_train.py"
EXACT = 1e-12
SHARES = {2: [2 / 3, 1 / 3], 3: [0.5, 0.3, 0.2], 4: [0.4, 0.3, 0.2, 0.1]}


@pytest.mark.parametrize("kind", ["plain", "tied", "unused", "frozen", "batch norm"])
def test_a_run_is_that_of_one_process(ranks: Ranks, kind: str) -> None:
    for found in ranks.run(3, jobs.module_steps, SHARES[3], kind):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize(("count", "shares"), sampled([(3, [0, 1, 0]), (2, [1, 0]), (4, SHARES[4])]))
def test_any_shares(ranks: Ranks, count: int, shares: list[float]) -> None:
    for found in ranks.run(count, jobs.module_steps, shares):
        assert max(found.values()) < EXACT, found


KINDS = ["checkpoint", "checkpoint over blocks", "reentrant checkpoint", "shared block", "lora", "nested"]


@pytest.mark.parametrize("kind", sampled(KINDS, 1, 3, 5))
def test_blocks_that_compute_again(ranks: Ranks, kind: str) -> None:
    for found in ranks.run(3, jobs.module_steps, SHARES[3], kind):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("optimizer", sampled(jobs.OPTIMIZERS, 2))
def test_optimizers(ranks: Ranks, optimizer: str) -> None:
    for found in ranks.run(3, jobs.module_steps, SHARES[3], "plain", optimizer):
        assert max(found.values()) < EXACT, found


@pytest.mark.thorough
def test_without_prefetching(ranks: Ranks) -> None:
    for found in ranks.run(3, jobs.module_steps, SHARES[3], "plain", "AdamW", False):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("parts", sampled([[2, 2, 1], [1, 1, 1], [3, 1, 1]], 0))
def test_micro_batches(ranks: Ranks, parts: list[int]) -> None:
    for found in ranks.run(3, jobs.micro_batches, SHARES[3], parts, 3):
        assert max(found.values()) < EXACT, found


def test_several_passes(ranks: Ranks) -> None:
    for found in ranks.run(2, jobs.several_passes):
        assert max(found.values()) < EXACT, found


def test_norms_are_those_of_whole_gradients(ranks: Ranks) -> None:
    for found in ranks.run(3, jobs.norms):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("shares", [[0.7, 0.3], [0, 1]])
def test_a_scaler_finds_an_infinity_of_another_rank(ranks: Ranks, shares: list[float]) -> None:
    for found in ranks.run(2, jobs.scaler_on_owners, shares):
        assert found == [1024.0, 512.0, 512.0, 1.0]


def test_bf16_with_parts_in_float32(ranks: Ranks) -> None:
    types = ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.float32", "torch.float32"]
    for found in ranks.run(2, jobs.precision):
        assert found["types"] == types
        assert 1e-6 < found["off"] < 0.02


@pytest.mark.parametrize("shares", [[2 / 3, 1 / 3], [0, 1]])
def test_bytes_of_a_rank_are_its_share(ranks: Ranks, shares: list[float]) -> None:
    for share, held in zip(shares, ranks.run(2, counting.held_bytes, shares), strict=True):
        assert held.pop("gathered") == 0
        assert held == pytest.approx(dict.fromkeys(held, share), rel=0.02)


def test_passes_without_gradients(ranks: Ranks) -> None:
    assert max(ranks.run(2, jobs.without_gradients)) < EXACT


REFUSED = {
    "reads": "blocks.0.0.weight: found a parameter that is freed; expected to be read in the forward pass of",
    "skips": "shard: pass: found \"forward of 'blocks.1'\" on rank 0, \"forward of 'blocks.2'\" on rank 1",
    "hides": "output of the model: found a _Box; expected tensors",
    "another pass": "shard: pass: found 'gathered' on rank 0, 'forward of the model' on rank 1",
    "unlike shares": "shares: found (0.5, 0.5) on rank 0, (0.6, 0.4) on rank 1",
    "twice": "found a sharded one; expected one call for each module",
    "assigned": "load_state_dict: assign: found True; expected False",
    "another shape": "state dict: first.weight: found shape [3]; expected shape [9, 8]",
    "moved": "found a piece in another place; expected model.to()",
    "gathered": "model: found Net; expected one that went through shard()",
    "norm by rows": "norm: of a sharded gradient: found",
    "plain": "GlobalMean: loss.backward(): found a gradient without its weight",
    "Adafactor": "shard: optimizer: found Adafactor, whose step of a cut parameter is",
    "LBFGS": "shard: optimizer: found LBFGS, wh",
    "by norm": "shard: optimizer: found ByNorm, whose step of a cut parameter is",
    "made before": "optimizer, scale: found a parameter of before shard(); expected an",
    "alone": "shard: calls: found no call 5 on ranks [0], on rank 1",
}


def test_what_does_not_fit_is_refused(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(2, jobs.module_refusals)):
        wanted = {name: said for name, said in REFUSED.items() if name != "alone" or rank == 1}
        assert found.keys() == wanted.keys()
        assert {name: said for name, said in found.items() if wanted[name] not in said} == {}


STAGES = [
    ("shard", [0.5, 0.3, 0.2], "shard", [0.1, 0.9]),
    ("shard", [0.5, 0.3, 0.2], "plain", [1, 0]),
    ("plain", [1, 0, 0], "shard", [0.3, 0.7]),
    ("shard_optimizer", [0.5, 0.5, 0], "shard", [0.3, 0.7]),
    ("shard", [0.5, 0.5, 0], "shard_optimizer", [0.3, 0.7]),
    ("shard", [0.5, 0.3, 0.2], "fully_shard", []),
    ("fully_shard", [], "shard", [0.3, 0.7]),
]


@pytest.mark.parametrize("way", [saving.through_checkpoint, saving.through_save])
@pytest.mark.parametrize(("before", "shares", "after", "others"), sampled(STAGES, 0, 3))
def test_a_checkpoint_of_another_stage(
    ranks: Ranks, tmp_path: Path, before: str, shares: list[float], after: str, others: list[float], way: Any
) -> None:
    """Through torch.distributed.checkpoint, or pyps.torch.save, with other ranks and shares."""
    (right,) = ranks.run(1, saving.through_checkpoint, str(tmp_path / "a"), "plain", [1], [0, 6])
    ranks.run(3, way, str(tmp_path / "b"), before, shares, [0, 4])
    for found in ranks.run(2, way, str(tmp_path / "b"), after, others, [4, 6]):
        assert found == pytest.approx(right, abs=EXACT)


def test_a_checkpoint_of_tied_parameters_that_one_rank_does_not_own(ranks: Ranks, tmp_path: Path) -> None:
    right = ranks.run(2, saving.through_save, str(tmp_path / "a"), "tied", [0.5, 0.5], [0, 6])
    ranks.run(3, saving.through_save, str(tmp_path / "b"), "tied", [0, 0.1, 0.9], [0, 4])
    for found in ranks.run(2, saving.through_save, str(tmp_path / "b"), "tied", [1, 0], [4, 6]):
        assert found == pytest.approx(right[0], abs=EXACT)


def test_a_checkpoint_of_weights_with_their_channels_last(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run(2, saving.other_memory_orders, str(tmp_path))) < EXACT


def test_an_optimizers_own_state_dict(ranks: Ranks) -> None:
    """It has parts, as the model's: they are loaded, and not pickled as if they were whole."""
    for found in ranks.run(2, saving.own_state_dict):
        assert found["alike"]
        assert len(found["said"]) == 2
        assert "this rank's part of a tensor, to be pickled; expected whole_state_dict()" in found["said"][0]
        assert found["off"] < EXACT


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_killed_rank_is_started_again_and_all_go_on(tmp_path: Path) -> None:
    """torchrun starts all ranks anew; their parts and the optimizer's come from the last checkpoint."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    # A store that outlives ranks keeps the addresses of those that are gone (torch 2.13).
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    done = subprocess.run(
        [*command, "--standalone", str(SCRIPT), str(tmp_path)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["from"] == 6
    assert found["off"] < EXACT
