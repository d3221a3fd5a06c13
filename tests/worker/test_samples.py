"""Data sets as sources: each kind read right, random numbers by position, parts joined, ranks compared."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from pyps.errors import InputError
from pyps.worker.data.loader import fingerprint_of
from pyps.worker.data.samples import (
    Columns,
    Draw,
    MapStyle,
    Source,
    Stream,
    Task,
    join_batches,
    make_source,
    seed_at,
    seed_generators,
)

FIXED = settings(derandomize=True, deadline=None)
Pair = namedtuple("Pair", "x word")


class Squares(Dataset[Any]):
    """Sample i is (i, i*i)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index, index * index


class Dice(Squares):
    """Sample i is random, from all three generators."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), torch.rand(2)


class Count(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def source_of(dataset: Any, collate_fn: Any = None, **more: Any) -> Source:
    return make_source(dataset, collate_fn, 7, 0, 1, **more)


def batch(source: Source, *index: int, first: int = 0) -> Any:
    return source[Task(first, len(index), np.array(index))]


def test_tensors_are_indexed_at_once() -> None:
    x, y = torch.arange(20.0).reshape(10, 2), np.arange(10)
    source = source_of((x, y))
    assert isinstance(source, Columns)
    assert source.length == 10
    got_x, got_y = batch(source, 3, 0)
    assert torch.equal(got_x, x[[3, 0]])
    assert got_y.tolist() == [3, 0]


def test_a_tensor_dataset_is_its_tensors() -> None:
    x = torch.arange(6)
    assert [t.tolist() for t in batch(source_of(TensorDataset(x, x * 2)), 5, 1)] == [[5, 1], [10, 2]]


def test_a_map_style_dataset_is_collated() -> None:
    source = source_of(Squares(8))
    assert isinstance(source, MapStyle)
    assert source.length == 8
    assert [t.tolist() for t in batch(source, 2, 7)] == [[2, 7], [4, 49]]
    assert batch(source_of(Squares(8), list), 2, 7) == [(2, 4), (7, 49)]


def test_many_samples_at_once_where_the_dataset_can() -> None:
    class Many(Squares):
        def __getitems__(self, wanted: list[int]) -> list[int]:
            return [-index for index in wanted]

    assert batch(source_of(Many(5), list), 1, 3) == [-1, -3]
    assert not source_of(Many(5)).divisible
    assert not source_of(Subset(Many(5), [4, 2])).divisible
    assert source_of(Subset(Squares(5), [4, 2])).divisible, "a Subset's __getitems__ reads one by one"


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        (iter([1, 2]), "list_iterator"),
        (Squares(0), "no samples"),
        ((torch.zeros(3), torch.zeros(4)), "lengths [3, 4]"),
        ((torch.zeros(0, 2),), "lengths [0]"),
        (5, "int"),
    ],
)
def test_bad_datasets_are_named(dataset: object, found: str) -> None:
    with pytest.raises(InputError, match="batches: dataset") as caught:
        source_of(dataset)
    assert caught.value.found == found


def test_only_a_stream_may_divide_itself() -> None:
    with pytest.raises(InputError, match="sharded"):
        source_of(Squares(3), sharded=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_stream_is_divided_among_ranks_and_begins_again(ranks: int) -> None:
    stream = Count(10)
    parts = []
    for rank in range(ranks):
        source = make_source(stream, list, 7, rank, ranks)
        assert isinstance(source, Stream)
        length = len(range(rank, 10, ranks))
        parts += source[Task(0, length, None)]
        assert source[Task(length, 1, None)] == [rank], "the next pass"
    assert sorted(parts) == list(range(10))
    assert stream.epochs == [0, 1] * ranks


class Shuffled(IterableDataset[Any]):
    """Sample i is (i, a random number). How: a pass is shuffled at its begin, or as it goes on."""

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[Any]:
        left = list(range(30))
        random.shuffle(left)
        while left:
            yield left.pop(random.randrange(min(self.buffer, len(left)))), float(np.random.rand())


@pytest.mark.parametrize("buffer", [1, 8])
def test_ranks_divide_one_order_of_a_stream_that_shuffles_itself_whatever_their_batches(buffer: int) -> None:
    passes = []
    for sizes in ((5, 5, 5, 5), (3, 7, 1, 9)):
        seen: list[Any] = [[], []]
        for rank in range(3):
            source, first = make_source(Shuffled(buffer), list, 7, rank, 3), 100 * rank
            read = []
            for size in sizes:
                read += source[Task(first, size, None)]
                first += 3 * size
            for number in range(2):
                seen[number] += read[10 * number : 10 * (number + 1)]
        assert [sorted(i for i, _ in one) for one in seen] == [list(range(30))] * 2
        passes.append(seen)
    assert passes[0] == passes[1]
    assert passes[0][0] != passes[0][1], "each pass has an order of its own"
    assert len({number for _, number in passes[0][0]}) == 30


def test_parts_of_a_stream_that_divides_itself_draw_other_numbers() -> None:
    one, other = (
        make_source(Shuffled(1), list, 7, rank, 2, sharded=True)[Task(0, 10, None)] for rank in range(2)
    )
    assert [i for i, _ in one] == [i for i, _ in other], "shuffled alike, to be divided"
    assert not {number for _, number in one[1:]} & {number for _, number in other[1:]}


def test_a_stream_that_divides_itself_is_read_whole() -> None:
    assert make_source(Count(4), list, 7, 1, 3, sharded=True)[Task(0, 4, None)] == [0, 1, 2, 3]


def test_a_part_without_samples_is_an_error() -> None:
    with pytest.raises(InputError, match="no samples in part 2 of 3"):
        make_source(Count(2), list, 7, 2, 3)[Task(0, 1, None)]


def test_random_numbers_belong_to_positions() -> None:
    source = source_of(Dice(20), list)
    whole = batch(source, *range(10), first=30)
    torch.manual_seed(99)
    random.seed(1)
    parts = batch(source, *range(4), first=30) + batch(source, *range(4, 10), first=34)
    for one, other in zip(whole, parts, strict=True):
        assert one[:3] == other[:3]
        assert torch.equal(one[3], other[3])
    assert len({sample[1] for sample in whole}) == 10
    assert batch(source, 0, first=31)[0][1] != whole[0][1]


def test_seeds_differ_by_run_position_and_use() -> None:
    seeds = {seed_at(run, at, draw) for run in (0, 1, 2**64 - 1) for at in range(500) for draw in Draw}
    assert len(seeds) == 3 * 500 * len(Draw)


def test_seeding_is_cheap() -> None:
    from timeit import repeat

    each = min(repeat(lambda: seed_generators(3, 5, Draw.STEP), number=200, repeat=5)) / 200
    assert each < 50e-6


SAMPLES = st.sampled_from(
    [
        lambda k: k,
        lambda k: (k, k * 0.5),
        lambda k: {"x": torch.full((2, 3), float(k)), "word": str(k), "n": np.int64(k)},
        lambda k: [torch.tensor(k), (str(k), str(-k))],
        lambda k: Pair(torch.tensor([k]), str(k)),
    ]
)


@FIXED
@given(SAMPLES, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_joined_parts_are_the_batch(sample: Any, sizes: list[int]) -> None:
    numbers = iter(range(sum(sizes)))
    parts = [default_collate([sample(k) for k in islice(numbers, size)]) for size in sizes]
    whole = default_collate([sample(k) for k in range(sum(sizes))])
    assert repr(join_batches(parts)) == repr(whole)


def test_what_cannot_be_joined_is_named() -> None:
    with pytest.raises(InputError, match="collate_fn"):
        join_batches([object(), object()])


class Noisy(Squares):
    """Read as another machine reads it: every value a little different."""

    def __init__(self, error: float, shift: int = 0) -> None:
        super().__init__(10)
        self.error, self.shift = error, shift

    def __getitem__(self, index: int) -> Any:
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index + self.shift))
        return image * (1 + self.error * torch.rand(3, 8, 8)), index, f"/data/of/{self.error}/name.jpg"


def test_the_same_data_set_on_unlike_machines_has_one_fingerprint() -> None:
    one, other, third = (fingerprint_of(source_of(Noisy(*x))) for x in ((0.0,), (1e-5,), (0.0, 1)))
    assert one.length == other.length == 10
    assert one.digest == other.digest == third.digest
    assert abs(one.mean - other.mean) <= one.tolerance
    assert abs(one.mean - third.mean) > one.tolerance + third.tolerance, "other images"


def test_fingerprints_tell_types_lengths_labels_and_names_apart() -> None:
    class Named(Squares):
        fingerprint = "a"

    class Other(Squares):
        fingerprint = "b"

    Other.__qualname__ = Named.__qualname__
    made = [Squares(5), Squares(6), Dice(5), Named(5), Other(5), (torch.zeros(5),), (torch.zeros(5, 1),)]
    prints = [fingerprint_of(source_of(dataset)) for dataset in made]
    assert len(set(prints)) == len(prints)
    assert fingerprint_of(source_of(Count(4))) == fingerprint_of(source_of(Count(8))), (
        "a stream has no length"
    )


def test_samples_that_differ_each_time_do_not_count() -> None:
    class Clock(Squares):
        def __getitem__(self, index: int) -> Any:
            return np.random.default_rng().random()

    assert fingerprint_of(source_of(Clock(5))) == fingerprint_of(source_of(Clock(5)))
