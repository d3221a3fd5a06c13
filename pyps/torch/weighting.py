"""Weights of gradients: their samples, and whether this process uses any.

Without weights, unequal batches give a wrong gradient, silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from pyps.errors import InputError

_weighted = False


def note_weights() -> None:
    """This process weights its gradients."""
    global _weighted
    _weighted = True


def warn_without_weights(split: Sequence[int]) -> None:
    """Warn where ranks with unequal batches have trained without weights."""
    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if grouped and not _weighted and len(set(split)) > 1:
        warnings.warn(
            f"batches {list(split)} differ, but neither weighted_hook nor loss_scale is in use: "
            "the average over ranks is not the gradient of all samples",
            stacklevel=3,
        )


def not_zero(total: torch.Tensor) -> torch.Tensor:
    """W, or 1 where no rank has a target: every weight is zero then."""
    return torch.where(total > 0, total, 1.0)


def as_float64(number: Any, device: torch.device) -> torch.Tensor:
    """A number or a tensor as float64 [] on a device; for a number the CPU does not wait for the device."""
    if isinstance(number, torch.Tensor):
        return number.to(device, torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)


def rows_of(batch: Any) -> int:
    """The length of the first tensor in nested tuples, lists and dicts. Raises InputError without one."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    found = "no tensor among forward()'s arguments"
    raise InputError("weighted_hook", "count", found, "count=, or hook.set_weight(n)")
