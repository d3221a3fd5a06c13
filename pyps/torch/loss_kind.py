"""What a Trainer's loss is a mean over, found by trying it: a script may compute any loss.

The loss of a batch is compared with those of its two halves. Where it is their mean by rows, or by targets,
it is the mean over these. Some targets of the first row are left out before, so that the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pyps.torch.accumulate import rows_between
from pyps.torch.weighting import IGNORED, rows_of

LossOf = Callable[[Any], float]
CountOf = Callable[[Any], int]


def follows(loss: Callable[[int], float], items: int, tolerance: float) -> bool | None:
    """Whether the loss is divided by the number of items that it is given; None if neither that nor not."""
    once, twice = loss(items), loss(2 * items)
    if abs(once - 2 * twice) <= tolerance * abs(once):
        return True
    return False if abs(once - twice) <= tolerance * abs(once) else None


def means_over(
    loss: LossOf, batch: Mapping[str, Any], counts: Mapping[str, CountOf], tolerance: float
) -> list[str]:
    """Of these counts, those by which the loss is a mean; all of them for a batch that does not tell."""
    if (rows := rows_of(batch)) < 2:
        return list(counts)
    try:
        return _fitting(loss, _ragged(batch, rows), rows, counts, tolerance)
    except IndexError:  # the loss leaves other labels out, by its ignore_index
        return _fitting(loss, batch, rows, counts, tolerance)


def _fitting(
    loss: LossOf, batch: Mapping[str, Any], rows: int, counts: Mapping[str, CountOf], tolerance: float
) -> list[str]:
    """The same, of a batch as it is."""
    halves = [rows_between(batch, rows, *ends) for ends in ((0, rows // 2), (rows // 2, rows))]
    whole, means = loss(batch), [loss(half) for half in halves]
    fitting = []
    for name, count in counts.items():
        weights = [count(half) for half in halves]
        expected = sum(w * mean for w, mean in zip(weights, means, strict=True) if w) / max(1, sum(weights))
        if abs(whole - expected) <= tolerance * abs(whole):
            fitting.append(name)
    return fitting


def _ragged(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The batch without half of the first row's targets, where a target can be left out."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return dict(batch)
    if labels.dim() == 1 and rows < 4:
        return dict(batch)
    labels = labels.clone()
    if labels.dim() == 1:
        labels[0] = IGNORED
    else:
        labels[0, labels.shape[1] // 2 :] = IGNORED
    return {**batch, "labels": labels}
