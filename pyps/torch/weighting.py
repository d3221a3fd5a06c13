"""Whether this process weights its gradients. Without weights, unequal batches give a wrong one, silently."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch.distributed as dist

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
