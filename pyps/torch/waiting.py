"""Waiting: how long a rank waits for others within its steps. The rest is its own time.

Some collectives lie inside the forward and backward passes: FSDP2 gathers each layer's parameters there, and
a slow rank holds up all others in the middle of their work. On a CPU the time of such a call is a clock's; on
CUDA it lies between two events on the stream that waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Waiting:
    """The time since restart() in calls that are counted(). measured: whether anything asks for it."""

    def __init__(self, device: torch.device) -> None:
        self.measured = False
        self._device = device
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        """Now: seconds, or an event on the device's current stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What happens within is a wait."""
        began = self.mark() if self.measured else None
        try:
            yield
        finally:
            if began is not None:
                ended = self.mark()
                if self._device.type == "cuda":
                    self._events.append((began, ended))
                else:
                    self._seconds += ended - began

    def restart(self) -> None:
        """Forget what was counted."""
        self.measured, self._seconds, self._events = True, 0.0, []

    def own(self, began: Any, ended: Any) -> OwnTime:
        """The time between two marks, less what was counted so far."""
        return OwnTime(began, ended, self._seconds, list(self._events))


class OwnTime:
    """A rank's own part of a step; on CUDA its seconds are known when the events are over."""

    def __init__(self, began: Any, ended: Any, waited: float, events: list[tuple[Any, Any]]) -> None:
        self._began, self._ended, self._waited, self._events = began, ended, waited, events

    @property
    def known(self) -> bool:
        return isinstance(self._ended, float) or bool(self._ended.query())

    @property
    def seconds(self) -> float:
        if isinstance(self._ended, float):
            return float(self._ended - self._began - self._waited)
        waited = sum(a.elapsed_time(b) for a, b in self._events)
        return float(self._began.elapsed_time(self._ended) - waited) / 1000
