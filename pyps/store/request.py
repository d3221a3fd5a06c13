"""A push's request: made from what a training script passes, and checked against the store's sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InvalidArgument
from pyps.native.ranges import as_ranges, elements
from pyps.native.values import Codec, Encoding, Flat, Hyper, Layout, PushRequest
from pyps.store.codec import as_codec, encoded_bytes
from pyps.store.staging import StagingBuffer


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
    **options: Any,
) -> PushRequest:
    """A PushRequest from the short forms of its fields.

    staging, samples, scale, timeout: as there. hyper: one for all of the store's `groups`, or one each.
    encoding: an Encoding, a codec's name, or None for fp32. gradient: fp32, or uint8 for codes. ranges: of
    the gradient, whole numbers [n, 2]. options: the other fields. Raises InputError for an unknown codec.
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
    for name, vector in (("gradient", request.gradient), ("base_params", request.base_params)):
        if vector is not None and not (name == "gradient" and request.encoded):
            check_vector("push", name, vector, size)


def check_vector(what: str, name: str, flat: NDArray[Any], size: int) -> None:
    """Raise InvalidArgument unless `flat` is a contiguous fp32 vector of this length."""
    if flat.shape != (size,) or flat.dtype != np.float32 or not flat.flags.c_contiguous:
        expected = f"contiguous float32 [{size}]"
        raise InvalidArgument(what, f"{name}: found {flat.dtype} {list(flat.shape)}; expected {expected}")
