"""The trial that finds out whether an optimizer steps a piece of a parameter as it steps the whole.

SGD, Adam and their kin compute each element from its own gradient and state. Others look at whole parameters:
Adafactor at rows and columns, Muon at a matrix, LAMB at norms, LBFGS at all of them. A trial finds out: three
steps of a small parameter, whole and cut, with the same constants.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch

from pyps.errors import InputError
from pyps.sharding.state import STEP

SIZE = 96  # of the trial's matrix, in rows and columns: more than the 4,096 elements of a block-wise state
CUT = 3_331  # elements of its first piece, within a row and a block
STEPS = 3
CLOSE = 1e-9  # relative, in float64
EXPECTED = "one that computes each element by itself, as SGD, Adam, AdamW, RMSprop or Adagrad"
NOT_COPIED = ("step", "zero_grad")  # wrappers of the instance, which would step the original
OFF = ("capturable", "differentiable")  # options of where a step runs, not of what it computes


def check_elementwise(call: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for an optimizer that would step a cut parameter otherwise than a whole one."""
    kind = type(optimizer).__name__
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
    if inner:
        raise InputError(call, "optimizer", f"{kind}, which steps another one ({inner[0]})", EXPECTED)
    for number, group in enumerate(optimizer.param_groups):
        try:
            apart = _apart(optimizer, group)
        except Exception as error:
            raise InputError(
                call, "optimizer", f"{kind}, which cannot step a piece: {error}", EXPECTED
            ) from error
        if not apart <= CLOSE:
            found = f"{kind}, whose step of a cut parameter is {apart:.2g} off a whole one's (group {number})"
            raise InputError(call, "optimizer", found, EXPECTED)


def _apart(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    """How far a parameter that is stepped in two pieces is from one that is stepped whole."""
    device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    start = torch.linspace(-1, 1, SIZE * SIZE, dtype=dtype, device=device)
    sizes = [CUT, len(start) - CUT]
    whole = torch.nn.Parameter(start.clone().view(SIZE, SIZE))
    pieces = [torch.nn.Parameter(part.clone()) for part in torch.split(start, sizes)]
    twins = [_twin(optimizer, group, [whole]), _twin(optimizer, group, pieces)]
    for step in range(1, STEPS + 1):
        gradient = (start * 7 * step).sin()
        whole.grad = gradient.clone().view(SIZE, SIZE)
        for piece, part in zip(pieces, torch.split(gradient, sizes), strict=True):
            piece.grad = part.clone()
        for twin in twins:
            type(twin).step(twin)  # type: ignore[call-arg, unused-ignore]
    found, right = torch.cat([piece.detach() for piece in pieces]), whole.detach().view(-1)
    return float((found - right).abs().max() / (right - start).abs().max().clamp(min=1e-30))


def _twin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return one with the same constants and other parameters. Not by its class: a constructor's arguments
    are not all in the groups.
    """
    twin = object.__new__(type(optimizer))
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name not in NOT_COPIED})
    own = {name: _copied(value) for name, value in group.items() if name not in ("params", "param_names")}
    twin.param_groups = [{**own, **{name: False for name in OFF if name in own}, "params": params}]
    twin.state = defaultdict(dict)
    known = next((p for p in group["params"] if optimizer.state.get(p)), None)
    if known is not None:  # made by the constructor, or by earlier steps
        state = optimizer.state[known]
        twin.state.update({p: {n: _of_size(n, v, known, p) for n, v in state.items()} for p in params})
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    vars(twin).update({name: OrderedDict() for name in hooks})
    return twin


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _of_size(name: str, value: Any, known: torch.Tensor, parameter: torch.Tensor) -> Any:
    """Return a copy of a parameter's state; of one with its elements, their first for all of the other's."""
    if isinstance(value, torch.Tensor) and value.shape == known.shape and name != STEP:
        return torch.full_like(parameter, value.reshape(-1)[0].item() if value.numel() else 1.0)
    return _copied(value)
