"""Groups of completions: each prompt's on one rank, every prompt once an epoch."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.utils.data import DataLoader

from pyps.errors import InputError
from pyps.torch import UnevenGroupSampler


def test_a_prompt_is_of_one_rank_and_comes_once_an_epoch() -> None:
    split = [5, 2, 1]
    samplers = [UnevenGroupSampler(21, split, rank, group=4, passes=3, seed=1) for rank in range(3)]
    seen: Counter[int] = Counter()
    for sampler in samplers:
        batches = list(sampler)
        assert len(batches) == len(sampler) == 3 * sampler.rounds == 9
        for first in range(0, 9, 3):
            one = batches[first]
            assert batches[first : first + 3] == [one] * 3  # of which a trainer cuts each pass's part
            assert one == [k for k in one[::4] for _ in range(4)]
            seen.update(one[::4])
    assert seen == Counter(range(21))


def test_whole_prompts_move_between_ranks() -> None:
    samplers = [UnevenGroupSampler(24, [6, 2], rank, group=2) for rank in range(2)]
    order = [iter(sampler) for sampler in samplers]
    assert [len(next(one)) for one in order] == [12, 4]
    for sampler in samplers:
        sampler.replan([3, 5])
    assert [len(next(one)) for one in order] == [6, 10]


def test_a_rank_has_a_completion_for_each_pass() -> None:
    assert UnevenGroupSampler(8, [2, 6], 0, group=4, passes=8).least == 2
    with pytest.raises(InputError, match="accumulate"):
        UnevenGroupSampler(8, [1, 7], 0, group=4, passes=8)
    with pytest.raises(InputError, match="group"):
        UnevenGroupSampler(8, [4, 4], 0, group=0)


def test_its_samples_now_are_the_rows_of_the_batch() -> None:
    """By which accumulate() cuts a batch."""
    sampler = UnevenGroupSampler(24, [6, 2], 0, group=2)
    for batch in DataLoader(range(24), batch_sampler=sampler):  # type: ignore[arg-type]
        assert sampler.samples_now() == len(batch) == 12
