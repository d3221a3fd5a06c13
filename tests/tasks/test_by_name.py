"""Models from elsewhere: scripts, and libraries that may be missing."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch

from pyps.errors import InputError
from pyps.tasks import load_task

SCRIPT = """
import torch
def make_model(): return torch.nn.Linear(3, 1)
def make_batch(b): return torch.zeros(b, 3), torch.zeros(b, 1)
loss = torch.nn.functional.mse_loss
"""


def one_step(name: str) -> int:
    task = load_task(name)
    inputs, targets = task.make_batch(4)
    task.loss(task.model(inputs), targets).backward()
    task.make_optimizer().step()
    return len(inputs)


def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(SCRIPT)
    assert one_step("net.py") == 4
    Path("adam.py").write_text(SCRIPT + "optimizer = torch.optim.Adam\n")
    assert isinstance(load_task("adam.py").make_optimizer(), torch.optim.Adam)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no file at net.py"),
        ("raise ValueError('no')", "ValueError: no"),
        ("def make_model(): pass", "make_batch: found nothing"),
        (SCRIPT + "make_model = lambda: 1 / 0", "make_model: found ZeroDivisionError"),
    ],
)
def test_a_script_that_does_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("net.py").write_text(text)
    with pytest.raises(InputError, match=said):
        load_task("net.py")


def test_a_script_imports_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is loaded, and later; the error for a module that is missing names it and the folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "early_sibling.py").write_text(SCRIPT)
    (folder / "late_sibling.py").write_text("size = 1")
    late = "def optimizer(p):\n    import late_sibling\n    return torch.optim.Adam(p)\n"
    text = f"import torch\nfrom early_sibling import make_model, make_batch, loss\n{late}"
    (folder / "prof.py").write_text(text)
    assert one_step(str(folder / "prof.py")) == 4
    (folder / "prof.py").write_text("import sibling_that_is_not_there\n")
    with pytest.raises(
        InputError, match=r"'sibling_that_is_not_there' in the script's own folder, .*elsewhere"
    ):
        load_task(str(folder / "prof.py"))


def stand_in(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(contents)
    return module


def test_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(12, 1000))
    models = stand_in(
        "torchvision.models",
        list_models=lambda module: ["tiny"],
        get_model=lambda name, weights, num_classes: net,
    )
    monkeypatch.setitem(sys.modules, "torchvision", stand_in("torchvision", models=models))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert one_step("torchvision:tiny") == 4
    with pytest.raises(InputError, match="'huge'"):
        load_task("torchvision:huge")


def test_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Causal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11)

        def forward(self, text: torch.Tensor) -> types.SimpleNamespace:
            return types.SimpleNamespace(logits=self.head(self.words(text)))

    def for_model(name: str) -> types.SimpleNamespace:
        if name != "tiny":
            raise ValueError(f"Unrecognized model {name}")
        return types.SimpleNamespace(vocab_size=11)

    library = stand_in(
        "transformers",
        AutoConfig=types.SimpleNamespace(for_model=for_model),
        AutoModelForCausalLM=types.SimpleNamespace(from_config=lambda config: Causal()),
    )
    monkeypatch.setitem(sys.modules, "transformers", library)
    assert one_step("transformers:tiny") == 4
    with pytest.raises(InputError, match="Unrecognized model huge"):
        load_task("transformers:huge")


@pytest.mark.parametrize("library", ["torchvision", "transformers"])
def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    for name in (library, f"{library}.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=f"pip install {library}"):
        load_task(f"{library}:anything")
