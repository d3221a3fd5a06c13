"""The tasks: batches of any size, steps that learn, and clear words for what cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyps.errors import InputError, PypsError
from pyps.tasks import TrainingTask, load_task
from pyps.tasks.builtin import BUILTIN

torch.set_num_threads(1)


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_builtin_trains_on_any_batch(name: str) -> None:
    task = load_task(name)
    optimizer = task.make_optimizer()
    for batch in (1, 3):
        inputs, targets = task.make_batch(batch)
        assert inputs.shape[0] == targets.shape[0] == batch
        loss: Any = task.loss(task.model(inputs), targets)
        assert loss.ndim == 0
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in task.model.parameters())
        optimizer.step()


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_builtin_is_the_same_every_time_and_leaves_the_random_state(name: str) -> None:
    state = torch.random.get_rng_state()
    first, second = (BUILTIN[name]() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_builtin_splits_into_weighted_parts(name: str) -> None:
    """sum (b_i/B) g_i is the whole batch's gradient: no layer looks across samples."""
    task = load_task(name)
    task.model.double()
    inputs, targets = task.make_batch(6)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    parameters = list(task.model.parameters())

    def gradient(rows: slice) -> list[torch.Tensor]:
        loss = task.loss(task.model(inputs[rows]), targets[rows])
        return list(torch.autograd.grad(loss, parameters))

    whole, small, large = gradient(slice(0, 6)), gradient(slice(0, 1)), gradient(slice(1, 6))
    for g, g1, g5 in zip(whole, small, large, strict=True):
        torch.testing.assert_close(g1 / 6 + g5 * 5 / 6, g, rtol=1e-9, atol=1e-12)


def test_the_transformer_does_not_see_the_future() -> None:
    task = load_task("transformer")
    text, _ = task.make_batch(1)
    changed = text.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 512
    with torch.no_grad():
        before, after = task.model(text), task.model(changed)
    torch.testing.assert_close(before[0, :40], after[0, :40], rtol=0, atol=1e-5)
    assert not torch.allclose(before[0, 40:], after[0, 40:])


@pytest.mark.slow
def test_digits_cnn_learns_the_digits() -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    task = load_task("digits_cnn")
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.9)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:360], order[360:]
    for epoch in range(6):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        for rows in torch.split(shuffled, 64):
            optimizer.zero_grad()
            loss: Any = task.loss(task.model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
    accuracy = (task.model(images[held_out]).argmax(1) == labels[held_out]).float().mean()
    assert accuracy > 0.9


USER_MODULE = """
import torch
from pyps.tasks import TrainingTask

def good():
    return TrainingTask(
        torch.nn.Linear(3, 1),
        lambda batch: (torch.zeros(batch, 3), torch.zeros(batch, 1)),
        torch.nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
    )

def raises():
    raise RuntimeError("no data here")

def wrong():
    return torch.nn.Linear(3, 1)

number = 7
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_task_module.py").write_text(USER_MODULE)
    (tmp_path / "broken_task_module.py").write_text("import nothing_called_this\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_users_factory(user_folder: Path) -> None:
    task = load_task("user_task_module:good")
    assert isinstance(task.make_optimizer(), torch.optim.Adam)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet9000", "found 'resnet9000'; expected a built-in model (mlp, cnn, transformer"),
        ("user_task_module:", "module:factory"),
        (":good", "module:factory"),
        ("no_such_task_module:good", "No module named 'no_such_task_module'"),
        ("broken_task_module:good", "No module named 'nothing_called_this'"),
        ("user_task_module:absent", "found no 'absent'; expected a function of user_task_module: "),
        ("user_task_module:number", "found no 'number'"),
        ("user_task_module:raises", "RuntimeError: no data here"),
        ("user_task_module:wrong", "found a Linear returned; expected pyps.tasks.TrainingTask"),
    ],
)
def test_what_cannot_be_loaded(user_folder: Path, name: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        load_task(name)
    assert message in str(refused.value)


def test_without_torch_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)  # what `import torch` sees where it is not installed
    with pytest.raises(PypsError, match=r"pip install '.*\[torch\]'"):
        load_task("mlp")


def test_importing_the_module_does_not_import_torch() -> None:
    import subprocess
    import sys

    modules = "pyps.tasks.builtin, pyps.profiler, pyps.profiler.throttle"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_frozen_parameters_are_not_given_to_the_optimizer() -> None:
    task = load_task("digits_mlp")
    frozen = next(task.model.parameters())
    frozen.requires_grad_(False)
    trained: list[Any] = [p for group in task.make_optimizer().param_groups for p in group["params"]]
    assert all(p is not frozen for p in trained)
    assert isinstance(task, TrainingTask)
