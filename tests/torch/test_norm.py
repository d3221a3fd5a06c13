"""BatchNorm over all ranks' samples is that of one process, whatever the ranks' losses weigh."""

from __future__ import annotations

import norm_jobs
import pytest
import torch
from ranks import Ranks

EXACT = 1e-12
AFTER_30_STEPS = 1e-9

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("batches", "momentum", "late"), [([9, 4], 0.1, False), ([5, 1, 3], None, False), ([2, 7], 0.1, True)]
)
def test_training_is_the_one_of_one_process(
    ranks: Ranks, batches: list[int], momentum: float | None, late: bool
) -> None:
    for errors in ranks.run(len(batches), norm_jobs.training_errors, batches, momentum, late):
        assert max(errors) < AFTER_30_STEPS


@pytest.mark.parametrize("batches", [[4, 7], [1, 6, 3]])
def test_a_rank_of_weight_0(ranks: Ranks, batches: list[int]) -> None:
    assert max(ranks.run(len(batches), norm_jobs.without_targets, batches)) < EXACT


@pytest.mark.parametrize("parts", [[[2, 3], [4, 1]], [[1, 5, 2], [3, 1, 1]]])
def test_micro_batches_of_unlike_sizes(ranks: Ranks, parts: list[list[int]]) -> None:
    assert max(ranks.run(2, norm_jobs.micro_batched, parts)) < EXACT


def test_a_layer_that_has_trained_is_not_converted(ranks: Ranks) -> None:
    for said in ranks.run(2, norm_jobs.converted_too_late):
        assert "a layer that has trained; expected convert() before the first step" in said
