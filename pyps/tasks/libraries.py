"""Tasks of libraries: models of torchvision and of Hugging Face's transformers, by name.

    torchvision:resnet18   images of 224 x 224, 1,000 classes
    transformers:gpt2      causal language modelling, 128 tokens, the architecture's default size

Weights and data are random: their values do not change how long a step takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pyps.errors import InputError
from pyps.tasks.task import TrainingTask, random_images

IMAGE = (3, 224, 224)
CLASSES = 1000
TOKENS = 128


def torchvision_task(name: str) -> TrainingTask:
    """A classification model of torchvision. Raises InputError if there is none, or no torchvision."""
    models: Any = _library("torchvision", "torchvision.models")
    if name not in models.list_models(module=models):
        raise InputError("model", "torchvision", repr(name), "one of torchvision.models.list_models()")
    import torch

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        main = outputs if isinstance(outputs, torch.Tensor) else outputs[0]  # some have auxiliary heads
        return torch.nn.functional.cross_entropy(main, targets)

    model = models.get_model(name, weights=None, num_classes=CLASSES)
    return TrainingTask(model, random_images(IMAGE, CLASSES), loss)


def transformers_task(name: str) -> TrainingTask:
    """A causal language model of transformers, by architecture. Raises InputError as torchvision_task."""
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
