"""Make what a push is made of: a staging buffer as NumPy and torch see it, a request that fits the store."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import Fenced, InvalidArgument
from pyps.native.ranges import as_ranges, elements
from pyps.native.state import split
from pyps.native.values import Codec, Encoding, Flat, Hyper, Layout, PushRequest, PushResult, Tensor
from pyps.store.codec import as_codec, encoded_bytes

if TYPE_CHECKING:
    import torch


def _given_up() -> Flat:
    raise InvalidArgument("staging", "found one that leave() or close() gave up; expected one of stage()")


class StagingBuffer:
    """A staging buffer: `flat` is a zero-copy fp32 array [flat_elements] to be filled with the mean
    gradient.

    It gets its memory when `flat` is first read (OutOfSpace): a push of ranges, or of codes, needs less.
    """

    __slots__ = ("_find", "_flat", "index", "layout")

    def __init__(self, index: int, find: Callable[[], Flat], layout: tuple[Tensor, ...]) -> None:
        """index: as the core has it. find: gives the array, with memory. layout: of the store's tensors."""
        self.index = index
        self.layout = layout
        self._find = find
        self._flat: Flat | None = None

    @property
    def flat(self) -> Flat:
        if self._flat is None:
            self._flat = self._find()
        return self._flat

    def retire(self) -> None:
        """The buffer is no longer this worker's: its array is only read from now on, or not made any more."""
        self._find = _given_up
        if self._flat is not None:
            self._flat.flags.writeable = False

    def __getitem__(self, name: str) -> Flat:
        """The zero-copy view of one tensor, in its shape."""
        return self.tensors()[name]

    def tensors(self) -> dict[str, Flat]:
        """Zero-copy views of all tensors, by name."""
        return split(self.flat, self.layout)

    def torch(self) -> torch.Tensor:
        """A zero-copy torch tensor over `flat`."""
        import torch

        return torch.from_numpy(self.flat)

    def __dlpack__(self, **options: Any) -> Any:
        """`flat` for any library that reads DLPack, without a copy: numpy.from_dlpack(staging)."""
        return self.flat.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.flat.__dlpack_device__()


def push_request(
    staging: StagingBuffer | int,
    samples: int,
    hyper: Hyper | Sequence[Hyper],
    scale: float = 1.0,
    timeout: float | None = None,
    *,
    groups: int,
    encoding: Encoding | str | None = None,
    gradient: Flat | NDArray[np.uint8] | None = None,
    ranges: Any = None,
    looked: Any = None,
    **options: Any,
) -> PushRequest:
    """A PushRequest from the short forms of its fields.

    staging, samples, scale, timeout: as there. hyper: one for all of the store's `groups`, or one each.
    encoding: an Encoding, a codec's name, or None for fp32. gradient: fp32, or uint8 for codes. ranges: of
    the gradient; looked: found finite; whole numbers [n, 2]. options: the other fields. Raises InputError
    for an unknown codec.
    """
    return PushRequest(
        staging.index if isinstance(staging, StagingBuffer) else staging,
        samples,
        (hyper,) * groups if isinstance(hyper, Hyper) else tuple(hyper),
        scale,
        timeout,
        encoding if isinstance(encoding, Encoding) else Encoding(as_codec(encoding or Codec.F32)),
        gradient,
        encoded=gradient is not None and gradient.dtype == np.uint8,
        ranges=None if ranges is None else as_ranges("push", ranges),
        looked=None if looked is None else as_ranges("push", looked),
        **options,
    )


def check_request(request: PushRequest, layout: Layout) -> None:
    """Raise InvalidArgument for a request that does not fit a store of this layout."""
    if len(request.hyper) != layout.groups:
        expected = f"{layout.groups}, one for each parameter group"
        raise InvalidArgument("push", f"hyper: found {len(request.hyper)}; expected {expected}")
    if not math.isfinite(request.scale):
        raise InvalidArgument("push", f"scale: found {request.scale}; expected a finite number")
    if request.gradient is not None and request.encoded:
        size = encoded_bytes(request.encoding.codec, layout.trained_elements)
        if request.gradient.shape != (size,):
            found = f"found {request.gradient.size} bytes; expected {size}"
            raise InvalidArgument("push", f"gradient: {found}")
    size = (
        layout.flat_elements
        if request.ranges is None
        else elements("push", request.ranges, layout.flat_elements)
    )
    if request.gradient is not None and not request.encoded:
        check_vector("push", "gradient", request.gradient, size)


def exchanged(result: PushResult, version: int | None, pull: Callable[[], int]) -> tuple[PushResult, int]:
    """Return what an exchange came to; pull: for one without parameters, says why there were none.

    Raises Fenced for a worker that was fenced after its push, and what `pull` raises.
    """
    try:
        return result, pull() if version is None else version
    except Fenced:
        raise Fenced("exchange", "the worker was fenced after its push, which counts") from None


def check_vector(what: str, name: str, flat: NDArray[Any], size: int, kind: Any = np.float32) -> None:
    """Raise InvalidArgument unless `flat` is a contiguous vector of this length and dtype `kind`."""
    if flat.shape != (size,) or flat.dtype != kind or not flat.flags.c_contiguous:
        expected = f"contiguous {np.dtype(kind)} [{size}]"
        raise InvalidArgument(what, f"{name}: found {flat.dtype} {list(flat.shape)}; expected {expected}")
