"""The digits of scikit-learn: 1,797 real 8x8 images, 360 of them (20 %) held out, always the same."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits

HELD_OUT = 360
TRAIN = 1797 - HELD_OUT
SPLIT_SEED = 0

Split = tuple[torch.Tensor, torch.Tensor]


def load() -> tuple[Split, Split]:
    """((images, labels) to train on, (images, labels) held out); images float32 [n, 1, 8, 8] in 0..1."""
    digits = load_digits()
    images = torch.from_numpy((digits.images[:, None] / 16.0).astype(np.float32))
    labels = torch.from_numpy(digits.target.astype(np.int64))
    order = torch.from_numpy(np.random.default_rng(SPLIT_SEED).permutation(len(labels)))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return (images[train], labels[train]), (images[held_out], labels[held_out])
