"""Samples of unlike cost: each is shared once, counts and limits hold, and all ranks end nearly together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps.errors import InputError
from pyps.solver.lengths import LengthCost, shares_by_cost

LATEST = 1.05  # the slowest rank over the mean


def seconds(shares: list[list[int]], costs: np.ndarray, speeds: list[float]) -> np.ndarray:
    return np.array([costs[one].sum() for one in shares]) / np.array(speeds)


@given(
    st.lists(st.floats(0.01, 100), min_size=4, max_size=40),
    st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_each_sample_is_on_one_rank(costs: list[float], speeds: list[float]) -> None:
    shares = shares_by_cost(costs, speeds)
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    assert all(one == sorted(one) and one for one in shares)
    assert shares == shares_by_cost(list(costs), speeds), "the same on every rank"


@pytest.mark.parametrize("seed", range(5))
def test_few_samples_are_shared_nearly_as_well_as_by_every_choice(seed: int) -> None:
    draw = np.random.default_rng(seed)
    costs, speeds = draw.lognormal(0, 1, 8), [1.0, 0.5]
    ends = [
        max(costs[list(one)].sum(), (costs.sum() - costs[list(one)].sum()) / 0.5)
        for count in range(1, 8)
        for one in itertools.combinations(range(8), count)
    ]
    assert seconds(shares_by_cost(costs, speeds), costs, speeds).max() <= LATEST * min(ends)


def test_production_like_lengths_end_together_with_the_planned_numbers_of_samples() -> None:
    cost = LengthCost(1e-3, 1e-5, 2.5e-9)
    for seed in range(5):
        tokens = np.clip(np.random.default_rng(seed).lognormal(6, 1, 96), 16, 4096)
        costs, speeds, counts = cost.seconds(tokens), [1.0, 1.0, 0.5, 0.5], [32, 32, 16, 16]
        shares = shares_by_cost(costs, speeds, counts)
        assert [len(one) for one in shares] == counts
        found = seconds(shares, costs, speeds)
        assert found.max() <= LATEST * found.mean()
        in_order = np.array([part.sum() for part in np.split(costs, np.cumsum(counts)[:-1])]) / speeds
        assert in_order.max() > LATEST * in_order.mean(), "without costs they do not"


def test_a_cost_is_found_again_from_its_times() -> None:
    truth = LengthCost(2e-3, 3e-6, 4e-10)
    tokens = [128, 512, 1024, 4096]
    found = LengthCost.fitted(tokens, truth.seconds(tokens).tolist())
    assert found.seconds([300, 3000]) == pytest.approx(truth.seconds([300, 3000]), rel=1e-6)
    falling = LengthCost.fitted([1, 2, 3], [3.0, 2.0, 1.0])
    assert min(falling.fixed, falling.per_token, falling.per_square) >= 0


def test_what_cannot_be_shared_is_refused() -> None:
    for costs, speeds, most in (
        ([1.0], [1.0, 1.0], None),
        ([1.0, 2.0], [1.0, 1.0], [2, 0]),
        ([1.0, 2.0, 3.0], [1.0, 1.0], [1, 1]),
        ([1.0, float("nan")], [1.0], None),
        ([1.0], [-1.0], None),
        ([1.0], [0.0], None),
    ):
        with pytest.raises(InputError):
            shares_by_cost(costs, speeds, most)
    with pytest.raises(InputError, match="distinct"):
        LengthCost.fitted([8, 8, 16], [1.0, 1.0, 2.0])
    assert shares_by_cost([1.0, 2.0], [0.0, 1.0]) == [[], [0, 1]]
