"""The bytes that a rank holds of a model in training, by the kinds of a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pyps.sharding.optimizer import sharded_optimizer

RESIDENT_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of ru_maxrss


def bytes_held(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Return the bytes of this rank's parameters, gradients and optimizer state, as they are now.

    Between steps these are what plan.json says of the rank under `bytes`, but for the blocks that a pass
    gathers, and for the copy of the gradients that DDP has without gradient_as_bucket_view=True.
    model: plain, in DDP, or one that went through shard() or fully_shard.
    """
    parameters = list(model.parameters())
    plain = getattr(model, "_orig_mod", model)
    copied = isinstance(plain, DistributedDataParallel) and not plain.gradient_as_bucket_view
    buckets = sum(p.nbytes for p in parameters if p.requires_grad) if copied else 0
    states = [] if optimizer is None else [list(values.values()) for values in optimizer.state.values()]
    if optimizer is not None and (sharded := sharded_optimizer(optimizer)) is not None:
        states.append(list(sharded.masters.values()))
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters) + buckets,
        "optimizer": _bytes(value for values in states for value in values),
    }


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has held, as a profile counts a step's; 0 on Windows."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    try:
        import resource
    except ModuleNotFoundError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RESIDENT_UNIT


def _bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors, each place in memory once."""
    local = [getattr(one, "_local_tensor", one) for one in tensors if isinstance(one, torch.Tensor)]
    return sum({one.data_ptr(): one.numel() * one.element_size() for one in local if one.numel()}.values())
