"""Parts of a remote store's parameters: which hold values, and their ranges and values on the link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InvalidArgument
from pyps.native.ranges import Ranges, Visitor
from pyps.native.values import Codec, Flat, Layout, Tensor
from pyps.remote.framing import Frames, from_frames, split_frames

RANGE_BYTES = 16
SCALE_BLOCK = {Codec.INT8: 256, Codec.INT4: 64, Codec.NF4: 64}
CODE_BYTES = {Codec.F32: 4, Codec.BF16: 2, Codec.F16: 2, Codec.INT8: 256, Codec.INT4: 32, Codec.NF4: 32}
NF4_ZERO = 0x77  # two codes of 0.0
Extent = tuple[int, int]  # first element, or byte, and the one after the last
Coded = tuple[NDArray[Any], ...]  # a flat vector in a codec: arrays that follow one another


@dataclass(frozen=True, slots=True)
class Extents:
    """Where a flat vector holds values, ascending: the end of each group's last chunk holds none.

    Only these travel. Elements from `trained` on are averaged ones; each extent begins where a block does.
    """

    parts: tuple[Extent, ...]
    trained: int
    elements: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], layout: Layout) -> Extents:
        """Return those of a store."""
        ends, elements = [(t.offset, t.offset + t.elements) for t in tensors], layout.flat_elements
        gaps = _between(sorted(ends), elements)
        return cls(tuple(_between(gaps, elements)), layout.trained_elements, elements)

    def held(self, vector: Coded, codec: Codec = Codec.F32) -> list[NDArray[np.uint8]]:
        """Return the bytes of a vector that travel, without a copy."""
        return _views(_spans(self, codec), vector)

    def size(self, codec: Codec) -> int:
        """Return how many bytes of a vector travel."""
        return sum(b - a for a, b in _spans(self, codec))

    def fill(
        self, what: str, found: Frames, *vectors: Coded, codec: Codec = Codec.F32, rest: Sequence[Any] = ()
    ) -> None:
        """Copy what came to whole vectors, one after the other, and then to the arrays in `rest`.

        Where no values lie a vector becomes zero. Raises InvalidArgument, having changed nothing, if what
        came is not as large.
        """
        from_frames(what, found, *(part for vector in vectors for part in self.held(vector, codec)), *rest)
        for vector in vectors:
            self.blank(vector, codec)

    def blank(self, vector: Coded, codec: Codec = Codec.F32) -> None:
        """Make a vector zero where it holds no values."""
        codes = _codes_end(self.trained, codec)
        spans = sorted([*_spans(self, codec), (codes, codes)])
        for gap in _between(spans, sum(array.nbytes for array in vector)):
            for part in _views([gap], vector):
                part[:] = NF4_ZERO if codec is Codec.NF4 and gap[1] <= codes else 0


def _between(extents: Sequence[Extent], end: int) -> list[Extent]:
    """Return what lies between extents, up to `end`."""
    edges = [(0, 0), *extents, (end, end)]
    return [(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]]


def _codes_end(at: int, codec: Codec) -> int:
    """Return how many bytes the codes of the first `at` elements take; of a part of a block, so many."""
    block = SCALE_BLOCK.get(codec, 1)
    return at // block * CODE_BYTES[codec] + min(at % block, CODE_BYTES[codec])


@lru_cache(maxsize=64)
def _spans(extents: Extents, codec: Codec) -> list[Extent]:
    """Return where a vector's bytes are of values: codes, the scales of their blocks, averaged elements."""
    trained, block = extents.trained, SCALE_BLOCK.get(codec)
    codes = averaged = _codes_end(trained, codec)
    own = [(a, min(b, trained)) for a, b in extents.parts if a < trained]
    spans = [(_codes_end(a, codec), _codes_end(b, codec)) for a, b in own]
    if block is not None:
        averaged += 4 * (trained // block)
        spans += [(codes + 4 * (a // block), codes + 4 * -(-b // block)) for a, b in own]
    rest = [(max(a, trained) - trained, b - trained) for a, b in extents.parts if b > trained]
    return spans + [(averaged + 4 * a, averaged + 4 * b) for a, b in rest]


def _views(spans: Sequence[Extent], vector: Coded) -> list[NDArray[np.uint8]]:
    """Return these bytes of arrays that follow one another."""
    found, at = [], 0
    for array in vector:
        data, end = array.view(np.uint8), at + array.nbytes
        found += [data[max(a - at, 0) : b - at] for a, b in spans if a < end and b > at]
        at = end
    return found


def sent_ranges(
    what: str, count: int, numbers: Frames, flat_elements: int, codec: Codec
) -> tuple[Ranges, Frames]:
    """The ranges that came ahead of other numbers, and those. Their order is for the core to check.

    Raises InvalidArgument for ones that cannot be parts of a vector so long, before there is memory for what
    they hold.
    """
    if codec is not Codec.F32:
        raise InvalidArgument(what, f"codec: found {codec.name} with ranges; expected F32")
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


def show(ranges: Ranges, values: Flat, extents: Extents, visit: Visitor, piece: int) -> None:
    """Show `visit` the values of ranges, packed, as a store here does: in pieces of at
    most `piece` elements, that end where multiples of it do, and where parameters lie.
    """
    values.flags.writeable = False
    place = 0
    for first, count in ranges.tolist():
        for a, b in extents.parts:
            at, end = max(a, first), min(b, first + count)
            while at < end:
                stop = min(end, (at // piece + 1) * piece)
                visit(at, values[place + at - first : place + stop - first])
                at = stop
        place += count
