"""OwnTime: how long each step takes this rank by itself, without the waiting for others that is in it.

From the end of one step to the last gradient of the next one: fetching data, forward and backward passes, all
micro-batches. On CUDA between two events, read once they are through, so that nothing waits for the device.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from pyps.torch.hook import WeightedHook


class OwnTime:
    """Seconds by step. start() begins one; the hook says when its gradients are there."""

    def __init__(self, hook: WeightedHook) -> None:
        self._hook, self._cuda = hook, hook.device.type == "cuda"
        self._began: Any = None
        self._pending: list[tuple[Any, Any, Any]] = []  # what belongs to the step, its begin and its end
        self._ended: Any = None
        hook.on_ready.append(self._ready)

    def start(self) -> None:
        """A step begins now."""
        self._began, self._ended = self._mark(), None

    def finish(self, what: Any) -> None:
        """The step is done: its time is that of `what`, if it had a beginning and gradients."""
        if self._began is not None and self._ended is not None:
            self._pending.append((what, self._began, self._ended))

    def taken(self) -> list[tuple[Any, float]]:
        """(what, seconds) of the steps whose time is known by now, each once."""
        known = []
        while self._pending and (not self._cuda or self._pending[0][2].query()):
            what, began, ended = self._pending.pop(0)
            known.append((what, began.elapsed_time(ended) / 1000 if self._cuda else ended - began))
        return known

    def _ready(self) -> None:
        mark = self._mark()
        # On CUDA the exchange of few bits runs beside the backward pass and blocks nobody.
        self._ended = mark if self._cuda else mark - self._hook.blocked_seconds

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._hook.device))
        return event
