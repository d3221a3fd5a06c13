"""Links as fluids: every transfer gets its max-min fair share of the links it crosses.

A transfer crosses the link of its worker or host, and the server's link. Transfers over equal links form a
class and have the same rate at any time. So a class keeps one counter, the bytes that each of its transfers
has received since the start; a transfer ends when the counter has grown by its size. An event then costs the
logarithm of the number of transfers, plus the number of classes.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

NANOSECONDS = 1e9
ROUNDING = 1e-6  # bytes: the rounding error of a counter


@dataclass(slots=True)
class LinkClass:
    """Transfers over equal links of `bandwidth` bytes/s: one link each, or one link `shared` by all."""

    bandwidth: float = math.inf
    shared: bool = False
    counter: float = 0.0
    rate: float = 0.0
    active: list[tuple[float, int]] = field(default_factory=list)  # heap of (counter at the end, transfer)

    def limit(self) -> float:
        """The highest rate of one transfer, in bytes/s."""
        return self.bandwidth / len(self.active) if self.shared else self.bandwidth


class Network:
    """One direction of a star network; the server's link has `bandwidth` bytes/s.

    `concurrent` and `peak`: transfers now, and the most so far. Times are in nanoseconds.
    """

    def __init__(self, bandwidth: float, classes: list[LinkClass]) -> None:
        self.bandwidth, self.classes = bandwidth, classes
        self.time = 0  # nanoseconds
        self.concurrent = self.peak = 0
        self._busy: list[LinkClass] = []

    def add(self, now: int, kind: int, size: float, transfer: int) -> None:
        """Begin a transfer of `size` bytes over a link of class `kind`. Call `finished(now)` first.

        transfer: the number that `finished` reports when it has ended.
        """
        chosen = self.classes[kind]
        if not chosen.active:
            self._busy.append(chosen)
        heapq.heappush(chosen.active, (chosen.counter + size, transfer))
        self.concurrent += 1
        self.peak = max(self.peak, self.concurrent)
        self._share()

    def finished(self, now: int) -> list[int]:
        """Advance to `now`; returns the transfers that have ended since."""
        seconds = (now - self.time) / NANOSECONDS
        self.time = now
        ended: list[int] = []
        for c in self._busy:
            c.counter += c.rate * seconds
            while c.active and c.active[0][0] <= c.counter + ROUNDING:
                ended.append(heapq.heappop(c.active)[1])
        if ended:
            self.concurrent -= len(ended)
            self._busy = [c for c in self._busy if c.active]
            self._share()
        return ended

    def next_end(self) -> int | None:
        """The time at which the next transfer ends if no other begins; None if there is none."""
        if len(self._busy) == 1:  # nearly always
            c = self._busy[0]
            wait = math.ceil((c.active[0][0] - c.counter) / c.rate * NANOSECONDS) if c.rate > 0.0 else None
            return None if wait is None else self.time + (wait if wait > 0 else 0)
        waits = [(c.active[0][0] - c.counter) / c.rate for c in self._busy if c.rate > 0.0]
        return self.time + max(0, math.ceil(min(waits) * NANOSECONDS)) if waits else None

    def _share(self) -> None:
        """Set the rates. A class limited by its own link gets its limit; the others share the rest."""
        left, count = self.bandwidth, self.concurrent
        if len(self._busy) == 1:
            self._busy[0].rate = min(self._busy[0].limit(), left / count)
            return
        for c in sorted(self._busy, key=LinkClass.limit):
            c.rate = min(c.limit(), left / count)
            if math.isfinite(left):
                left -= c.rate * len(c.active)
            count -= len(c.active)
