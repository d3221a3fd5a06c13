"""DDP runs that stop and go on: bit for bit with as many ranks, and every sample once with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ddp_checkpoint_jobs as jobs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks

from pyps.checkpoint.folder import checkpoints, read_folder
from pyps.worker.local.packing import names_in, pack, unpack

SPLIT = [5, 3]
STEPS = 14  # two epochs and some


@pytest.mark.parametrize(("save_at", "wire"), [(4, "same"), (6, "bf16"), (9, "same")])
def test_a_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, save_at: int, wire: str) -> None:
    """Also where an epoch has just ended (6); every rank has its own dropout."""
    whole = ranks.run(2, jobs.train, tmp_path / "a", STEPS, SPLIT, wire)
    before = ranks.run(2, jobs.train, tmp_path / "b", save_at + 2, SPLIT, wire, save_at)
    after = ranks.run(2, jobs.train, tmp_path / "b", STEPS, SPLIT, wire, 0, True)
    for rank in range(2):
        assert whole[rank]["taken"] == before[rank]["taken"][:save_at] + after[rank]["taken"]
        assert whole[rank]["lr"] == after[rank]["lr"]
        for name, value in whole[rank]["model"].items():
            assert torch.equal(value, after[rank]["model"][name]), name
    kept: Any = after[0]["kept"]
    assert kept["note"] == {"steps": save_at, "of": (1.5, None)}
    assert kept["step"] == int(checkpoints(tmp_path / "b")[-1].name)


def test_another_number_of_ranks_goes_on_and_takes_every_sample_once(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks.run(2, jobs.train, tmp_path, 3, SPLIT, "same", 3)
    after = ranks.run(3, jobs.train, tmp_path, 6, [3, 3, 2], "same", 0, True)
    epoch = [k for rank in (*before, *after) for chosen in rank["taken"] for k in chosen]
    assert sorted(epoch) == list(range(jobs.LENGTH))
    assert after[0]["split"] == (3, 3, 2)


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_residuals_and_the_split_go_on(ranks: Ranks, tmp_path: Path, wire: str) -> None:
    """Bit for bit, although DDP has other buckets in its first step, and so int8 and int4 other blocks."""
    whole = ranks.run(2, jobs.train, tmp_path / "a", STEPS, SPLIT, wire)
    ranks.run(2, jobs.train, tmp_path / "b", 7, SPLIT, wire, 6)
    after = ranks.run(2, jobs.train, tmp_path / "b", STEPS, [4, 4], wire, 0, True)
    assert after[0]["split"] == tuple(SPLIT)
    for name, value in whole[0]["model"].items():
        assert torch.equal(value, after[0]["model"][name]), name
    tensors = {name for file in read_folder(checkpoints(tmp_path / "b")[0])[1].values() for name in file}
    assert {"rank0.mean.wire.residuals.0.weight", "rank1.mean.wire.residuals.0.weight"} <= tensors


@pytest.mark.parametrize(("counted", "workers"), [("GlobalMean", 2), ("Rebalancer", 2), ("Rebalancer", 0)])
def test_what_was_trained_is_saved(ranks: Ranks, tmp_path: Path, counted: str, workers: int) -> None:
    """DataLoader workers fetch ahead of it."""
    assert ranks.run(2, jobs.saved_after, tmp_path, counted, workers) == [(12, 12)] * 2


def test_what_nothing_counted_is_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(2, jobs.saved_after, tmp_path, "nothing", 0):
        assert "rounds: found batches that were computed, and no step" in said


def test_a_checkpoint_of_an_epochs_end_begins_the_next_one(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, jobs.saved_at_the_end, tmp_path) == [(1, 5), (1, 3)]


def test_tied_weights(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, jobs.tied, tmp_path) == [True, True]


def test_an_optimizer_whose_state_the_ranks_share(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, jobs.divided_optimizer, tmp_path) == [True, True]


def test_no_rank_waits_for_one_that_failed(ranks: Ranks, tmp_path: Path) -> None:
    first, other = ranks.run(2, jobs.save_where_something_else_fails, tmp_path)
    assert first == "ZeroDivisionError: division by zero"
    assert "found ZeroDivisionError('division by zero')" in other


def test_plain_values_come_back(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(2, jobs.plain_values, tmp_path):
        assert found == {"best": {"loss": 0.5, "epoch": 3}, "note": "warm", "step": 7}


def test_errors_reach_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, jobs.load_into, tmp_path / "none", 4) == ["", ""]
    ranks.run(2, jobs.train, tmp_path, 1, SPLIT, "same", 1)
    for said in ranks.run(2, jobs.load_into, tmp_path, 4):
        assert (
            "0.weight: found shape [12, 6] in the checkpoint; expected shape [4, 6], as in the model" in said
        )
    (path,) = checkpoints(tmp_path)
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])
    for said in ranks.run(2, jobs.load_into, tmp_path, 12):
        assert f"{file}: size: found" in said
    (tmp_path / "taken").write_text("a file where the folder should be")
    for said in ranks.run(2, jobs.save_where_it_fails, tmp_path / "taken"):
        assert "taken: found file exists" in said


NUMBERS = st.floats() | st.integers()
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
)


@given(PLAIN)
@settings(deadline=None)
def test_what_is_packed_comes_back(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    state = {"a": value, "b": (torch.ones(2, 2), [torch.tensor(3)])}
    packed = pack(state, "x", tensors)
    assert sorted(names_in(packed)) == sorted(tensors)
    found = unpack(packed, {name: tensor.reshape(-1) for name, tensor in tensors.items()})
    assert repr(found["a"]) == repr(value)
    assert torch.equal(found["b"][0], torch.ones(2, 2))
    assert found["b"][1][0].shape == ()
