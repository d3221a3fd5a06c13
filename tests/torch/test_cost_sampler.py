"""Samples shared by cost: the same rounds and numbers as without, once each, and ranks that end together."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from pyps.errors import InputError
from pyps.torch.sampler import UnevenBatchSampler, UnevenCostSampler

SPLIT = [32, 16, 16]
LENGTH = 64 * 5 + 20  # the last round is smaller
COSTS = np.clip(np.random.default_rng(0).lognormal(6, 1, LENGTH), 16, 4096)
LATEST = 1.05


def samplers(**more: object) -> list[UnevenCostSampler]:
    return [UnevenCostSampler(LENGTH, SPLIT, rank, costs=COSTS, **more) for rank in range(len(SPLIT))]


def rounds(found: list[UnevenCostSampler]) -> list[list[list[int]]]:
    """Return the samples of each rank, for each round."""
    return [list(one) for one in zip(*[list(iter(sampler)) for sampler in found], strict=True)]


def test_rounds_and_numbers_are_those_of_the_plan() -> None:
    plain = zip(*[list(iter(UnevenBatchSampler(LENGTH, SPLIT, rank))) for rank in range(3)], strict=True)
    for by_cost, one in zip(rounds(samplers()), plain, strict=True):
        assert sorted(chain(*by_cost)) == sorted(chain(*one))
        assert [len(part) for part in by_cost] == [len(part) for part in one]


def test_ranks_end_together() -> None:
    speeds = np.array(SPLIT) / SPLIT[0]
    for by_cost in rounds(samplers())[:-1]:
        seconds = np.array([COSTS[part].sum() for part in by_cost]) / speeds
        assert seconds.max() <= LATEST * seconds.mean()
    unlike = zip(*[list(iter(UnevenBatchSampler(LENGTH, SPLIT, rank))) for rank in range(3)], strict=True)
    late = [np.array([COSTS[part].sum() for part in one]) / speeds for one in unlike]
    assert max(seconds.max() / seconds.mean() for seconds in late) > LATEST


def test_a_resumed_epoch_has_each_sample_once() -> None:
    begun = samplers(seed=3)
    seen = [k for ranks in rounds(begun)[:2] for part in ranks for k in part]
    resumed = samplers(seed=3)
    for sampler in resumed:
        sampler.load_state_dict(begun[0].state_dict(2))
    rest = [k for ranks in rounds(resumed) for part in ranks for k in part]
    assert sorted(seen + rest) == list(range(LENGTH))


def test_costs_are_of_every_sample() -> None:
    for costs in (COSTS[1:], -COSTS, np.full(LENGTH, np.nan)):
        with pytest.raises(InputError, match="costs"):
            UnevenCostSampler(LENGTH, SPLIT, 0, costs=costs)
