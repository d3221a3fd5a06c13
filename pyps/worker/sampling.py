"""From sample positions to data: position p of the endless sequence of epochs is the same sample for all
workers.

Epoch e is a permutation that depends on (seed, e) alone, so a claim of positions says which samples they are,
whichever worker takes it, and a restarted worker needs no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InputError

MAX_SEED = 2**64 - 1
Fetch = Callable[[NDArray[np.int64]], Any]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """The order of epoch `epoch`: a permutation of 0 .. length-1, int64, read-only."""
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(length)
    order.flags.writeable = False
    return order


def indices(first: int, count: int, length: int, seed: int) -> NDArray[np.int64]:
    """The dataset indices of positions first .. first+count-1, int64 [count]; a range may span epochs.

    Raises InputError if length or count is below 1, or first or seed is negative.
    """
    for field, value, least in (("length", length, 1), ("count", count, 1), ("first", first, 0)):
        if value < least:
            raise InputError("samples", field, str(value), f"at least {least}")
    if not 0 <= seed <= MAX_SEED:
        raise InputError("samples", "seed", str(seed), f"0 to {MAX_SEED}")
    return np.concatenate(list(_parts(first, count, length, seed)))


def _parts(first: int, count: int, length: int, seed: int) -> Iterator[NDArray[np.int64]]:
    while count > 0:
        epoch, start = divmod(first, length)
        part = permutation(seed, epoch, length)[start : start + count]
        yield part
        first, count = first + len(part), count - len(part)


def fetcher(dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> tuple[int, Fetch]:
    """The dataset's length, and a function from indices to one batch.

    A tuple or list of tensors or arrays (or a TensorDataset, unless `collate` is given) is indexed at once
    and gives a tuple of them; any other map-style dataset is read sample by sample (or by its __getitems__)
    and put together by `collate`, by default torch's default_collate. Raises InputError for anything else.
    """
    if collate is None:
        tensors = getattr(dataset, "tensors", None) if _is_tensor_dataset(dataset) else dataset
        if isinstance(tensors, tuple | list) and tensors and all(hasattr(t, "shape") for t in tensors):
            return _columns(tensors)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        expected = "a map-style dataset (__getitem__ and __len__) or a tuple of tensors"
        raise InputError("batches", "dataset", type(dataset).__name__, expected)
    length = len(dataset)
    if length < 1:
        raise InputError("batches", "dataset", "no samples", "at least one")
    join = collate if collate is not None else _default_collate()

    def fetch(index: NDArray[np.int64]) -> Any:
        many = getattr(dataset, "__getitems__", None)
        samples = many(index.tolist()) if many else [dataset[i] for i in index.tolist()]
        return join(samples)

    return length, fetch


def _columns(tensors: Sequence[Any]) -> tuple[int, Fetch]:
    lengths = [t.shape[0] if t.shape else 0 for t in tensors]
    if len(set(lengths)) != 1 or lengths[0] < 1:
        raise InputError(
            "batches", "dataset", f"lengths {lengths}", "one length of at least 1 for all tensors"
        )

    def fetch(index: NDArray[np.int64]) -> tuple[Any, ...]:
        return tuple(t[_index_for(t, index)] for t in tensors)

    return lengths[0], fetch


def _index_for(column: Any, index: NDArray[np.int64]) -> Any:
    if isinstance(column, np.ndarray):
        return index
    import torch

    return torch.from_numpy(np.array(index)).to(column.device)


def _is_tensor_dataset(dataset: Any) -> bool:
    return any(kind.__name__ == "TensorDataset" for kind in type(dataset).__mro__)


def _default_collate() -> Callable[[list[Any]], Any]:
    from torch.utils.data import default_collate

    collate: Callable[[list[Any]], Any] = default_collate
    return collate
