"""Samples of unlike cost: each is shared once, on all hosts alike, and ranks end nearly together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples
from unlike_lengths import least_longest

from pyps.errors import InputError
from pyps.formats import (
    Cluster,
    Device,
    Job,
    LengthCost,
    LengthMoments,
    Lengths,
    Memory,
    ModelInfo,
    Point,
    Profile,
    WorkerGroup,
)
from pyps.profiler import select_fit
from pyps.solver.lengths import SampleLengths, equal_parts, shares_by_cost
from pyps.solver.plan import make_plan

LATEST = 1.05  # the slowest rank over the mean


def ends(ticks: np.ndarray, owner: np.ndarray) -> np.ndarray:
    return np.array([row[owner == rank].sum() for rank, row in enumerate(ticks)])


@given(
    st.lists(st.floats(0.01, 100), min_size=8, max_size=40),
    st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=4),
)
@settings(max_examples=examples(18, 60), deadline=None)
def test_each_rank_has_its_least_and_no_end_is_below_the_bound(
    costs: list[float], speeds: list[float]
) -> None:
    ticks = np.rint(1e6 * np.array(costs) / np.array(speeds)[:, None]).astype(np.int64)
    owner = shares_by_cost(ticks, [2] * len(speeds))
    assert np.bincount(owner, minlength=len(speeds)).min() >= 2
    assert np.array_equal(owner, shares_by_cost(ticks.copy(), [2] * len(speeds)))
    assert ends(ticks, owner).max() >= (1 - 1e-9) * least_longest(ticks)


@pytest.mark.parametrize("seed", range(5))
def test_few_samples_are_shared_nearly_as_well_as_by_every_choice(seed: int) -> None:
    """On ranks of which one is slower at long samples."""
    n = np.random.default_rng(seed).lognormal(0, 1, 9)
    ticks = np.rint(1e6 * np.array([n + 0.1 * n**2, n + 0.5 * n**2])).astype(np.int64)
    choices = (np.array(one) for one in itertools.product((0, 1), repeat=9))
    best = min(ends(ticks, one).max() for one in choices if 0 < one.sum() < 9)
    assert least_longest(ticks) <= best
    assert ends(ticks, shares_by_cost(ticks, [1, 1])).max() <= LATEST * best


@pytest.mark.parametrize("unlike", [False, True])
def test_production_like_lengths_end_together(unlike: bool) -> None:
    for seed in range(5):
        draw = np.random.default_rng(seed)
        tokens = np.clip(draw.lognormal(6, 1, 256), 16, 2048).astype(int)
        known = SampleLengths(tokens, 256)
        costs = [
            LengthCost(fixed_seconds=1e-3, per_token_seconds=1e-5, per_square_seconds=q)
            for q in (2.5e-9, 2.5e-9, 5e-9, 1e-8)
        ]
        split = [4000, 4000, 2000, 1000] if unlike else [4000] * 4
        shares = known.shares(np.arange(256), split, costs, [1] * 4)
        assert sorted(np.concatenate(shares).tolist()) == list(range(256))
        took = np.array(
            [known.tokens_worth(c, s).sum() / b for c, s, b in zip(costs, shares, split, strict=True)]
        )
        assert took.max() <= LATEST * took.mean()
        in_order = [known.tokens_worth(costs[0], part).sum() for part in np.split(np.arange(256), 16)]
        assert max(in_order) > LATEST * np.mean(in_order), "without costs they do not"


def test_parts_are_about_equal_and_none_is_empty() -> None:
    assert equal_parts(np.array([8.0, 4, 4, 2, 2, 2, 2]), 3) == [(0, 1), (1, 3), (3, 7)]
    assert equal_parts(np.array([100.0, 1, 1]), 3) == [(0, 1), (1, 2), (2, 3)]
    assert equal_parts(np.array([1.0, 1, 100]), 3) == [(0, 1), (1, 2), (2, 3)]
    assert equal_parts(np.array([3.0]), 1) == [(0, 1)]


def test_moments_are_whole_numbers_sums_and_lengths_are_compared() -> None:
    known = SampleLengths(np.array([1, 2, 2, 2_000_000_000]), 4)
    assert known.mean == 500_000_001.25
    assert known.mean_square == (1 + 4 + 4 + 4 * 10**18) / 4
    cost = [LengthCost(per_token_seconds=1.0)]
    assert known.digest(cost) != SampleLengths([1, 2, 3, 4], 4).digest(cost)
    assert known.digest(cost) != known.digest([LengthCost(per_token_seconds=2.0)])


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(InputError, match="samples"):
        shares_by_cost(np.ones((3, 2), np.int64), [1, 1, 1])
    for lengths in ([1, 2], [1.5, 2, 3], [0, 1, 2]):
        with pytest.raises(InputError, match="lengths"):
            SampleLengths(lengths, 3)


def profile(cost: LengthCost, known: bool = True, memory: Memory | None = None) -> Profile:
    points = [Point(batch=b, seconds=1e-3 + b * float(cost.seconds(100))) for b in (1, 2, 4, 8, 16, 64, 256)]
    one = Point(tokens=100, batch=1, seconds=1.0, peak_bytes=1)
    lengths = Lengths(
        cost=cost, step_seconds=1e-3, fixed_bytes=1, per_token_bytes=1000, per_square_bytes=10, points=[one]
    )
    return Profile(
        device=Device(name="d"),
        model=ModelInfo(name="m", tokens_per_sample=100),
        points=points,
        fit=select_fit(points),
        lengths=lengths if known else None,
        memory=memory,
    )


def test_memory_of_the_data_bounds_a_plan_in_tokens() -> None:
    """Long samples hold more than as many tokens of the profile's short ones."""
    cost = LengthCost(per_token_seconds=1e-5)
    budget = 1 + 10_000 * (1000 + 10 * 625)  # of samples of 400 tokens on average, as below
    memory = Memory(fixed_bytes=1, bytes_per_sample=100 * 2000, budget_bytes=budget)
    moments = LengthMoments(mean=400.0, mean_square=250_000.0)
    groups = [WorkerGroup(name="small", profile="a"), WorkerGroup(name="large", profile="b")]
    job = Job(global_batch=40_000, unit="tokens", lengths=moments)
    found = make_plan(Cluster(job=job, worker=groups), [profile(cost, memory=memory), profile(cost)])
    assert 9_900 <= found.workers[0].batch <= 10_000


def test_a_plan_in_tokens_weighs_them_by_the_cost_of_the_data() -> None:
    """A device with slow attention gets less of long data than its profile of short samples would give it."""
    alike = LengthCost(per_token_seconds=1e-5)
    attention = LengthCost(per_token_seconds=5e-6, per_square_seconds=5e-8)  # the same for 100 tokens
    groups = [WorkerGroup(name="a", profile="a"), WorkerGroup(name="b", profile="b")]

    def shares(moments: LengthMoments | None, known: bool = True) -> list[int]:
        job = Job(global_batch=40_000, unit="tokens", lengths=moments)
        found = make_plan(Cluster(job=job, worker=groups), [profile(alike), profile(attention, known)])
        assert [worker.length_cost for worker in found.workers] == [alike, attention if known else None]
        return [worker.batch for worker in found.workers]

    assert shares(None) == [20_000, 20_000]
    mean, square = 400.0, 250_000.0
    slower = (5e-6 * mean + 5e-8 * square) / (1e-5 * mean)
    found = shares(LengthMoments(mean=mean, mean_square=square))
    assert found[0] / found[1] == pytest.approx(slower, rel=0.02)
    with pytest.raises(InputError, match="lengths"):
        shares(LengthMoments(mean=mean, mean_square=square), known=False)
