"""The bus between host memory and the device that a model is on: copies that begin, and waits for their end.

A device does what it is given in order. A copy to the host begins after what was given to it before; a copy
to the device begins after that too, and what is given later waits for it where wait_for_device() says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from pyps import native

LOOKED_AT_ONCE = 1 << 16  # values of half precision, which stay in cache
INFINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # the bits of it


class Bus:
    """One worker's. This one is between host memory and itself: a copy has ended when its call returns.

    `emulated`: parameters in host memory count as those of a device.
    """

    emulated = False
    at_once = True

    def leaving(self) -> AbstractContextManager[None]:
        """The device's work in here begins after what it was given before, and overlaps what it is given
        later. Copies to the host begin in here.
        """
        return nullcontext()

    def start_to_host(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Begin a copy from the device. to: contiguous, of the same shape, perhaps of a wider type."""
        to.copy_(values)

    def start_look(self, flag: torch.Tensor, values: torch.Tensor) -> None:
        """On the way: make `flag`, a value of the device, finite if all of `values` are, and only then."""
        flag.fill_(greatest_of(values))

    def wait_for_host(self) -> None:
        """Return when all copies to the host have ended."""

    def start_to_device(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Begin a copy from host memory, of the same type and shape. Perhaps in another thread."""
        to.copy_(values)

    def wait_for_device(self) -> None:
        """Let what the device computes from now on begin after all copies to it."""

    def settle(self) -> None:
        """Return when all copies to the device have ended: host memory may change."""

    def adopt(self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Parameters take values that copies have brought to the device, once these have ended. The next
        copies to the device begin after that. None of either: only that.
        """
        for p, came in zip(parameters, values, strict=True):
            p.copy_(came)

    def close(self) -> None:
        """End, after what is under way. Idempotent."""


class CudaBus(Bus):
    """A CUDA device's: copies from and to pinned memory are the device's own; others take the host's time.
    It has a stream each way.
    """

    at_once = False

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # its constructors have no types
        self._device = device
        self._out, self._in = cuda.Stream(device), cuda.Stream(device)
        self._adopted: Any = None  # what has to have happened before the next copy to the device

    @contextmanager
    def leaving(self) -> Iterator[None]:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            yield

    def start_to_host(self, to: torch.Tensor, values: torch.Tensor) -> None:
        to.copy_(values.to(to.dtype), non_blocking=True)  # of another type: not by the host

    def start_look(self, flag: torch.Tensor, values: torch.Tensor) -> None:
        flag.copy_(torch.linalg.vector_norm(values, torch.inf, dtype=torch.float32))

    def wait_for_host(self) -> None:
        self._out.synchronize()

    def start_to_device(self, to: torch.Tensor, values: torch.Tensor) -> None:
        if self._adopted is None:
            self._in.wait_stream(torch.cuda.current_stream(self._device))
        else:  # this may be another thread, whose current stream is not the model's
            self._in.wait_event(self._adopted)
        with torch.cuda.stream(self._in):
            to.copy_(values, non_blocking=True)

    def wait_for_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._in)

    def settle(self) -> None:
        self._in.synchronize()

    def adopt(self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.wait_for_device()
        if parameters:
            torch._foreach_copy_(list(parameters), list(values))
        self._adopted = torch.cuda.current_stream(self._device).record_event()

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


def greatest_of(values: torch.Tensor) -> float:
    """A number that is finite if all of these, in host memory, are."""
    if not values.is_contiguous() or values.dtype not in (torch.float32, *INFINITE):
        return float(torch.linalg.vector_norm(values, torch.inf, dtype=torch.float32))
    flat = values.detach().view(-1)
    if values.dtype is torch.float32:
        return 0.0 if native.finite(flat.numpy()) else torch.inf
    bits, least = flat.view(torch.int16).numpy().view(np.uint16), INFINITE[values.dtype]
    parts = (bits[first : first + LOOKED_AT_ONCE] for first in range(0, bits.size, LOOKED_AT_ONCE))
    return 0.0 if all((part & 0x7FFF).max() < least for part in parts) else torch.inf


def bus_of(device: torch.device) -> Bus:
    """The bus between host memory and this device."""
    return CudaBus(device) if device.type == "cuda" else Bus()
