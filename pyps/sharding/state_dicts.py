"""State dicts of sharded models and optimizers: whole, as one process would have them, and by parts.

    state = whole_state_dict(model)                 # plain tensors on the CPU: all ranks call it
    state = part_state_dict(model)                  # what this rank has: for torch.distributed.checkpoint
    load_state_dict(model, state)                   # of either

The same for an optimizer, of a model that went through shard() or of one that shard_optimizer() has sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pyps.sharding.optimizer import sharded_optimizer
from pyps.sharding.state import Owned, TensorPart, cut_state, gathered_wholes, owned_of, parts_of, whole_of

Sharded = torch.nn.Module | torch.optim.Optimizer


def whole_state_dict(owner: Sharded) -> dict[str, Any]:
    """Return the state of a sharded model or optimizer as one process has it; all ranks call it.

    Tensors that were sharded are copies on the CPU. A plain model or optimizer loads it.
    """
    if isinstance(owner, torch.optim.Optimizer):
        return whole_of(pieces_state(owner), owned_by(owner))
    state: dict[str, Any] = owner.state_dict()
    parts = {name: value for name, value in state.items() if isinstance(value, TensorPart)}
    found: dict[str, Any] = {}
    for flat in dict.fromkeys(part.owned.flat for part in parts.values()):
        of_flat = {name: part for name, part in parts.items() if part.owned.flat is flat}
        pieces = {part.owned.k: part for part in of_flat.values()}
        whole = gathered_wholes(flat, pieces)
        tensors = {k: whole(k) for k in pieces}  # one for all names of a tied parameter
        found |= {name: tensors[part.owned.k] for name, part in of_flat.items()}
    return {name: found.get(name, value) for name, value in state.items()}


def part_state_dict(owner: Sharded) -> dict[str, Any]:
    """Return the state with what this rank has of it, which torch.distributed.checkpoint saves and loads.

    It shares memory with the model. Of an optimizer that has not stepped it is one to load into, which
    load_state_dict() gives to the optimizer.
    """
    if isinstance(owner, torch.optim.Optimizer):
        if owner.state:
            return parts_of(pieces_state(owner), owned_by(owner))
        _make_state(owner)
        made = parts_of(pieces_state(owner), owned_by(owner))
        owner.state.clear()  # its first step counts from 0
        return made
    state: dict[str, Any] = owner.state_dict()
    return state


def load_state_dict(owner: Sharded, state: Mapping[str, Any]) -> None:
    """Load the state of a plain model or optimizer, a whole one, or one of parts of these ranks and shares.

    Raises InputError for tensors of another shape.
    """
    if not isinstance(owner, torch.optim.Optimizer):
        owner.load_state_dict(state)
    elif sharded_optimizer(owner) is not None:
        owner.load_state_dict(dict(state))
    else:
        owner.load_state_dict(cut_state(dict(state), owned_by(owner)))


def owned_by(optimizer: torch.optim.Optimizer) -> dict[int, Owned]:
    """Return the parameters that ranks own, by their numbers among those of the optimizer."""
    if (sharded := sharded_optimizer(optimizer)) is not None:
        return sharded.owned
    every = enumerate(p for group in optimizer.param_groups for p in group["params"])
    return {number: one for number, p in every if (one := owned_of(p)) is not None}


def pieces_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict with this rank's pieces."""
    if (sharded := sharded_optimizer(optimizer)) is not None:
        return sharded.pieces_state(optimizer)
    return optimizer.state_dict()


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state: a step whose gradients and rates are 0 changes no parameter."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    kept = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        for p, _ in kept:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] *= 0
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for p, gradient in kept:
            p.grad = gradient
