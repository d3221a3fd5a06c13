"""How gradients and parameters travel: as they are, in halves, or quantized by blocks.

    codec      block  bytes a value  a value is
    f32            -  4              itself
    bf16, f16      -  2              the nearest half, saturating
    int8         256  1 + 1/64       code * amax / 127
    int4          64  1/2 + 1/16     code * amax / 7
    nf4           64  1/2 + 1/16     codebook[code] * amax  (QLoRA, Dettmers et al. 2023, appendix E)

What a code does not carry is lost unless it is fed back: added to what is encoded next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pyps import native
from pyps.errors import CoreMissing, InputError, InvalidArgument
from pyps.formats.options import CodecName
from pyps.native.values import Codec, EncodeCounts, Encoding, Flat, Layout

F32_BYTES = 4

__all__ = [
    "Codec",
    "EncodeCounts",
    "Encoding",
    "Residual",
    "as_codec",
    "decode",
    "decode_vector",
    "encode",
    "encoded_bytes",
    "encoded_vector_bytes",
    "fed_back",
    "name_of",
]

A = TypeVar("A")


def as_codec(codec: Codec | str) -> Codec:
    """A codec by its name. Raises InputError; CoreMissing for all but f32 where there is no core."""
    if not isinstance(codec, Codec):
        if codec.upper() not in Codec.__members__:
            names = ", ".join(name.lower() for name in Codec.__members__)
            raise InputError("codec", "name", repr(codec), f"one of {names}")
        codec = Codec[codec.upper()]
    if codec is not Codec.F32 and not native.HAS_CORE:
        raise CoreMissing()
    return codec


def name_of(codec: Codec) -> CodecName:
    """A codec's name."""
    return cast(CodecName, codec.name.lower())


def fed_back(codec: Codec | str) -> Encoding:
    """The encoding of a training run: to nearest, with error feedback unless nothing is lost."""
    kind = as_codec(codec)
    return Encoding(kind, error_feedback=kind is not Codec.F32)


def encoded_bytes(codec: Codec | str, count: int) -> int:
    """The bytes of `count` encoded values: their codes, then the fp32 scales of their blocks."""
    return native.encoded_bytes(as_codec(codec), count)


def encoded_vector_bytes(codec: Codec | str, layout: Layout) -> int:
    """The bytes of a store's flat vector: its trained elements encoded, then its averaged ones as fp32."""
    return encoded_bytes(codec, layout.trained_elements) + F32_BYTES * layout.averaged_elements


def decode_vector(
    data: NDArray[np.uint8], codec: Codec | str, layout: Layout, out: Flat | None = None
) -> Flat:
    """A store's flat vector, as `Store.pull_encoded` gave it: fp32 [flat_elements]. Raises as `decode`."""
    flat = np.empty(layout.flat_elements, np.float32) if out is None else out
    _check("data", data, np.uint8, encoded_vector_bytes(codec, layout))
    coded = data.size - F32_BYTES * layout.averaged_elements
    decode(data[:coded], codec, layout.trained_elements, flat[: layout.trained_elements])
    flat[layout.trained_elements :].view(np.uint8)[:] = data[coded:]
    return flat


def encode(
    values: Flat,
    how: Encoding | Codec | str,
    *,
    scale: float = 1.0,
    first: int = 0,
    residual: Flat | None = None,
    residual_out: Flat | None = None,
    out: NDArray[np.uint8] | None = None,
) -> tuple[NDArray[np.uint8], EncodeCounts]:
    """scale * values + residual, encoded: (uint8 [encoded_bytes], what was not finite).

    values, residual and residual_out: contiguous fp32 arrays of one length; `residual_out`, which must not be
    `residual`, receives what the code does not carry. The noise of stochastic rounding depends on the seed
    and on an element's index alone, the first one's being `first`, a multiple of 256. Raises NotFinite under
    the policy "error", InvalidArgument.
    """
    encoding = how if isinstance(how, Encoding) else Encoding(as_codec(how))
    for name, array in (("values", values), ("residual", residual), ("residual_out", residual_out)):
        if array is not None:
            _check(name, array, np.float32, values.size)
    size = encoded_bytes(encoding.codec, values.size)
    data = np.empty(size, np.uint8) if out is None else out
    _check("out", data, np.uint8, size)
    counts = native.encode(values, encoding, scale, first, residual, residual_out, data)
    return data, counts


def decode(data: NDArray[np.uint8], codec: Codec | str, count: int, out: Flat | None = None) -> Flat:
    """`count` fp32 values. Raises InvalidArgument on a wrong length, SegmentCorrupt on a scale not finite."""
    values = np.empty(count, np.float32) if out is None else out
    _check("data", data, np.uint8, data.size)
    _check("out", values, np.float32, count)
    native.decode(as_codec(codec), data, values)
    return values


def _check(name: str, array: NDArray[Any], kind: type[np.generic], size: int) -> None:
    if array.dtype != kind or array.shape != (size,) or not array.flags.c_contiguous:
        found = f"{array.dtype} {list(array.shape)}"
        expected = f"contiguous {np.dtype(kind).name} [{size}]"
        raise InvalidArgument("codec", f"{name}: found {found}; expected {expected}")


class Residual(Generic[A]):
    """Hold what an encoder's codes did not carry of a gradient, to be added to the next one: error feedback.

    It counts only once its gradient was admitted; until then the one before is kept. Several gradients may be
    under way; they are committed in the order in which they began, perhaps by another thread. `new` makes an
    array.
    """

    def __init__(self, new: Callable[[], A]) -> None:
        self._new = new
        self._current: A | None = None
        # What was added, what was not carried, and the correction that is part of the first.
        self._pending: deque[tuple[A | None, A, A | None]] = deque()
        self._free: list[A] = []
        self._lock = threading.Lock()
        self._correction: A | None = None  # for refused gradients whose residual a later one has added

    def begin(self) -> tuple[A | None, A]:
        """For a new gradient: (what to add to it or None; where to put what its codes do not carry)."""
        with self._lock:
            old = self._pending[-1][1] if self._pending else self._current
            correction, self._correction = self._correction, None
            old = _sum(old, correction)
            new = self._free.pop() if self._free else self._new()
            self._pending.append((old, new, correction))
            return old, new

    def begin_with(self, current: A | None) -> None:
        """The residual of an earlier process's last gradient."""
        with self._lock:
            self._current = current

    def cancel(self) -> None:
        """The gradient that began last is not sent."""
        with self._lock:
            old, new, correction = self._pending.pop()
            self._free.append(new)
            if self._pending:
                self._correction = _sum(correction, self._correction)
            else:
                self._current, self._correction = _sum(old, self._correction), None

    def commit(self, admitted: bool) -> None:
        """The oldest gradient under way was admitted: its residual counts; or not: the one before does."""
        with self._lock:
            if not self._pending:
                return
            old, new, _ = self._pending.popleft()
            if admitted:
                self._current = new
                if old is not None:
                    self._free.append(old)
            elif not self._pending:
                self._current = old
                self._free.append(new)
            else:
                change = -new if old is None else old - new  # type: ignore[operator]
                self._correction = _sum(self._correction, change)


def _sum(one: A | None, other: A | None) -> A | None:
    """None is zero. What is given stays as it is."""
    if one is None or other is None:
        return other if one is None else one
    return one + other  # type: ignore[operator, no-any-return]
