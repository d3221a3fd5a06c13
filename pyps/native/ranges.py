"""Parts of a store's flat vector: how they are given.

Ranges are a uint64 array [n, 2]: the first element and the count of each, in ascending order and apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InvalidArgument
from pyps.native.values import Flat, Tensor

Ranges = NDArray[np.uint64]
Visitor = Callable[[int, Flat], object]


def as_ranges(what: str, ranges: Any) -> Ranges:
    """The ranges as the core takes them. Raises InvalidArgument unless they are whole numbers [n, 2]."""
    given = np.asarray(ranges)
    fits = given.ndim == 2 and given.shape[1] == 2 and given.dtype.kind in "iu"
    # reduce: the Python of min() and any(), not in the cache, costs as much as the pull of a small part
    if not fits or np.minimum.reduce(given, None, initial=0) < 0:
        found = f"found {given.dtype} {list(given.shape)}"
        raise InvalidArgument(what, f"ranges: {found}; expected whole numbers [n, 2], none below 0")
    return np.ascontiguousarray(given, np.uint64)


def elements(what: str, ranges: Ranges, flat_elements: int) -> int:
    """How many there are in all of the ranges. Raises InvalidArgument if the flat vector is shorter.

    Where each range lies is for the core to check: a sum that wraps around belongs to ranges that it refuses.
    """
    total = int(np.add.reduce(ranges[:, 1]))
    if total > flat_elements:
        raise InvalidArgument(what, f"ranges: expected parts of {flat_elements} elements")
    return total


class Packer:
    """A visitor that puts what it is shown where a pull of the ranges does: one after the other in `out`."""

    def __init__(self, ranges: Ranges, out: Flat) -> None:
        self._firsts, self._out = ranges[:, 0], out
        self._places = np.cumsum(ranges[:, 1]) - ranges[:, 1]
        out.fill(0.0)  # what no tensor has is not shown

    def __call__(self, first: int, values: Flat) -> None:
        index = int(np.searchsorted(self._firsts, np.uint64(first), side="right")) - 1
        place = int(self._places[index]) + first - int(self._firsts[index])
        self._out[place : place + values.size] = values


def tensor_ranges(tensors: Iterable[Tensor], names: Iterable[str]) -> Ranges:
    """The ranges of tensors by name, in the order of the flat vector; neighbours are one range."""
    known = {tensor.name: tensor for tensor in tensors}
    chosen = (_known(known, name) for name in set(names))
    parts = sorted((tensor.offset, tensor.elements) for tensor in chosen if tensor.elements)
    return merged(np.array(parts, np.uint64))


def row_ranges(tensors: Iterable[Tensor], name: str, rows: Any) -> Ranges:
    """The ranges of rows of a tensor, along its first dimension. rows: ascending, each once.

    Raises InvalidArgument for others, or if the tensor has no rows.
    """
    tensor = _known({tensor.name: tensor for tensor in tensors}, name)
    size = math.prod(tensor.shape[1:])
    wanted = np.asarray(rows)
    if not tensor.shape or not size or wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        found = f"found {wanted.dtype} {list(wanted.shape)} of {list(tensor.shape)}"
        raise InvalidArgument("ranges", f"rows of {name!r}: {found}; expected row numbers [n] of a table")
    ascends = wanted.size < 2 or bool(np.all(wanted[1:] > wanted[:-1]))
    if not ascends or (wanted.size and (wanted[0] < 0 or wanted[-1] >= tensor.shape[0])):
        expected = f"ascending ones, each once, of 0 to {tensor.shape[0] - 1}"
        raise InvalidArgument("ranges", f"rows of {name!r}: expected {expected}")
    first = tensor.offset + wanted.astype(np.int64) * size
    return merged(np.stack([first, np.full_like(first, size)], axis=1).astype(np.uint64))


def _known(known: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in known:
        raise InvalidArgument("ranges", f"found {name!r}; expected a tensor of the store")
    return known[name]


def merged(ranges: Ranges) -> Ranges:
    """Ranges that touch become one; their elements stay the same, in the same order."""
    ranges = ranges.reshape(-1, 2)
    if not len(ranges):
        return ranges
    ends = ranges.sum(axis=1)
    starts = np.flatnonzero(np.concatenate([[True], ranges[1:, 0] != ends[:-1]]))
    last = np.concatenate([starts[1:], [len(ranges)]]) - 1
    return np.stack([ranges[starts, 0], ends[last] - ranges[starts, 0]], axis=1)
