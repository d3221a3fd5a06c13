"""ComputeTimer: how long each step takes this rank, without the time that it waits for other ranks.

The time runs from the end of one step to the last gradient of the next: fetching data, forward and backward
passes, all micro-batches. What the hook counts as waiting in between is left out. On CUDA it is the time
between two events, read when both are done, so that no thread waits for the device.
"""

from __future__ import annotations

from typing import Any

from pyps.torch.waiting import OwnTime
from pyps.torch.weighted import WeightedHook


class ComputeTimer:
    """Seconds by step. start() begins a step; the hook reports its last gradient."""

    def __init__(self, hook: WeightedHook) -> None:
        self._waiting = hook.waiting
        self._began: Any = None
        self._pending: list[tuple[Any, OwnTime]] = []  # with a step's label
        self._ended: OwnTime | None = None
        hook.on_ready.append(self._ready)

    def start(self) -> None:
        """A step begins now."""
        self._waiting.restart()
        self._began, self._ended = self._waiting.mark(), None

    def finish(self, label: Any) -> None:
        """The step is done. Its time gets the label, if it had a beginning and gradients."""
        if self._ended is not None:
            self._pending.append((label, self._ended))

    def finished(self) -> list[tuple[Any, float]]:
        """(label, seconds) of the steps whose time is known by now, each once."""
        known = []
        while self._pending and self._pending[0][1].known:
            label, own = self._pending.pop(0)
            known.append((label, own.seconds))
        return known

    def _ready(self) -> None:
        if self._began is not None:
            self._ended = self._waiting.own(self._began, self._waiting.mark())
