"""What is trained, as one small value: a TrainingTask; the built-in tasks; and how a task is found by name.

A task is everything a training step needs except the device and the optimizer's state: the network, a
way to make a batch of any size, and the loss. The profiler times it; training scripts can use the same
networks. `load_task("package.module:factory")` calls a factory of the user's own, which takes no argument
and returns a TrainingTask. No network here has BatchNorm: its statistics depend on the local batch, so
uneven batches would change what is trained.

torch is imported by the factories and not by this module.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyps.errors import InputError, PypsError

if TYPE_CHECKING:
    import torch

EXPECTED_MODEL = "a built-in model ({names}), script.py or module:factory, importable from this folder"


@dataclass(frozen=True)
class TrainingTask:
    """One training step's ingredients.

    model: the network, on the CPU, in fp32; whoever trains moves it to its device.
    make_batch: batch -> (inputs, targets), each a tensor or a tuple, list or dict of tensors on the CPU
        whose first dimension is `batch`; called outside the timed step.
    loss: (outputs, targets) -> a scalar tensor, the *mean* over the batch's samples.
    optimizer: parameters -> torch optimizer; SGD with momentum 0.9 by default.
    """

    model: torch.nn.Module
    make_batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The task's optimizer over the parameters that require a gradient."""
        import torch

        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self.optimizer is not None:
            return self.optimizer(trained)
        return torch.optim.SGD(trained, lr=0.01, momentum=0.9)


def mlp(seed: int = 0) -> TrainingTask:
    """784-512-512-10 with ReLU (669,706 parameters), on images of MNIST's shape."""
    from torch import nn

    with _seeded(seed):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
    return _classification(model, (1, 28, 28), classes=10)


def cnn(seed: int = 0) -> TrainingTask:
    """Four 3x3 convolutions with GroupNorm (94,122 parameters), on images of CIFAR-10's shape."""
    from torch import nn

    def stage(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.GroupNorm(8, channels_out),
            nn.ReLU(),
        ]

    with _seeded(seed):
        model = nn.Sequential(
            *stage(3, 32),
            nn.MaxPool2d(2),
            *stage(32, 64),
            nn.MaxPool2d(2),
            *stage(64, 64),
            *stage(64, 64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    return _classification(model, (3, 32, 32), classes=10)


def transformer(seed: int = 0) -> TrainingTask:
    """A causal language model: 2 pre-norm blocks, width 128, 4 heads, 64 tokens of a vocabulary of 512."""
    import torch
    from torch import nn

    vocabulary, tokens = 512, 64
    with _seeded(seed):
        model = _causal_transformer(vocabulary, tokens, width=128, heads=4, blocks=2)

    def make_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(vocabulary, (batch, tokens + 1), generator=torch.Generator().manual_seed(seed))
        return text[:, :-1], text[:, 1:]

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return TrainingTask(model, make_batch, loss)


def digits_mlp(seed: int = 0) -> TrainingTask:
    """64-256-256-10 with ReLU, on scikit-learn's 8x8 digits, shape (1, 8, 8), scaled to [0, 1]."""
    from torch import nn

    with _seeded(seed):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
    return _classification(model, (1, 8, 8), classes=10)


def digits_cnn(seed: int = 0) -> TrainingTask:
    """Three 3x3 convolutions and two linear layers, on scikit-learn's 8x8 digits, shape (1, 8, 8)."""
    from torch import nn

    with _seeded(seed):
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    return _classification(model, (1, 8, 8), classes=10)


BUILTIN: dict[str, Callable[[], TrainingTask]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "digits_mlp": digits_mlp,
    "digits_cnn": digits_cnn,
}


def load_task(name: str) -> TrainingTask:
    """The task called `name`: a built-in, module:factory imported with the current folder on the path, or one
    of pyps.tasks.found's (script.py, torchvision:NAME, transformers:NAME).

    Raises InputError if there is no such built-in, module or factory, if the module or the factory raises,
    or if it does not return a TrainingTask; PypsError if torch is not installed.
    """
    require_torch()
    if name in BUILTIN:
        return BUILTIN[name]()
    if (task := _elsewhere(name)) is not None:
        return task
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise InputError("model", "", repr(name), EXPECTED_MODEL.format(names=", ".join(BUILTIN)))
    factory = _find_factory(module_name, factory_name)
    try:
        made = factory()
    except Exception as error:
        raise InputError(name, "factory", _one_line(error), "a factory that takes no argument") from error
    if not isinstance(made, TrainingTask):
        found = f"a {type(made).__name__} returned"
        raise InputError(name, "factory", found, "pyps.tasks.builtin.TrainingTask(model, make_batch, loss)")
    return made


def require_torch() -> None:
    """Raise PypsError that says what to install if torch is missing."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        message = f"torch cannot be imported ({error}): pip install 'pyps-train[torch]'"
        raise PypsError(message) from error


def _elsewhere(name: str) -> TrainingTask | None:
    """A script's task, or a library's model."""
    from pyps.tasks import found as zoo

    library, _, model = name.partition(":")
    if name.endswith(".py"):
        return zoo.script_task(name)
    if library in zoo.LIBRARIES and model:
        return zoo.LIBRARIES[library](model)
    return None


def _find_factory(module_name: str, factory_name: str) -> Callable[[], object]:
    """The callable `factory_name` of a module; the current folder is searched first, as `python -m` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        expected = f"a module that imports, in {folder} or installed"
        raise InputError("model", "module", f"{module_name!r}: {_one_line(error)}", expected) from error
    finally:
        sys.path.remove(folder)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        expected = f"a function of {module_name}: {', '.join(public[:8]) or 'it has none'}"
        raise InputError("model", "factory", f"no {factory_name!r}", expected)
    found: Callable[[], object] = factory
    return found


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _classification(model: torch.nn.Module, shape: tuple[int, ...], classes: int) -> TrainingTask:
    """A task of cross entropy on uniform random images in [0, 1] and random labels."""
    import torch

    def make_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(batch)
        images = torch.rand((batch, *shape), generator=draws)
        return images, torch.randint(classes, (batch,), generator=draws)

    return TrainingTask(model, make_batch, torch.nn.functional.cross_entropy)


def _causal_transformer(vocabulary: int, tokens: int, width: int, heads: int, blocks: int) -> torch.nn.Module:
    """Token ids (batch, tokens) -> logits (batch, tokens, vocabulary); position i sees positions 0..i."""
    import torch
    from torch import nn

    class CausalTransformer(nn.Module):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.position = nn.Parameter(torch.zeros(tokens, width))
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            mask = nn.Transformer.generate_square_subsequent_mask(tokens)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            length = text.shape[1]
            hidden = self.embed(text) + self.position[:length]
            hidden = self.blocks(hidden, mask=self.mask[:length, :length], is_causal=True)
            logits: torch.Tensor = self.head(self.norm(hidden))
            return logits

    return CausalTransformer()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Initialise from `seed` and leave the caller's random state as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
