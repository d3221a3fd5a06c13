"""Finding a task by its name.

mlp                    a built-in task (pyps.tasks.builtin)
package.module:factory a factory of the user's, which takes no argument and returns a TrainingTask
net.py                 defines make_model(), make_batch(b), loss(outputs, targets), perhaps optimizer(p)
torchvision:resnet18   a model of a library (pyps.tasks.libraries)
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pyps.errors import InputError
from pyps.tasks.builtin import BUILTIN
from pyps.tasks.libraries import LIBRARIES
from pyps.tasks.task import TrainingTask, require_torch

EXPECTED_MODEL = "a built-in model ({names}), script.py or module:factory, importable from this folder"
SCRIPT_FUNCTIONS = ("make_model", "make_batch", "loss")


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
    if (folder := str(Path(path).resolve().parent)) not in sys.path[:1]:
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
