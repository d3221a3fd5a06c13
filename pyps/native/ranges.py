"""Parts of a store's flat vector: how they are given.

Ranges are a uint64 array [n, 2]: the first element and the count of each, in ascending order and apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InvalidArgument
from pyps.native.values import Flat

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
