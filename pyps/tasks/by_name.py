"""Finding a task by its name.

mlp                    a built-in task (pyps.tasks.builtin)
package.module:factory a factory of the user's, which takes no argument and returns a TrainingTask
net.py                 defines make_model(), make_batch(b), loss(outputs, targets), perhaps optimizer(p)
torchvision:resnet18   a model of a library: images of 224 x 224, 1,000 classes
transformers:gpt2      causal language modelling, 128 tokens, the architecture's default size

Weights and data are random: their values do not change how long a step takes.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyps.errors import InputError
from pyps.tasks.builtin import BUILTIN
from pyps.tasks.task import TrainingTask, random_images, require_torch

EXPECTED_MODEL = "a built-in model ({names}), script.py or module:factory, importable from this folder"
SCRIPT_FUNCTIONS = ("make_model", "make_batch", "loss")
IMAGE = (3, 224, 224)
CLASSES = 1000
TOKENS = 128


def load_task(name: str) -> TrainingTask:
    """The task of this name; a module is imported with the current folder on the path.

    Raises InputError if there is no such task, if a module, script or factory raises, or if a factory does
    not return a TrainingTask; PypsError if torch is not installed.
    """
    require_torch()
    if name in BUILTIN:
        return BUILTIN[name]()
    if name.endswith(".py"):
        return script_task(name)
    module, _, member = name.partition(":")
    if module in LIBRARIES and member:
        return LIBRARIES[module](member)
    if not module or not member:
        raise InputError("model", "", repr(name), EXPECTED_MODEL.format(names=", ".join(BUILTIN)))
    return _factory_task(module, member)


def script_task(path: str) -> TrainingTask:
    """The task of a Python file. Its folder becomes the first place for imports, as in `python SCRIPT`.

    Raises InputError if it is missing, raises, or lacks a function.
    """
    if not Path(path).is_file():
        raise InputError("model", "script", f"no file at {path}", "a Python file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise InputError("model", "script", path, "a Python file")
    module = importlib.util.module_from_spec(spec)
    if (folder := os.path.dirname(os.path.realpath(path))) not in sys.path[:1]:
        sys.path.insert(0, folder)  # for good: the script's functions may import later
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        expected = _expected_import(error, folder) or "a file that runs"
        raise InputError(path, "", _one_line(error), expected) from error
    for name in SCRIPT_FUNCTIONS:
        if not callable(getattr(module, name, None)):
            raise InputError(
                path, name, "nothing", f"a function; a script defines {', '.join(SCRIPT_FUNCTIONS)}"
            )
    try:
        model = module.make_model()
    except Exception as error:
        expected = _expected_import(error, folder) or "a function that takes no argument"
        raise InputError(path, "make_model", _one_line(error), expected) from error
    return TrainingTask(model, module.make_batch, module.loss, getattr(module, "optimizer", None))


def _factory_task(module: str, factory: str) -> TrainingTask:
    make = _find_factory(module, factory)
    name = f"{module}:{factory}"
    try:
        task = make()
    except Exception as error:
        raise InputError(name, "factory", _one_line(error), "a factory that takes no argument") from error
    if not isinstance(task, TrainingTask):
        found = f"a {type(task).__name__} returned"
        raise InputError(name, "factory", found, "pyps.tasks.TrainingTask(model, make_batch, loss)")
    return task


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


def _expected_import(error: Exception, folder: str) -> str:
    """Where a missing module is searched; "" for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return f"the module {error.name!r} in the script's own folder, {folder}, or installed"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


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

    def make_batch(batch: int, length: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(batch)
        text = torch.randint(config.vocab_size, (batch, length + 1), generator=draws)
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
