"""Parts of a remote store's parameters: their ranges and values on the link."""

from __future__ import annotations

import numpy as np

from pyps.errors import InvalidArgument
from pyps.native.ranges import Ranges, Visitor
from pyps.native.values import Flat
from pyps.remote.framing import Frames, split_frames

RANGE_BYTES = 16
Extent = tuple[int, int]  # of the flat vector: first element, and the one after the last


def sent_ranges(what: str, count: int, numbers: Frames, flat_elements: int) -> tuple[Ranges, Frames]:
    """The ranges that came ahead of other numbers, and those. Their order is for the core to check.

    Raises InvalidArgument for ones that cannot be parts of a vector so long, before there is memory for what
    they hold.
    """
    data, rest = split_frames(numbers, RANGE_BYTES * count)
    if len(data) != RANGE_BYTES * count:
        raise InvalidArgument(what, f"ranges: found {len(data)} bytes; expected {RANGE_BYTES * count}")
    found = np.frombuffer(data, np.uint64).reshape(-1, 2)
    ends = found[:, 0] + np.minimum(found[:, 1], np.uint64(flat_elements))
    if (found > flat_elements).any() or (found[1:, 0] < ends[:-1]).any():
        raise InvalidArgument(what, f"ranges: expected ascending parts of {flat_elements} elements")
    return found, rest


def packed(flat: Flat, ranges: Ranges) -> Flat:
    """Return what `flat` has in the ranges, one after the other."""
    parts = [flat[int(first) : int(first + count)] for first, count in ranges]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def extents(gaps: list[Extent], flat_elements: int) -> Ranges:
    """All of the flat vector but its gaps, where no parameter lies, as ranges."""
    edges = [0, *(edge for gap in gaps for edge in gap), flat_elements]
    found = [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return np.array(found, np.uint64).reshape(-1, 2)


def show(ranges: Ranges, values: Flat, gaps: list[Extent], visit: Visitor, piece: int) -> None:
    """Show `visit` the values of ranges, packed, as a store here does: in pieces of at
    most `piece` elements, that end where multiples of it do, without gaps.
    """
    values.flags.writeable = False
    place = 0
    for first, count in ranges.tolist():
        at, end = first, first + count
        while at < end:
            gap = next((gap for gap in gaps if gap[1] > at), (end, end))
            stop = min(end, gap[0], (at // piece + 1) * piece)
            if at >= gap[0]:
                at = min(end, gap[1])
                continue
            visit(at, values[place + at - first : place + stop - first])
            at = stop
        place += count
