"""The state of a worker's own optimizer on disk: exact, whole or not there, and never another's."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from worker_tools import X, Y, backward, loss_of, make_model

from pyps.checkpoint import state as checkpoint
from pyps.checkpoint.local_states import open_states, residual_file, state_file, states_of
from pyps.errors import InputError
from pyps.native.values import Codec, Hyper, PushResult
from pyps.store import Store
from pyps.store.policies import policy_named
from pyps.worker.local import local_state
from pyps.worker.local.local_state import LocalState
from pyps.worker.local.local_steps import LocalSteps
from pyps.worker.local.packing import for_file
from pyps.worker.run.settings import Settings


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


def test_no_two_writers_have_one_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process and its successor, in another container, may have one pid."""
    written: list[Path] = []

    def save(tensors: Any, path: Path, described: Any) -> None:
        written.append(path)
        save_file(tensors, path, described)

    monkeypatch.setattr(local_state, "save_file", save)
    for state in (LocalState(settings_of(tmp_path), [stepped()]) for _ in range(2)):
        state.save(4)
    assert len(set(written)) == 2
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["rank-0-000000004.safetensors"]


def test_a_rank_without_a_file_says_so(tmp_path: Path) -> None:
    LocalState(settings_of(tmp_path, 1), [stepped()]).save(4)
    for settings in (settings_of(tmp_path, 0), settings_of(None), settings_of(tmp_path, 1)):
        with pytest.warns(UserWarning, match=r"after 5 pushes: its optimizer begins anew"):
            LocalState(settings, [stepped(0)]).load(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalState(settings_of(None), [stepped(0)]).load(0)


def test_the_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    """A group more, and the moments of one parameter would be another's."""

    def groups(*order: int) -> tuple[torch.optim.Optimizer, dict[int, str]]:
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = torch.optim.SGD([parameters[k] for k in order], lr=0.1, momentum=0.9)
        return optimizer, {id(p): f"p{k}" for k, p in enumerate(parameters)}

    for optimizer, names in (groups(0, 1), groups(1, 0), groups(0)):
        state = LocalState(settings_of(tmp_path), [optimizer], names)
        if not states_of(tmp_path, 0):
            state.save(1)
            state.load(1)
            continue
        expected = r"parameters: found p[01] \[3\]; expected (p1 \[3\]|no more), as in the script"
        with pytest.raises(InputError, match=expected):
            state.load(1)


def test_a_parameter_that_has_not_stepped_keeps_the_state_that_it_begins_with(tmp_path: Path) -> None:
    """Averaged moments are begun for all parameters, of which a push may have reached a part."""

    def made() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        return parameters, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    (first, _), before = made()
    first.grad = torch.ones(3)
    before.step()
    LocalState(settings_of(tmp_path), [before]).save(1)
    parameters, after = made()
    for p in parameters:
        after.state[p]["momentum_buffer"] = torch.zeros(3)
    LocalState(settings_of(tmp_path), [after]).load(1)
    moments = [after.state[p]["momentum_buffer"].tolist() for p in parameters]
    assert moments == [[1.0] * 3, [0.0] * 3]


def test_states_that_share_memory_are_kept_whole() -> None:
    flat = torch.arange(6.0)
    tensors, _ = for_file({"a": flat[:3], "b": flat[3:], "c": flat[3:]})
    assert [tensor.tolist() for tensor in tensors.values()] == [[0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 3


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


def test_a_write_that_fails_leaves_no_state_of_a_push_that_was_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went back to a checkpoint, and has the numbers of its pushes again."""
    state = LocalState(settings_of(tmp_path), [stepped()])
    for pushes in (1, 2):
        state.save(pushes)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_state, "save_file", full)
    with pytest.warns(UserWarning, match="is not kept"):
        state.save(2)
    assert sorted(states_of(tmp_path, 0)) == [1]


def test_a_checkpoint_of_other_pushes_is_not_gone_on_from(shm: Path, tmp_path: Path) -> None:
    """The rank has pushed since, and its last files are lost: what the run was resumed from is too old."""
    folder, ran = tmp_path / "checkpoint", tmp_path / "ran"
    ran.mkdir()
    before = LocalState(settings_of(ran), [stepped()])
    before.save(1)
    before.save_residual(1, np.ones(3, np.float32))
    with Store.create("s", {"w": np.zeros(3)}, batches=[1]) as store:
        store.join(0)
        store.start()
        store.push(store.stage(), 1, Hyper(lr=0.1))
        local = open_states(ran, [1])
        checkpoint.save(store.state(), folder, local=local)
        for file in local.values():
            file.close()
    resumed = settings_of(tmp_path / "new", resume=folder)
    after = LocalState(resumed, [stepped(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after.load(1)
        assert after.residual(1) is not None
    with pytest.warns(UserWarning, match="after 2 pushes: its optimizer begins anew"):
        LocalState(resumed, [stepped(0)]).load(2)
    with pytest.warns(UserWarning, match="after 2 pushes: its error feedback begins anew"):
        assert after.residual(2) is None


def test_behind_a_push_that_is_refused_later_ones_have_their_numbers(tmp_path: Path) -> None:
    """In a pipeline three have left, and their states are kept, before the first one's fate is known."""
    settings, p = settings_of(tmp_path, depth=4), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.5)
    local = LocalSteps((optimizer,), [p], 0.0, LocalState(settings, [optimizer]), 0, overlaps=True)
    keeps: list[Any] = []
    store: Any = SimpleNamespace(servers=1, keep_residual=lambda _, keep: keeps.append(keep))
    local.keep_residual(store, Codec.INT8)
    moments = []

    def leave(staging: int) -> None:
        local.begin()
        p.grad = torch.full((3,), float(staging + 1))
        local.step()
        moments.append(optimizer.state[p]["momentum_buffer"].clone())
        local.collect(staging)

    for staging in range(3):
        leave(staging)
        if staging < 2:  # the third is encoded when the first has come back
            keeps[0](staging, np.full(3, staging, np.float32))
    local.pushed(None)
    keeps[0](2, np.full(3, 2, np.float32))
    leave(0)
    local.pushed(PushResult(1, 0, 1, 1, 0.0, rank_pushes=1))
    assert sorted(states_of(tmp_path, 0)) == [1, 2, 3]
    for pushes in (1, 2, 3):
        q = torch.nn.Parameter(torch.zeros(3))
        again = torch.optim.SGD([q], lr=1.0, momentum=0.5)
        found = LocalState(settings, [again])
        found.load(pushes)
        assert torch.equal(again.state[q]["momentum_buffer"], moments[pushes])
        if pushes < 3:
            residual = found.residual(pushes)
            assert residual is not None
            assert residual.tolist() == [pushes] * 3
    assert not residual_file(tmp_path, 0, 3).exists()


@pytest.mark.parametrize("counts", [False, True])
def test_a_push_that_raised_an_error_has_a_number_only_if_it_counts(tmp_path: Path, counts: bool) -> None:
    """The next one that is admitted says it."""
    settings, p = settings_of(tmp_path), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.5)
    local = LocalSteps((optimizer,), [p], 0.0, LocalState(settings, [optimizer]), 0)

    def step() -> None:
        local.begin()
        p.grad = torch.ones(3)
        local.step()
        local.collect()

    step()  # its push raises
    step()
    local.pushed(PushResult(1, 0, 1, 1, 0.0, rank_pushes=1 + counts))
    step()
    local.pushed(PushResult(2, 0, 1, 1, 0.0, rank_pushes=2 + counts))
    assert sorted(states_of(tmp_path, 0)) == [1, 2, 3][: 2 + counts]
    q = torch.nn.Parameter(torch.zeros(3))
    again = torch.optim.SGD([q], lr=1.0, momentum=0.5)
    LocalState(settings, [again]).load(2 + counts)
    assert torch.equal(again.state[q]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


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
