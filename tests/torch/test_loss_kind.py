"""What a Trainer's loss is found to be a mean over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from pyps.torch.loss_kind import means_over
from pyps.torch.weighting import count_targets, rows_of

WORDS = 6


def test_a_loss_that_leaves_other_labels_out_than_usual() -> None:
    """A trial with the usual one is an error of torch's, and says nothing."""
    scores = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0))

    def loss(batch: Mapping[str, Any]) -> float:
        labels = batch["labels"].flatten()
        return float(cross_entropy(scores[labels], labels, ignore_index=0))

    batch = {"labels": torch.tensor([[1, 2, 3, 4], [5, 1, 0, 0], [2, 0, 0, 0], [3, 4, 5, 0]])}
    counts = {"rows": rows_of, "targets": lambda part: int(count_targets(part, shift=False))}
    assert means_over(loss, batch, counts, 1e-5) == []
    assert means_over(loss, batch, {"count": lambda part: int(part["labels"].ne(0).sum())}, 1e-5) == ["count"]
