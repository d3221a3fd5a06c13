"""The arrays that a store is created from, as numbers on the link: initial values, and those of a state."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InputError, InvalidArgument
from pyps.native.state import VECTORS, StateHeader, StoreState
from pyps.native.values import Config, Flat, Tensor
from pyps.remote.framing import Frames, check_size, from_frames
from pyps.remote.wire import CreateRequest
from pyps.store.creation import checked_state


def created_numbers(config: Config, state: StoreState | None) -> list[NDArray[Any]]:
    """Initial values, then the state's vectors and residuals, each a concatenation of its tensors."""
    vectors = [tuple(config.initial)]
    if state is not None:
        named = (*state.vectors.values(), *state.residuals.values())
        vectors += [tuple(arrays.values()) for arrays in named]
    return [np.concatenate([np.ravel(a) for a in arrays]) for arrays in vectors if arrays]


def created_arrays(request: CreateRequest, numbers: Frames) -> tuple[tuple[Flat, ...], StoreState | None]:
    """The arrays that `created_numbers` sent: initial values, and the state. Raises InvalidArgument."""
    header, residuals = request.state, request.residuals
    trained = tuple(tensor for tensor in request.tensors if not tensor.averaged)
    vectors = 0 if header is None else len(VECTORS[header.optimizer]) + len(residuals)
    tensors = [*request.tensors, *(trained * vectors)]
    sizes = [int(np.prod(tensor.shape, dtype=object)) for tensor in tensors]
    check_size("create", numbers, 4 * sum(sizes))  # before there is memory for it
    parts = [np.empty(size, np.float32) for size in sizes]
    from_frames("create", numbers, *parts)
    initial = tuple(parts[: len(request.tensors)])
    return initial, None if header is None else _state(request, header, trained, parts)


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
