"""A data set as the loader reads it: `source[Task]` is one batch, in whichever process.

A tuple of tensors is indexed at once. A map-style data set is read sample by sample, and put together by
collate_fn. A stream (IterableDataset) knows no positions: each process that reads it takes the next samples
of its own part, and begins again at the end.

Random numbers belong to positions: the generators of torch, NumPy and Python are seeded from (run seed,
position) before each sample is read, before a batch is collated and before it is yielded. So augmentation and
dropout do not depend on which process or attempt does them, and a resumed run repeats them bit for bit. Those
of a stream belong to its passes and places: all processes that divide it see one order, if it shuffles too.
"""

from __future__ import annotations

import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate, get_worker_info

from pyps.errors import InputError
from pyps.store.store import Store

Collate = Callable[[list[Any]], Any]
END = object()  # in place of a stream's next sample


@dataclass(frozen=True)
class Task:
    """Tell what to fetch: `count` samples from position `first` on; of a stream, the next ones.

    index: the samples, where the data set has a length.
    """

    first: int
    count: int
    index: NDArray[np.int64] | None


class Source(ABC):
    """A data set. `length`: of one epoch; 0: unknown. `in_process`: read by the training process alone.

    `divisible`: a batch may be read in parts: it does not depend on which samples are read together.
    """

    in_process = False
    divisible = True

    def __init__(self, dataset: Any, length: int, seed: int) -> None:
        self.dataset, self.length, self.seed = dataset, length, seed

    @abstractmethod
    def __getitem__(self, task: Task) -> Any:
        """The batch of a task."""

    @abstractmethod
    def example(self, last: bool) -> Any:
        """The first or the last sample, read as at position 0; None if a stream would lose it."""


class Columns(Source):
    """A tuple of tensors or arrays of one length; a batch is a tuple of rows of each."""

    in_process = True

    def __init__(self, columns: Sequence[Any], seed: int) -> None:
        lengths = [c.shape[0] if c.shape else 0 for c in columns]
        if len(set(lengths)) != 1 or lengths[0] < 1:
            expected = "one length of at least 1 for all tensors"
            raise InputError("batches", "dataset", f"lengths {lengths}", expected)
        super().__init__(columns, lengths[0], seed)

    def __getitem__(self, task: Task) -> tuple[Any, ...]:
        index = task.index
        assert index is not None
        rows = torch.from_numpy(index)
        return tuple(c[index if isinstance(c, np.ndarray) else rows.to(c.device)] for c in self.dataset)

    def example(self, last: bool) -> Any:
        return tuple(c[-1 if last else 0] for c in self.dataset)


class MapStyle(Source):
    """A data set with __getitem__ and __len__; its __getitems__, if it has one, reads all samples at once."""

    def __init__(self, dataset: Any, collate_fn: Collate | None, seed: int) -> None:
        length = len(dataset)
        if length < 1:
            raise InputError("batches", "dataset", "no samples", "at least one")
        super().__init__(dataset, length, seed)
        self._collate_fn = collate_fn if collate_fn is not None else default_collate
        self._at_once = _reads_many(dataset)
        self.divisible = not self._at_once and collate_fn is None

    def __getitem__(self, task: Task) -> Any:
        assert task.index is not None
        index = task.index.tolist()
        if self._at_once:
            seed_generators(self.seed, task.first, Draw.SAMPLE)
            samples = self.dataset.__getitems__(index)
        else:
            samples = [self._sample(task.first + k, i) for k, i in enumerate(index)]
        seed_generators(self.seed, task.first, Draw.COLLATE)
        return self._collate_fn(samples)

    def _sample(self, position: int, index: int) -> Any:
        seed_generators(self.seed, position, Draw.SAMPLE)
        return self.dataset[index]

    def example(self, last: bool) -> Any:
        return self._sample(0, self.length - 1 if last else 0)


class Stream(Source):
    """An iterable data set. A process takes every shards-th sample of it, or all of them if `sharded`.

    shard, shards: this rank, and the ranks; each is divided further among its loader processes.
    sharded: the data set gives each process its own part by itself.
    """

    def __init__(
        self, dataset: Any, collate_fn: Collate | None, seed: int, shard: int, shards: int, *, sharded: bool
    ) -> None:
        super().__init__(dataset, 0, seed)
        self.divisible = collate_fn is None
        self._collate_fn = collate_fn if collate_fn is not None else default_collate
        self._shard, self._shards, self._sharded = shard, shards, sharded
        self._samples: Iterator[Any] | None = None

    def __getitem__(self, task: Task) -> Any:
        if self._samples is None:
            self._samples = self._endless()
        samples = list(islice(self._samples, task.count))
        seed_generators(self.seed, task.first, Draw.COLLATE)
        return self._collate_fn(samples)

    def _endless(self) -> Iterator[Any]:
        """This process's samples, pass after pass. Raises InputError if a pass has none."""
        info = get_worker_info()
        own, processes = (info.id, info.num_workers) if info else (0, 1)
        part, parts = self._shard * processes + own, self._shards * processes
        first, step = (0, 1) if self._sharded else (part, parts)
        number = 0
        while True:
            read = False
            for sample in islice(self._pass(number, part, parts), first, None, step):
                read = True
                yield sample
            if not read:
                found = f"no samples in part {part} of {parts}, in pass {number}"
                expected = "a stream with a sample for each loader process"
                raise InputError("batches", "dataset", found, expected)
            number += 1

    def _pass(self, number: int, part: int, parts: int) -> Iterator[Any]:
        """All samples that the data set gives in a pass."""
        if (set_epoch := getattr(self.dataset, "set_epoch", None)) is not None:
            set_epoch(number)
        seed = seed_at(self.seed, number, Draw.SAMPLE)
        samples: Iterator[Any] | None = None
        for place in count():
            # Parts of one that divides itself draw unlike numbers, but for the first: it may shuffle before.
            apart = self._sharded and place > 0
            seed_generators(seed, place * parts + part if apart else place, Draw.SAMPLE)
            samples = iter(self.dataset) if samples is None else samples
            if (sample := next(samples, END)) is END:
                return
            yield sample

    def example(self, last: bool) -> None:
        return None


