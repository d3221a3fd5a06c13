"""Checks of a step before its gradient is pushed: backward() ran, nothing diverged. How misuse is shown."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pyps.errors import Diverged, InputError, InvalidArgument
from pyps.worker.step import Step

LOOK_EVERY = (
    32  # steps between two looks at the parameters where no loss is given: a look is a pass over memory
)
SHOWN_SHORT = (InputError, InvalidArgument, Diverged)
INSIDE = (f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/")

Gradients = Sequence[torch.Tensor | None]


class BackwardCheck:
    """Tell whether backward() ran since the last batch: it makes gradients, or writes to those there."""

    def __init__(self) -> None:
        self._before: list[tuple[int, int]] = []
        self._after: list[tuple[int, int]] = []

    def end(self, gradients: Gradients) -> None:
        """backward() has run."""
        self._after = _states(gradients)

    def check_unchanged(self, gradients: Gradients) -> None:
        """Raise InputError if a gradient is another one than backward() has left."""
        if self._after and self._after != _states(gradients):
            expected = "attach(clip_norm=), which clips the mean of a round, or a hook of the parameter"
            raise InputError("worker", "step", "gradients changed since worker.backward(loss)", expected)

    def begin(self, gradients: Gradients) -> None:
        """A batch goes to the script."""
        self._before, self._after = _states(gradients), []

    def check(self, gradients: Gradients) -> None:
        """Raise InputError if every gradient is absent or as it was."""
        for g, before in zip(gradients, self._before, strict=True):
            if g is not None and (id(g), g._version) != before:
                return
        found = "no gradient since the last batch"
        raise InputError("worker", "step", found, "loss.backward() before each step()")


def _states(gradients: Gradients) -> list[tuple[int, int]]:
    return [(id(g), g._version) if g is not None else (0, 0) for g in gradients]


class ScriptChanges:
    """Changes that the training script makes to a model in the store, which would be lost in silence: of
    parameters' values, of their memory, of whether they train.

    It tells by torch's versions, which a change through `.data` does not have.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """parameters: those in the store, by name."""
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._before: list[tuple[int, int]] = []

    def note(self) -> None:
        """The script's code follows."""
        self._before = [(p._version, p.data_ptr()) for p in self._parameters]

    def check(self) -> None:
        """Raise InputError if the script has changed a parameter since `note`, or frozen one."""
        for name, p, before in zip(self._names, self._parameters, self._before, strict=False):
            if not p.requires_grad:
                expected = "requires_grad as at attach(): the store steps it all the same; lr 0 holds a group"
                raise InputError("worker", name, "a parameter that was frozen after attach()", expected)
            if (p._version, p.data_ptr()) != before:
                expected = (
                    "parameters as the store has them: load a state before attach(), and evaluate other "
                    "values in a copy of the model"
                )
                raise InputError("worker", name, "a parameter that the script has changed", expected)


class DivergenceCheck:
    """Tell whether training diverged: a loss or, where none is given, a parameter that is not finite."""

    def __init__(self) -> None:
        self._steps = 0
        self._last_finite: float | None = None

    def check(self, step: Step, parameters: NDArray[np.float32]) -> None:
        """Raise Diverged, before the step's gradient is pushed."""
        self._steps += 1
        if step.loss is not None:
            if math.isfinite(step.loss):
                self._last_finite = step.loss
                return
            raise self.error(f"the loss is {step.loss}", step)
        if self._steps % LOOK_EVERY == 1 and not math.isfinite(float(np.dot(parameters, parameters))):
            bad = int(np.count_nonzero(~np.isfinite(parameters)))
            if bad:
                raise self.error(f"{bad} parameters are not finite", step)

    def error(self, what: str, step: Step) -> Diverged:
        """Return what is to be raised for a step."""
        first, last = step.claim.first, step.claim.first + step.claim.count - 1
        where = f"samples {first} to {last}, version {step.version}"
        return Diverged(what, where, self._last_finite)


_previous = sys.excepthook


def shorten_tracebacks() -> None:
    """From now on misuse that ends this process is shown by the script's own frames: those of pyps and torch
    do not show the cause. Idempotent.
    """
    global _previous
    if sys.excepthook is not _show:
        _previous, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, SHOWN_SHORT):
        _previous(kind, error, trace)
        return
    shown = traceback.TracebackException(kind, error, trace)
    own = [frame for frame in shown.stack if not frame.filename.startswith(INSIDE)]
    shown.stack = traceback.StackSummary.from_list(own or list(shown.stack))
    sys.stderr.write("".join(shown.format()))
