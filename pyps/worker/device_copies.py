"""Parameters that are copies of the flat vector, on a device: brought there by ranges, while others arrive.

An exchange tells of ranges of the flat vector that are final (pyps_exchange_arriving). Their copies go on the
bus at once, so that the last ones leave when the exchange ends. In a pipeline the model is in use meanwhile:
copies go to a second set of parameters on the device, which the model takes between two steps. What is not of
fp32 crosses the bus in its own type, half of the bytes in bf16; fp32 stays on the host, where a thread
rounds what arrives while the exchange goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pyps.native.values import Tensor
from pyps.worker.background import BackgroundThread
from pyps.worker.bus import AtOnce, Bus

CLOSE_SECONDS = 10.0  # that the last roundings may take
Pin = Callable[[NDArray[Any]], object]


class HostVector:
    """The flat vector, as NumPy and torch see it."""

    def __init__(self, elements: int, pin: Pin) -> None:
        self.array = np.zeros(elements, np.float32)
        self.torch = torch.from_numpy(self.array)
        pin(self.array)


class DeviceCopies:
    """These parameters, with their places in the flat vector of `elements`.

    early: whether a transfer may bring them while it goes on: nothing but a transfer changes them. doubles:
    to a second set, since the model is in use. pin: pins host memory.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Tensor]],
        elements: int,
        bus: Bus,
        pin: Pin,
        *,
        early: bool,
        doubles: bool,
    ) -> None:
        self._parts = sorted(
            (part for part in parameters if part[1].elements), key=lambda part: part[1].offset
        )
        self._bus, self._early = bus, early and bool(self._parts)
        self._types: dict[torch.dtype, torch.Tensor] = {}
        for p, _ in self._parts:
            if p.dtype is not torch.float32 and p.dtype not in self._types:
                whole = torch.zeros(elements, dtype=p.dtype)
                pin(whole.view(torch.uint8).numpy())
                self._types[p.dtype] = whole
        self._second = [torch.empty_like(p.detach()) for p, _ in self._parts] if early and doubles else []
        rounds = self._early and bool(self._types) and not isinstance(bus, AtOnce)
        self._rounding: BackgroundThread[None] | None = BackgroundThread("pyps-rounding") if rounds else None
        self._submitted = 0  # to it, whose end was not awaited
        self._next = 0  # of the parts: those before are on their way
        self._told = 0  # how much of the vector has arrived
        self._holds: HostVector | None = None  # that the last transfer has brought to the second set
        self._in_model: HostVector | None = None
        self._lock = threading.Lock()

    @property
    def early(self) -> bool:
        """Return whether anything comes of arrived()."""
        return self._early

    def begin(self) -> None:
        """A transfer begins: host memory will change."""
        with self._lock:
            if not self._early:
                return
            self._holds, self._next, self._told = None, 0, 0
            if not self._second:
                self._in_model = None
                self._bus.adopt([], [])  # the model was in use until now
        self._await_rounding()
        self._bus.settle()

    def _await_rounding(self) -> None:
        while self._submitted and self._rounding is not None:
            self._submitted -= 1
            self._rounding.take()

    @torch.no_grad()
    def arrived(self, vector: HostVector, first: int, count: int) -> None:
        """In a transfer, a further range of the vector is final."""
        end = self._told = first + count
        with self._lock:
            targets = self._second or [p.detach() for p, _ in self._parts]
            while self._early and self._next < len(self._parts):
                place = self._parts[self._next][1]
                job = partial(self._start, targets[self._next], place, vector, first, end)
                if self._rounding is None:
                    job()
                else:
                    self._submitted += 1
                    self._rounding.submit(job)
                if place.offset + place.elements > end:
                    return
                self._next += 1

    def end(self, vector: HostVector) -> None:
        """A transfer has ended: all of the vector is final."""
        if not self._early:
            return
        if self._next < len(self._parts):
            self.arrived(vector, self._told, vector.array.size - self._told)
        self._await_rounding()
        with self._lock:
            if self._second:
                self._holds = vector
                return
            self._in_model = vector
        self._bus.wait_for_device()

    def close(self) -> None:
        """Copy nothing from now on; what is under way has ended. Idempotent."""
        with self._lock:
            self._early = False
        if self._rounding is not None:
            self._rounding.close(_nothing, CLOSE_SECONDS)
        self._bus.settle()
        self._bus.close()

    def forget(self) -> None:
        """The flat vector is another one, or changed in another way than by a transfer."""
        self._in_model = None

    @torch.no_grad()
    def bring(self, vector: HostVector) -> None:
        """Bring the model to this vector, if it is not there: what the device computes next is on it."""
        with self._lock:
            if self._second and self._holds is vector:
                self._bus.adopt([p for p, _ in self._parts], self._second)
                self._holds, self._in_model = None, vector
            if self._in_model is vector:
                return
            self._bus.adopt([], [])
        for p, place in self._parts:
            end = place.offset + place.elements
            self._start(p.detach(), place, vector, place.offset, end, alone=not self._second)
        self._bus.wait_for_device()
        self._bus.settle()
        self._in_model = vector if self._early else None

    @torch.no_grad()
    def _start(
        self, to: torch.Tensor, place: Tensor, vector: HostVector, first: int, end: int, *, alone: bool = True
    ) -> None:
        """Begin the copy of what lies in this range; of what is not contiguous, when all of it is there.

        alone: no transfer rounds meanwhile.
        """
        lo, hi = max(first, place.offset), min(end, place.offset + place.elements)
        whole = to.is_contiguous()
        if not whole and hi == place.offset + place.elements:
            lo = place.offset
        if lo >= hi or (not whole and hi - lo < place.elements):
            return
        values = vector.torch[lo:hi]
        if to.dtype is not torch.float32:
            values = self._types[to.dtype][lo:hi].copy_(values) if alone else values.to(to.dtype)
        if whole:
            to, begin = to.view(-1), lo - place.offset
            self._bus.start_to_device(to[begin : begin + hi - lo], values)
        else:
            self._bus.start_to_device(to, values.view(to.shape))


def _nothing() -> None:
    """After the last rounding."""
