"""The bus between host memory and the device that a model is on: copies that begin, and waits for their end.

A device does what it is given in order. A copy to the host begins after what was given to it before; a copy
to the device begins after that too, and what is given later waits for it where wait_for_device() says so.

    AtOnce     host memory itself: a copy has ended when its call returns
    CudaBus    a stream each way
    Emulated   a thread each way that copies at a known bandwidth: a bus where no device is
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import numpy as np
import torch

from pyps import native
from pyps.profiler.throttle import sleep_until

LOOKED_AT_ONCE = 1 << 16  # values of half precision, which stay in cache
INFINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # the bits of it


class Bus(Protocol):
    """One worker's. `emulated`: parameters in host memory count as those of a device."""

    emulated: bool

    def leaving(self) -> AbstractContextManager[None]:
        """The device's work in here begins after what it was given before, and overlaps what it is given
        later. Copies to the host begin in here.
        """

    def start_to_host(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Begin a copy from the device. to: contiguous, of the same shape, perhaps of a wider type."""

    def start_look(self, flag: torch.Tensor, values: torch.Tensor) -> None:
        """On the way: make `flag`, a value of the device, finite if all of `values` are, and only then."""

    def wait_for_host(self) -> None:
        """Return when all copies to the host have ended."""

    def start_to_device(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Begin a copy from host memory, of the same type and shape. Perhaps in another thread."""

    def wait_for_device(self) -> None:
        """Let what the device computes from now on begin after all copies to it."""

    def settle(self) -> None:
        """Return when all copies to the device have ended: host memory may change."""

    def adopt(self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Parameters take values that copies have brought to the device, once these have ended. The next
        copies to the device begin after that. None of either: only that.
        """

    def close(self) -> None:
        """End, after what is under way. Idempotent."""


class AtOnce:
    """Between host memory and itself."""

    emulated = False

    def leaving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_to_host(self, to: torch.Tensor, values: torch.Tensor) -> None:
        to.copy_(values)

    def start_look(self, flag: torch.Tensor, values: torch.Tensor) -> None:
        flag.fill_(greatest_of(values))

    def wait_for_host(self) -> None:
        """Do nothing: copies here have ended."""

    def start_to_device(self, to: torch.Tensor, values: torch.Tensor) -> None:
        to.copy_(values)

    def wait_for_device(self) -> None:
        """Do nothing: copies here have ended."""

    def settle(self) -> None:
        """Do nothing: copies here have ended."""

    def adopt(self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for p, came in zip(parameters, values, strict=True):
            p.copy_(came)

    def close(self) -> None:
        """Nothing is under way."""


class CudaBus:
    """A CUDA device's: copies from and to pinned memory are the device's own; others take the host's time."""

    emulated = False

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


class Emulated:
    """A bus of `bytes_per_second` each way, to a device that is not there: its memory is the host's. It
    copies by the processor, so no faster than one of its threads does.
    """

    emulated = True

    def __init__(self, bytes_per_second: float) -> None:
        self._out, self._in = (_Lane(bytes_per_second, f"pyps-bus-{way}") for way in ("out", "in"))

    def leaving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_to_host(self, to: torch.Tensor, values: torch.Tensor) -> None:
        self._out.copy(to, values)

    def start_look(self, flag: torch.Tensor, values: torch.Tensor) -> None:
        self._out.submit(lambda: flag.fill_(greatest_of(values)))

    def wait_for_host(self) -> None:
        self._out.wait()

    def start_to_device(self, to: torch.Tensor, values: torch.Tensor) -> None:
        self._in.copy(to, values)

    def wait_for_device(self) -> None:
        self._in.wait()

    def settle(self) -> None:
        self._in.wait()

    def adopt(self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """A device's own copy takes next to no time; here they change places instead."""
        self._in.wait()
        for p, came in zip(parameters, values, strict=True):
            p.data, came.data = came.data, p.data

    def close(self) -> None:
        self._out.close()
        self._in.close()


class _Lane:
    """One direction: jobs follow one another in a thread, and each copy takes its time."""

    def __init__(self, bytes_per_second: float, name: str) -> None:
        self._rate, self._free_at = bytes_per_second, 0
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: Thread | None = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def copy(self, to: torch.Tensor, values: torch.Tensor) -> None:
        self._jobs.put(partial(self._copy, to.detach(), values.detach(), time.monotonic_ns()))

    def _copy(self, to: torch.Tensor, values: torch.Tensor, at: int) -> None:
        """In one call, which leaves other threads the interpreter meanwhile, as a bus would."""
        self._free_at = max(self._free_at, at)
        if to.dtype is values.dtype is torch.float32 and to.is_contiguous() and values.is_contiguous():
            native.take(values.view(-1).numpy(), to.view(-1).numpy())
        else:
            to.copy_(values)
        self._pass(1e9 * values.element_size() / self._rate * values.numel())

    def _pass(self, nanoseconds: float) -> None:
        self._free_at += round(nanoseconds)
        if self._free_at - time.monotonic_ns() > 1_000_000:  # a sleep is some 60 us late
            sleep_until(self._free_at)

    def wait(self) -> None:
        if self._thread is None:
            return
        done: SimpleQueue[None] = SimpleQueue()

        def end() -> None:
            sleep_until(self._free_at)
            done.put(None)

        self._jobs.put(end)
        done.get()

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


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
    return CudaBus(device) if device.type == "cuda" else AtOnce()
