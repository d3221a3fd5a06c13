"""Which parts of a store's flat vector its tensors, or rows of one, are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pyps.errors import InvalidArgument
from pyps.native.ranges import Ranges
from pyps.native.values import Tensor


def tensor_ranges(tensors: Iterable[Tensor], names: Iterable[str]) -> Ranges:
    """The ranges of tensors by name, in the order of the flat vector; neighbours are one range."""
    known = {tensor.name: tensor for tensor in tensors}
    chosen = (_known(known, name) for name in set(names))
    parts = sorted((tensor.offset, tensor.elements) for tensor in chosen if tensor.elements)
    return _merged(np.array(parts, np.uint64))


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
    return _merged(np.stack([first, np.full_like(first, size)], axis=1).astype(np.uint64))


def _known(known: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in known:
        raise InvalidArgument("ranges", f"found {name!r}; expected a tensor of the store")
    return known[name]


def _merged(ranges: Ranges) -> Ranges:
    """Ranges that touch become one; their elements stay the same, in the same order."""
    ranges = ranges.reshape(-1, 2)
    if not len(ranges):
        return ranges
    ends = ranges.sum(axis=1)
    starts = np.flatnonzero(np.concatenate([[True], ranges[1:, 0] != ends[:-1]]))
    last = np.concatenate([starts[1:], [len(ranges)]]) - 1
    return np.stack([ranges[starts, 0], ends[last] - ranges[starts, 0]], axis=1)