def make_source(
    dataset: Any, collate_fn: Collate | None, seed: int, rank: int, ranks: int, *, sharded: bool = False
) -> Source:
    """The data set as a source. Raises InputError, naming what it is, if it cannot be read.

    dataset: a tuple or list of tensors or arrays (or a TensorDataset, unless collate_fn is given), a
        map-style data set, or an iterable one.
    collate_fn: makes a batch of a list of samples; None: torch's default.
    seed: of the run. rank, ranks, sharded: which part of a stream to read (see Stream).
    """
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    is_columns = isinstance(tensors, tuple | list) and tensors and all(hasattr(t, "shape") for t in tensors)
    if collate_fn is None and is_columns:
        return Columns(tensors, seed)
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_stream and hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__"):
        if rank >= ranks:
            found = f"a stream, for rank {rank}, which the plan does not have"
            expected = f"a map-style data set: a stream is divided among ranks 0 to {ranks - 1}"
            raise InputError("batches", "dataset", found, expected)
        return Stream(dataset, collate_fn, seed, rank, ranks, sharded=sharded)
    if sharded:
        found = f"True for a {type(dataset).__name__}"
        raise InputError("batches", "sharded", found, "an iterable data set that divides itself")
    if is_stream or not hasattr(dataset, "__len__"):
        expected = (
            "a map-style dataset (__getitem__ and __len__), an IterableDataset (which can begin again) or a "
            "tuple of tensors"
        )
        raise InputError("batches", "dataset", type(dataset).__name__, expected)
    return MapStyle(dataset, collate_fn, seed)


def warn_of_a_stream_anew(source: Source, store: Store, rank: int) -> None:
    """Warn where a stream begins at its first sample, though its rank has trained some already."""
    if not source.length and (samples := store.ranks()[rank].samples):
        found = f"rank {rank} has trained {samples} samples, and its stream begins anew"
        warnings.warn(f"{found}: a stream knows no positions, a map-style data set does", stacklevel=4)


def join_batches(parts: Sequence[Any]) -> Any:
    """One batch from several that torch's default_collate made. Raises InputError for what it cannot join."""
    one = parts[0]
    if len(parts) == 1:
        return one
    if isinstance(one, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(one, Mapping):
        joined = {key: join_batches([part[key] for part in parts]) for key in one}
        return joined if type(one) is dict else type(one)(joined)  # type: ignore[call-arg]
    if isinstance(one, tuple | list):
        if all(isinstance(value, str | bytes) for value in one):
            return type(one)(value for part in parts for value in part)
        fields = [join_batches(column) for column in zip(*parts, strict=True)]
        return type(one)(*fields) if hasattr(one, "_fields") else type(one)(fields)
    expected = "a collate_fn, so that each batch is made by one loader process"
    raise InputError("batches", "collate_fn", f"none, for batches of {type(one).__name__}", expected)


def _reads_many(dataset: Any) -> bool:
    """Return whether __getitems__ is the data set's own: a Subset's reads singly if what it wraps does."""
    if isinstance(dataset, Subset):
        return _reads_many(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


WORD = 2**64 - 1


class Draw(IntEnum):
    """Name what random numbers are drawn for at one position; each has a seed of its own."""

    SAMPLE = 0
    COLLATE = 1
    STEP = 2


def seed_at(run_seed: int, position: int, draw: Draw) -> int:
    """The seed of 64 bits for one position: splitmix64 (Steele, Lea, Flood: OOPSLA 2014) over all three."""
    z = (_mixed(run_seed & WORD) + 3 * position + draw) & WORD
    return _mixed(z)


def _mixed(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def seed_generators(run_seed: int, position: int, draw: Draw) -> None:
    """Seed this process's generators: random, numpy.random, torch on the CPU and, once in use, every GPU."""
    seed = seed_at(run_seed, position, draw)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed() formats a stack trace for a CUDA that is not in use yet: 100 us instead of 1.
    torch.default_generator.manual_seed(seed)
    if draw is Draw.STEP and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
