"""Define what a store is created from, as numbers on the link: request, initial values, a state's arrays."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InputError, InvalidArgument
from pyps.native.create import MAX_DIMENSIONS
from pyps.native.state import VECTORS, StateHeader, StoreState
from pyps.native.values import Config, Flat, Tensor
from pyps.remote.framing import Frames, check_size, from_frames, split_frames
from pyps.remote.wire import MAX_REQUEST_BYTES, CreateRequest, decode_creation, encode_raw
from pyps.store.creation import checked_state

MAX_ELEMENTS = 1 << 44  # of a tensor, as in the core


def created_numbers(config: Config, state: StoreState | None) -> tuple[int, list[NDArray[Any]]]:
    """The length of the encoded request, and what is sent: the request, initial values, then the state's
    vectors and residuals, each a concatenation of its tensors. Raises InvalidArgument.
    """
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "initial"}
    if state is not None:
        options |= {"state": state.header, "residuals": tuple(state.residuals)}
    request = CreateRequest(**options)
    encoded = np.frombuffer(encode_raw(request), np.uint8)
    if encoded.size > MAX_REQUEST_BYTES:
        expected = f"at most {MAX_REQUEST_BYTES}: fewer tensors, or shorter names"
        raise InvalidArgument("create", f"tensors: found {encoded.size} bytes of names; expected {expected}")
    vectors = [tuple(config.initial)]
    if state is not None:
        named = (*state.vectors.values(), *state.residuals.values())
        vectors += [tuple(arrays.values()) for arrays in named]
    arrays = [np.concatenate([np.ravel(a) for a in arrays]) for arrays in vectors if arrays]
    return encoded.size, [encoded, *arrays]


def created_arrays(request_bytes: int, numbers: Frames) -> tuple[Config, StoreState | None]:
    """Return what `created_numbers` sent.

    Raises InvalidArgument, and msgspec's errors for a wrong request.
    """
    encoded, numbers = split_frames(numbers, request_bytes)
    request = decode_creation(encoded)
    header, residuals = request.state, request.residuals
    trained = tuple(tensor for tensor in request.tensors if not tensor.averaged)
    vectors = 0 if header is None else len(VECTORS[header.optimizer]) + len(residuals)
    tensors = [*request.tensors, *(trained * vectors)]
    sizes = [_elements(tensor) for tensor in tensors]
    check_size("create", numbers, 4 * sum(sizes))  # before there is memory for it
    parts = [np.empty(size, np.float32) for size in sizes]
    from_frames("create", numbers, *parts)
    initial = tuple(parts[: len(request.tensors)])
    options = {f.name: getattr(request, f.name) for f in fields(Config) if f.name != "initial"}
    config = Config(initial=initial, **options)
    return config, None if header is None else _state(request, header, trained, parts)


def _elements(tensor: Tensor) -> int:
    """How many numbers a tensor has; its dimensions are looked at before they are multiplied."""
    if len(tensor.shape) > MAX_DIMENSIONS:
        found = f"{len(tensor.shape)} dimensions; expected at most {MAX_DIMENSIONS}"
        raise InvalidArgument("create", f"tensors[{tensor.name[:80]!r}]: found {found}")
    if not all(0 <= size <= MAX_ELEMENTS for size in tensor.shape):
        raise InvalidArgument("create", f"tensors[{tensor.name[:80]!r}]: shape: found a size out of range")
    return math.prod(tensor.shape)


def _state(
    request: CreateRequest, header: StateHeader, trained: tuple[Tensor, ...], parts: list[Flat]
) -> StoreState:
    rest = iter(parts)

    def arrays(tensors: tuple[Tensor, ...]) -> dict[str, Flat]:
        return {t.name: a.reshape(t.shape) for t, a in zip(tensors, islice(rest, len(tensors)), strict=True)}

    parameters = arrays(request.tensors)
    vectors = {name: arrays(trained) for name in VECTORS[header.optimizer]}
    state = StoreState(header, parameters, vectors, {rank: arrays(trained) for rank in request.residuals})
    try:
        return checked_state("create", state)
    except InputError as error:
        raise InvalidArgument("create", str(error).removeprefix("create: ")) from None
