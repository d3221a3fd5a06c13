"""Training tasks from elsewhere: a script of the user's, torchvision's models, Hugging Face's transformers.

    net.py                 defines make_model(), make_batch(b), loss(outputs, targets), perhaps optimizer(p)
    torchvision:resnet18   images of 224 x 224, 1,000 classes
    transformers:gpt2      causal language modelling, 128 tokens, the architecture's default size

Weights and data are random: their values do not change how long a step takes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyps.errors import InputError
from pyps.tasks.builtin import TrainingTask

IMAGE = (3, 224, 224)
TOKENS = 128
NEEDED = ("make_model", "make_batch", "loss")


def script_task(path: str) -> TrainingTask:
    """The task of a Python file. Raises InputError if it is missing, raises, or lacks a function."""
    if not Path(path).is_file():
        raise InputError("model", "script", f"no file at {path}", "a Python file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise InputError("model", "script", path, "a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(path, "", found, "a file that runs") from error
    for name in NEEDED:
        if not callable(getattr(module, name, None)):
            raise InputError(path, name, "nothing", f"a function; a script defines {', '.join(NEEDED)}")
    try:
        model = module.make_model()
    except Exception as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(path, "make_model", found, "a function that takes no argument") from error
    return TrainingTask(model, module.make_batch, module.loss, getattr(module, "optimizer", None))


def torchvision_task(name: str) -> TrainingTask:
    """A classification model of torchvision. Raises InputError if it has none of that name, or is missing."""
    models: Any = _library("torchvision", "torchvision.models")
    if name not in models.list_models(module=models):
        raise InputError("model", "torchvision", repr(name), "one of torchvision.models.list_models()")
    import torch

    def make_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(batch)
        return torch.rand((batch, *IMAGE), generator=draws), torch.randint(1000, (batch,), generator=draws)

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        main = outputs if isinstance(outputs, torch.Tensor) else outputs[0]  # some have heads beside it
        return torch.nn.functional.cross_entropy(main, targets)

    return TrainingTask(models.get_model(name, weights=None, num_classes=1000), make_batch, loss)


def transformers_task(name: str) -> TrainingTask:
    """A causal language model of transformers by its architecture. Raises InputError as torchvision_task."""
    library: Any = _library("transformers", "transformers")
    try:
        config = library.AutoConfig.for_model(name)
        model = library.AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError) as error:
        expected = "a causal architecture, as gpt2, llama or opt"
        raise InputError("model", "transformers", f"{name!r}: {error}".splitlines()[0], expected) from None
    import torch

    def make_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(batch)
        text = torch.randint(config.vocab_size, (batch, TOKENS + 1), generator=draws)
        return text[:, :-1], text[:, 1:]

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())

    return TrainingTask(model, make_batch, loss)


LIBRARIES: dict[str, Callable[[str], TrainingTask]] = {
    "torchvision": torchvision_task,
    "transformers": transformers_task,
}


def _library(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        found = f"{name}, which cannot be imported ({error})"
        raise InputError("model", "library", found, f"it installed: pip install {name}") from None
