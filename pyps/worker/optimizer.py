"""The torch optimizers in a run: options are read, and step() changes nothing, for the store steps.

Schedulers and scalers want to see step() called once a step. The worker calls it when all gradients have been
taken away; a call by the training script is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pyps.errors import InputError

OWN_HOOKS = 2  # of each optimizer
OptimizerArgument = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def as_optimizers(
    given: OptimizerArgument, model: torch.nn.Module, *, is_local: bool
) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that attach() was given, in their order; None: SGD with torch's defaults.

    is_local: they take local steps. Raises InputError for what is no optimizer, for several without local
    steps, for a parameter that two of them have, and for one whose step() computes gradients by itself.
    """
    if given is None:
        return (torch.optim.SGD(model.parameters()),)
    found = list(given) if isinstance(given, Sequence) else [given]
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise InputError("attach", "optimizer", type(one).__name__, "a torch.optim.Optimizer, or several")
    if not found or (len(found) > 1 and not is_local):
        names = f"{len(found)} of them{': ' * bool(found)}{', '.join(type(one).__name__ for one in found)}"
        raise InputError("attach", "optimizer", names, "one; with local steps one or more")
    named = {id(p): name for name, p in model.named_parameters()}
    seen: set[int] = set()
    for one in found:
        closure = inspect.signature(type(one).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            expected = "an optimizer that steps with the gradients that are there"
            raise InputError("attach", "optimizer", f"{type(one).__name__}, which needs a closure", expected)
        mine = {id(p) for group in one.param_groups for p in group["params"]}
        for shared in mine & seen:
            which = f"{named.get(shared, 'a parameter')} in two optimizers"
            raise InputError("attach", "optimizer", which, "each parameter in one")
        seen |= mine
    return tuple(found)


class OptimizerSteps:
    """Calls of one optimizer's step(). Refuses every other call of it from now on with InputError.

    parameters: those in the store. call() refuses a gradient of any other, which would be stepped here alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._stored = {id(parameter) for parameter in parameters}
        self._allowed = self._stepped = False
        optimizer.register_step_pre_hook(self._check_caller)
        optimizer.register_step_post_hook(self._note)

    def unscale(self, scaler: Any) -> None:
        """Let a GradScaler unscale the gradients, unless the training script has already done so."""
        if getattr(self._optimizer, "_step_supports_amp_scaling", False):
            raise InputError("step", "optimizer.fused", "True", "False where a GradScaler is used")
        with suppress(RuntimeError):  # unscaled since the last update(), or misused: then step() raises, too
            scaler.unscale_(self._optimizer)

    def call(self, scaler: Any = None) -> bool:
        """Call step() with no gradients left; False if the scaler found some that were not finite.

        A GradScaler calls step() only if all gradients were finite. Without gradients, and where nothing
        sees the call, none is made: torch's takes longer than all that a small push does.
        """
        is_empty = self._check_stored()
        if is_empty and scaler is None and not self._is_watched():
            return True
        self._allowed, self._stepped = True, False
        try:
            if scaler is None:
                self._optimizer.step()
            else:
                scaler.step(self._optimizer)
        finally:
            self._allowed = False
        return self._stepped

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def _is_watched(self) -> bool:
        """Return whether a scheduler or a hook other than ours sees calls of step()."""
        one: Any = self._optimizer
        hooks = len(one._optimizer_step_pre_hooks) + len(one._optimizer_step_post_hooks)
        everywhere = len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)
        return "step" in vars(one) or hooks + everywhere > OWN_HOOKS

    def _check_stored(self) -> bool:
        """Return whether there are no gradients."""
        is_empty = True
        for k, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                is_empty = False
                if p.numel() and id(p) not in self._stored:
                    found = f"a gradient of a parameter of shape {list(p.shape)} that is not in the store"
                    expected = (
                        "in the optimizer, with requires_grad, when attach() is called (with lr 0 until then)"
                    )
                    raise InputError("step", f"optimizer.param_groups[{k}]", found, expected)
        return is_empty

    def _check_caller(self, *_: Any) -> None:
        if not self._allowed:
            raise InputError(
                "optimizer", "step", "a call of optimizer.step()", "worker.step(): the store steps"
            )
