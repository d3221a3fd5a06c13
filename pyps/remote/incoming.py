"""A call whose numbers are still coming, on one connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyps.remote.framing import FRAME_BYTES
from pyps.remote.wire import Call

MAX_ARRAYS = 1024  # of a call, each in a frame; more have every other frame full


@dataclass(eq=False)
class Incoming:
    """`left` bytes are to come. begin: what is done then; None: they are dropped."""

    call: Call
    left: int
    begin: Callable[[Incoming], None] | None = None
    frames: list[Any] = field(default_factory=list)

    def add(self, frame: Any) -> bool:
        """Take the next frame. Returns False if it is not what was announced."""
        size, most = len(frame), 2 * (self.call.follow // FRAME_BYTES) + MAX_ARRAYS
        if not 0 < size <= min(self.left, FRAME_BYTES) or len(self.frames) > most:
            return False
        self.left -= size
        if self.begin is not None:
            self.frames.append(frame.buffer)
        return True

    def drop(self) -> None:
        """Keep nothing of what has come, and of what comes."""
        self.begin = None
        self.frames.clear()
