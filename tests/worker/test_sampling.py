"""Sample positions: every epoch is a permutation, for every worker and every cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps.errors import InputError
from pyps.worker.data.sampling import indices, permutation

FIXED = settings(derandomize=True, deadline=None)


@FIXED
@given(st.integers(0, 2**63), st.integers(0, 10**9), st.integers(1, 300))
def test_an_epoch_is_a_permutation(seed: int, epoch: int, length: int) -> None:
    assert sorted(permutation(seed, epoch, length)) == list(range(length))


@FIXED
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 40), st.integers(0, 1000))
def test_any_cut_of_the_positions_gives_the_same_samples(cuts: list[int], length: int, first: int) -> None:
    whole = indices(first, sum(cuts), length, seed=7)
    parts, at = [], first
    for count in cuts:
        parts.append(indices(at, count, length, seed=7))
        at += count
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    for position, index in enumerate(whole.tolist(), start=first):
        assert index == permutation(7, position // length, length)[position % length]


def test_epochs_and_seeds_differ() -> None:
    one = permutation(1, 0, 100)
    assert not np.array_equal(one, permutation(1, 1, 100))
    assert not np.array_equal(one, permutation(2, 0, 100))
    assert not np.array_equal(permutation(0, 1, 100), permutation(1, 0, 100))


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("length", (0, 1, 0, 0)), ("count", (0, 0, 5, 0)), ("first", (-1, 1, 5, 0)), ("seed", (0, 1, 5, -1))],
)
def test_bad_positions_are_named(field: str, arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(InputError) as caught:
        indices(*arguments)
    assert caught.value.field == field
