"""Layers that normalise over a batch: where each rank has its own, they see no other rank's samples."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

OWN_BATCHES = "the model's BatchNorm takes its statistics from each rank's own batch, small on slow ranks"


def normalized_by_batch(model: nn.Module) -> list[_BatchNorm]:
    """Return those that train on the statistics of a batch."""
    return [layer for layer in model.modules() if layer.training and isinstance(layer, _BatchNorm)]
