"""A model with batch normalization trains whatever is left for the last claim and the last micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pyps
from pyps.step.machine import next_part

torch.set_num_threads(1)


@given(st.integers(1, 300), st.integers(1, 40))
def test_parts_are_of_two_samples_or_more(samples: int, most: int) -> None:
    left, parts = samples, list[int]()
    while left:
        parts.append(next_part(left, most))
        left -= parts[-1]
    assert max(parts) <= most
    assert len(parts) == -(-samples // most)
    assert min(parts) >= min(2, samples) or most <= 2


@pytest.mark.parametrize(("samples", "batch", "micro"), [(31, 10, 10), (9, 8, 3), (7, 3, 4), (33, 9, 8)])
def test_batch_normalization_trains_to_the_end(
    shm: Path, tmp_path: Path, samples: int, batch: int, micro: int
) -> None:
    rows = torch.arange(16.0).reshape(8, 2)
    seen = 0
    with pyps.join(
        store="small", rank=0, batches=[batch], policy="asp", samples=samples, micro_batch=micro
    ) as worker:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
        parts: Sequence[torch.Tensor]
        for parts in worker.batches((rows, rows[:, :1])):
            loss = nn.functional.mse_loss(model(parts[0]), parts[1])
            loss.backward()
            seen += len(parts[0])
            worker.step(loss)
        assert worker.store.status().samples_assigned == samples
    assert seen == samples
