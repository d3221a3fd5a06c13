"""ComputeTimer: how long each step takes this rank, without the time that it waits for other ranks.

The time runs from the end of one step to the last gradient of the next: fetching data, forward and backward
passes, all micro-batches. On CUDA it is the time between two events, read when both are done, so that no
thread waits for the device.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from pyps.torch.hook import WeightedHook


class ComputeTimer:
    """Seconds by step. start() begins a step; the hook reports its last gradient."""

    def __init__(self, hook: WeightedHook) -> None:
        self._hook, self._cuda = hook, hook.device.type == "cuda"
        self._began: Any = None
        self._pending: list[tuple[Any, Any, Any]] = []  # a step's label, begin and end
        self._ended: Any = None
        hook.on_ready.append(self._ready)

    def start(self) -> None:
        """A step begins now."""
        self._began, self._ended = self._mark(), None

    def finish(self, label: Any) -> None:
        """The step is done. Its time gets the label, if it had a beginning and gradients."""
        if self._began is not None and self._ended is not None:
            self._pending.append((label, self._began, self._ended))

    def finished(self) -> list[tuple[Any, float]]:
        """(label, seconds) of the steps whose time is known by now, each once."""
        known = []
        while self._pending and (not self._cuda or self._pending[0][2].query()):
            label, began, ended = self._pending.pop(0)
            known.append((label, began.elapsed_time(ended) / 1000 if self._cuda else ended - began))
        return known

    def _ready(self) -> None:
        mark = self._mark()
        # On CUDA the quantized exchange runs parallel to the backward pass and blocks no thread.
        self._ended = mark if self._cuda else mark - self._hook.blocked_seconds

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._hook.device))
        return event
