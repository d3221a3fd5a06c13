"""Large arrays in small frames: while one is sealed, another travels and a third is opened.

A frame is sealed (encrypted) and opened whole, so that one large frame would be idle time on both sides; and
memory for small ones is used again, where that for a large one comes new from the kernel each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InvalidArgument

FRAME_BYTES = 1 << 18

Frames = Sequence[Any]  # buffers: what came after a header
Reply = tuple[Any, Sequence[NDArray[Any]]]  # a value, and what follows the header


def to_frames(arrays: Iterable[NDArray[Any]]) -> list[memoryview]:
    """The bytes of contiguous arrays, one after the other, in frames of at most FRAME_BYTES.

    Small arrays are copied, to share a frame; nothing else is.
    """
    frames: list[list[memoryview]] = []
    room = 0  # in the last frame
    for view in (array.data.cast("B") for array in arrays if array.size):
        first = room if len(view) < FRAME_BYTES else 0
        if first:
            frames[-1].append(view[:first])
        frames += [[view[at : at + FRAME_BYTES]] for at in range(first, len(view), FRAME_BYTES)]
        room = (first - len(view)) % FRAME_BYTES
    return [parts[0] if len(parts) == 1 else memoryview(b"".join(parts)) for parts in frames]


def from_frames(what: str, found: Frames, *arrays: NDArray[Any]) -> None:
    """Copy what came to contiguous arrays, one after the other.

    Raises InvalidArgument, having copied nothing, if it is not as large as they.
    """
    check_size(what, found, sum(array.nbytes for array in arrays))
    pieces, piece = iter(found), memoryview(b"")
    for array in arrays:
        out, at = array.view(np.uint8).reshape(-1), 0
        while at < out.size:
            piece = piece or memoryview(next(pieces)).cast("B")
            take = min(len(piece), out.size - at)
            out[at : at + take] = np.frombuffer(piece[:take], np.uint8)
            at, piece = at + take, piece[take:]


def split_frames(found: Frames, size: int) -> tuple[bytearray, Frames]:
    """The first `size` bytes of what came, fewer if fewer came, and the rest."""
    data, rest = bytearray(), []
    for piece in (memoryview(piece).cast("B") for piece in found):
        missing = size - len(data)
        data += piece[:missing]
        rest.append(piece[missing:])
    return data, rest


def check_size(what: str, found: Frames, size: int) -> None:
    """Raise InvalidArgument if it is not `size` bytes that came."""
    came = sum(len(piece) for piece in found)
    if came != size:
        raise InvalidArgument(what, f"numbers: found {came} bytes; expected {size}")
