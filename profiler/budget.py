"""The wall time that measuring a device may take: looked at before each step, as machines may be busy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pyps.errors import InputError

SECONDS = 90.0  # for a device
Progress = Callable[[float, float], None]


class Budget:
    """Wall seconds for one device, from now on, and what was left out for want of them.

    clock: in seconds. progress: called with the seconds gone, and those that it takes at most.
    Raises InputError for no time at all.
    """

    def __init__(
        self,
        seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        progress: Progress | None = None,
    ) -> None:
        if not seconds > 0:
            raise InputError("seconds", "", str(seconds), "more than 0")
        self.seconds, self.clock, self._progress = seconds, clock, progress
        self.began = clock()
        self.left_out: list[str] = []
        self.cut_short = False  # the largest sizes are among those

    @property
    def gone(self) -> float:
        return self.clock() - self.began

    def allows(self, seconds: float, share: float = 1.0) -> bool:
        """Return whether this share of the budget has room for something that takes so long."""
        return self.gone + seconds <= share * self.seconds

    def advance(self, most: float) -> None:
        """Say how far it is. most: seconds that the rest takes, if time allows."""
        if self._progress is not None:
            gone = self.gone
            self._progress(gone, max(gone, min(self.seconds, gone + most)))

    def say(self, notify: Callable[[str], None]) -> None:
        """Name what was left out, in a sentence."""
        if self.left_out:
            missing = "; ".join(self.left_out)
            notify(f"{self.seconds:g} s were too few for {missing}: give more with --seconds")


UNLIMITED = Budget()
