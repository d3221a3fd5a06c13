"""Sample positions: every epoch is a permutation, for every worker and every cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from pyps.errors import InputError
from pyps.worker.sampling import fetcher, indices, permutation

FIXED = settings(derandomize=True, deadline=None)


class Squares(Dataset):  # type: ignore[type-arg]
    """A map-style dataset: sample i is (i, i*i)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index, index * index


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


def test_tensors_are_indexed_at_once() -> None:
    x, y = torch.arange(20.0).reshape(10, 2), np.arange(10)
    length, fetch = fetcher((x, y))
    assert length == 10
    got_x, got_y = fetch(np.array([3, 0]))
    assert torch.equal(got_x, x[[3, 0]])
    assert got_y.tolist() == [3, 0]


def test_a_tensor_dataset_is_its_tensors() -> None:
    x = torch.arange(6)
    length, fetch = fetcher(TensorDataset(x, x * 2))
    assert length == 6
    assert [t.tolist() for t in fetch(np.array([5, 1]))] == [[5, 1], [10, 2]]


def test_a_map_style_dataset_is_collated() -> None:
    length, fetch = fetcher(Squares(8))
    assert length == 8
    assert [t.tolist() for t in fetch(np.array([2, 7]))] == [[2, 7], [4, 49]]
    _, fetch = fetcher(Squares(8), collate=list)
    assert fetch(np.array([2, 7])) == [(2, 4), (7, 49)]


def test_many_samples_at_once_where_the_dataset_can() -> None:
    class Many(Squares):
        def __getitems__(self, wanted: list[int]) -> list[int]:
            return [-index for index in wanted]

    _, fetch = fetcher(Many(5), collate=list)
    assert fetch(np.array([1, 3])) == [-1, -3]


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        (iter([1, 2]), "list_iterator"),
        (Squares(0), "no samples"),
        ((torch.zeros(3), torch.zeros(4)), "lengths [3, 4]"),
        ((torch.zeros(0, 2),), "lengths [0]"),
    ],
)
def test_bad_datasets_are_named(dataset: object, found: str) -> None:
    with pytest.raises(InputError, match="batches: dataset") as caught:
        fetcher(dataset)
    assert caught.value.found == found


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("length", (0, 1, 0, 0)), ("count", (0, 0, 5, 0)), ("first", (-1, 1, 5, 0)), ("seed", (0, 1, 5, -1))],
)
def test_bad_positions_are_named(field: str, arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(InputError) as caught:
        indices(*arguments)
    assert caught.value.field == field
