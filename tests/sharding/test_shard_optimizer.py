"""shard_optimizer: a run is that of one process, and each rank holds its share of the state."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharding_bytes_jobs as counting
import sharding_jobs as jobs
from ranks import Ranks
from sampled import sampled

EXACT = 1e-12
SHARES = {2: [2 / 3, 1 / 3], 3: [0.5, 0.3, 0.2], 4: [0.4, 0.3, 0.2, 0.1]}
KINDS = ["unused", "frozen", "tied", "lora", "batch norm", "checkpoint", "checkpoint over blocks"]
KINDS += ["reentrant checkpoint", "shared block"]
CASES = [(3, SHARES[3], "plain"), (3, [0, 1, 0], "plain"), (4, SHARES[4], "frozen")]
CASES += [(2, SHARES[2], kind) for kind in KINDS]


@pytest.mark.parametrize(("count", "shares", "kind"), sampled(CASES, *range(len(CASES) - 3)))
def test_a_run_is_that_of_one_process(ranks: Ranks, count: int, shares: list[float], kind: str) -> None:
    for found in ranks.run(count, jobs.optimizer_steps, shares, kind):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("optimizer", sampled(jobs.OPTIMIZERS, 2, 5))
def test_optimizers(ranks: Ranks, optimizer: str) -> None:
    for found in ranks.run(3, jobs.optimizer_steps, SHARES[3], "plain", optimizer):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("parts", sampled([[2, 2, 1], [1, 1, 1], [3, 1, 1]], 0))
def test_micro_batches(ranks: Ranks, parts: list[int]) -> None:
    for found in ranks.run(3, jobs.micro_batches, SHARES[3], parts, 1):
        assert max(found.values()) < EXACT, found


def test_micro_batches_of_a_script_in_no_sync(ranks: Ranks) -> None:
    assert max(ranks.run(2, jobs.in_no_sync, SHARES[2])) < EXACT


def test_bf16_with_masters_in_float32(ranks: Ranks) -> None:
    """Bit for bit one process that has masters, after a resume with other shares too; 12 bytes are shared."""
    others = [0.2, 0.8]
    for share, found in zip(others, ranks.run(2, jobs.with_masters, [0.7, 0.3], others), strict=True):
        assert (found["parameters"], found["masters"], found["moments"]) == (0.0, 0.0, 0.0)
        assert found["bytes"] == pytest.approx(12 * share, abs=0.5)


REFUSED = {
    "Adafactor": "optimizer: found Adafactor, whose step of a cut parameter is",
    "Muon": "optimizer: found Muon, which cannot step a piece:",
    "LBFGS": "optimizer: found LBFGS, wh",
    "by norm": "optimizer: found ByNorm, whose step of a cut parameter is",
    "nested": "optimizer: found SGD, which steps another one (inner); expected one that computes each",
    "Lion": "nothing",
    "unlike shares": "shares: found (0.5, 0.5) on rank 0, (0.75, 0.25) on rank 1; expected the same on all",
    "unlike kinds": "optimizer: found 'SGD' on rank 0, 'Adam' on rank 1",
    "one refuses": "Adafactor, whose step of a cut parameter",
    "unlike parameters": "parameters: found",
    "a sum of 3": "found a sum of 3; expected a sum of 1, such as [0.666667, 0.333333]",
    "twice": "found a sharded one; expected one call for each optimizer",
    "state_dict": "found a state that is on this rank alone; expected consolidate_state_dict() on all ranks",
    "added": "parameter 13: found a gradient of another one; expected parameters that the optimizer had",
    "moved": "parameter 1: found a tensor in another place; expected model.to()",
    "sparse": "gradient 0: found torch.sparse_coo; expected a dense one",
}


def test_what_does_not_fit_is_refused(ranks: Ranks) -> None:
    for found in ranks.run(2, jobs.optimizer_refusals):
        assert found.keys() == REFUSED.keys()
        assert {name: said for name, said in found.items() if REFUSED[name] not in said} == {}


def test_an_error_leaves_whole_parameters(ranks: Ranks) -> None:
    assert ranks.run(2, jobs.after_an_error) == [True, True]


def test_uneven_takes_shares(ranks: Ranks) -> None:
    assert max(ranks.run(4, jobs.in_two_lines, SHARES[4])) < EXACT


def test_closures(ranks: Ranks) -> None:
    assert max(ranks.run(2, jobs.with_closure)) < EXACT


@pytest.mark.parametrize("shares", [[0.7, 0.3], [0, 1], [1, 0]])
def test_a_scaler_finds_an_infinity_on_all_ranks(ranks: Ranks, shares: list[float]) -> None:
    """Also on a rank that owns nothing, and on one that does not own the infinity."""
    for found in ranks.run(2, jobs.scaled, shares):
        assert found["off"] == 0.0
        assert found["scales"] == (512.0, 512.0)


@pytest.mark.parametrize("shares", [[2 / 3, 1 / 3], [0.9, 0.1], [0, 1]])
def test_bytes_of_a_rank_are_its_share(ranks: Ranks, shares: list[float]) -> None:
    for share, held in zip(shares, ranks.run(2, counting.state_bytes, shares), strict=True):
        assert held == pytest.approx(share, rel=0.02)


def test_a_run_goes_on_with_other_ranks_and_shares(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(3, jobs.kept, str(tmp_path / "a"), SHARES[3], 8, False)
    ranks.run(3, jobs.kept, str(tmp_path / "b"), SHARES[3], 5, False)
    for found in ranks.run(2, jobs.kept, str(tmp_path / "b"), [0.1, 0.9], 8, True):
        assert found == pytest.approx(whole[0], abs=EXACT)


def test_the_models_tensors_have_storages_of_their_own(ranks: Ranks) -> None:
    assert all(ranks.run(2, jobs.in_safetensors))
