"""The state of a worker's own optimizer on disk: exact, whole or not there, and never another's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_tools import X, Y, backward, loss_of, make_model

from pyps.checkpoint.local_states import open_states, state_file, states_of
from pyps.errors import InputError
from pyps.store.policies import policy_named
from pyps.worker import local_state
from pyps.worker.local_state import LocalState
from pyps.worker.settings import Settings


def settings_of(folder: Path | None, rank: int = 0, **more: Any) -> Settings:
    return Settings("s", rank, policy_named("bsp"), run_dir=folder, **more)


def stepped(steps: int = 3, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    model = make_model()
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(loss_of(model, X, Y))
        optimizer.step()
    return optimizer


def equal(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(one[k][name], two[k][name]) for k in one for name in one[k]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_next_process_has_the_same_state(tmp_path: Path, dtype: torch.dtype) -> None:
    before, after = stepped(), stepped(0)
    for state in before.state.values():
        state["exp_avg"] = state["exp_avg"].to(dtype)
    LocalState(settings_of(tmp_path, 3), [before]).save(7)
    found = LocalState(settings_of(tmp_path, 3), [after])
    found.load(7)
    wanted = {k: {n: v.float() for n, v in s.items()} for k, s in before.state_dict()["state"].items()}
    assert equal(after.state_dict()["state"], wanted)


def muon(steps: int) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest, after some steps."""
    model = make_model()
    parts = [[p for p in model.parameters() if (p.ndim == 2) is flat] for flat in (True, False)]
    found = [torch.optim.Muon(parts[0], lr=0.01), torch.optim.AdamW(parts[1], lr=0.01)]
    for _ in range(steps):
        model.zero_grad()
        backward(loss_of(model, X, Y))
        for optimizer in found:
            optimizer.step()
    return found


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_several_optimizers_have_one_file(tmp_path: Path) -> None:
    before, after = muon(3), muon(0)
    LocalState(settings_of(tmp_path), before).save(2)
    LocalState(settings_of(tmp_path), after).load(2)
    for one, two in zip(before, after, strict=True):
        assert two.state
        assert equal(one.state_dict()["state"], two.state_dict()["state"])
    for wrong in (after[:1], after[::-1]):
        with pytest.raises(InputError, match=r"kind: found Muon, AdamW; expected "):
            LocalState(settings_of(tmp_path), wrong).load(2)


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    LocalState(settings_of(tmp_path), [stepped()]).save(4)
    half = tmp_path / "local" / ".rank-0-000000005.safetensors.123.tmp"
    half.write_bytes(b"half")
    LocalState(settings_of(tmp_path), [stepped(0)]).load(4)
    assert not half.exists()


def test_a_rank_without_a_file_says_so(tmp_path: Path) -> None:
    LocalState(settings_of(tmp_path, 1), [stepped()]).save(4)
    for settings in (settings_of(tmp_path, 0), settings_of(None), settings_of(tmp_path, 1)):
        with pytest.warns(UserWarning, match=r"after 5 pushes: its optimizer begins anew"):
            LocalState(settings, [stepped(0)]).load(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalState(settings_of(None), [stepped(0)]).load(0)


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    LocalState(settings_of(tmp_path), [stepped()]).save(1)
    other = LocalState(settings_of(tmp_path), [stepped(0, torch.optim.Adagrad)])
    with pytest.raises(InputError, match=r"kind: found AdamW; expected Adagrad"):
        other.load(1)


@pytest.mark.parametrize("content", [b"", b"not tensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "local").mkdir()
    state_file(tmp_path, 0, 2).write_bytes(content)
    with pytest.raises(InputError, match=r"expected the state of an optimizer"):
        LocalState(settings_of(tmp_path), [stepped(0)]).load(2)


def test_a_full_disk_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_state, "save_file", full)
    state = LocalState(settings_of(tmp_path), [stepped()])
    with pytest.warns(UserWarning, match="is not kept: .*No space left"):
        state.save(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.save(2)
    assert states_of(tmp_path, 0) == {}


def test_old_files_go_but_those_that_may_be_needed(tmp_path: Path) -> None:
    """The newest, one more for each step under way, and those in the store's last two saved states."""
    state = LocalState(settings_of(tmp_path, depth=2), [stepped()])
    for pushes in range(1, 21):
        state.save(pushes)
        state.save_residual(pushes, np.zeros(3, np.float32))
        state.remove_old(pushes, pushes // 6 * 6)
    assert sorted(states_of(tmp_path, 0)) == [12, 17, 18, 19, 20]  # 18 is the last saved one
    assert len(list((tmp_path / "local").iterdir())) == 2 * 5
    opened = open_states(tmp_path, [19, 3])
    assert {name: Path(file.name).name for name, file in opened.items()} == {
        "local-0.safetensors": "rank-0-000000019.safetensors",
        "local-0-residual.safetensors": "residual-0-000000019.safetensors",
    }
    for file in opened.values():
        file.close()


def test_the_next_process_keeps_what_was_saved(tmp_path: Path) -> None:
    """Until it knows better: of what is older than the newest files only the saved ones are there."""
    before = LocalState(settings_of(tmp_path), [stepped()])
    for pushes in range(1, 11):
        before.save(pushes)
        before.remove_old(pushes, 3 if pushes < 7 else 6)
    after = LocalState(settings_of(tmp_path), [stepped(0)])
    after.load(10)
    after.save(11)
    after.remove_old(11, 6)
    assert sorted(states_of(tmp_path, 0)) == [3, 6, 9, 10, 11]


def test_a_residual_of_exactly_so_many_pushes(tmp_path: Path) -> None:
    state, values = LocalState(settings_of(tmp_path), [stepped()]), np.arange(4, dtype=np.float32)
    state.save_residual(3, values)
    assert np.array_equal(LocalState(settings_of(tmp_path), [stepped()]).residual(3), values)
    with pytest.warns(UserWarning, match="after 2 pushes: its error feedback begins anew"):
        assert LocalState(settings_of(tmp_path), [stepped()]).residual(2) is None
    (tmp_path / "local" / "residual-0-000000003.safetensors").write_bytes(b"half")
    with pytest.raises(InputError, match="expected a residual"):
        state.residual(3)
