"""A bus that copies at a known bandwidth, a thread each way, where no device is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread

import torch

from pyps import native
from pyps.profiler.throttle import sleep_until
from pyps.worker.device.bus import Bus, greatest_of


class Emulated(Bus):
    """A bus of `bytes_per_second` each way, to a device that is not there: its memory is the host's. It
    copies by the processor, so no faster than one of its threads does.
    """

    emulated, at_once = True, False

    def __init__(self, bytes_per_second: float) -> None:
        self._out, self._in = (_Lane(bytes_per_second, f"pyps-bus-{way}") for way in ("out", "in"))

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
