"""Links as fluids: every transfer gets its max-min fair share of all the links it crosses.

A transfer crosses the link of its worker or host, and the server's. Transfers over like links are a class and
are all equally fast at any time, so a class needs one counter, the bytes that each of its transfers has got
since the beginning; a transfer ends when the counter has grown by its size. That makes an event cost the
logarithm of the transfers, and the number of classes.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

NANOSECONDS = 1e9
ROUNDING = 1e-6  # bytes: of counters that are sums of products


@dataclass(slots=True)
class Class:
    """Transfers over links alike: `bandwidth` in bytes/s of each one's own link, or `shared` by them all."""

    bandwidth: float = math.inf
    shared: bool = False
    counter: float = 0.0
    rate: float = 0.0
    active: list[tuple[float, int]] = field(default_factory=list)  # heap of (counter at the end, transfer)

    def limit(self) -> float:
        """The most that one transfer can get."""
        return self.bandwidth / len(self.active) if self.shared else self.bandwidth


class Network:
    """One direction of a star around the server, whose link has `bandwidth` bytes/s."""

    def __init__(self, bandwidth: float, classes: list[Class]) -> None:
        self.bandwidth, self.classes = bandwidth, classes
        self.time = 0  # nanoseconds
        self.concurrent = self.peak = 0
        self._busy: list[Class] = []

    def add(self, now: int, kind: int, size: float, transfer: int) -> None:
        """Begin a transfer of `size` bytes over a link of that class. Call `finished(now)` before."""
        chosen = self.classes[kind]
        if not chosen.active:
            self._busy.append(chosen)
        heapq.heappush(chosen.active, (chosen.counter + size, transfer))
        self.concurrent += 1
        self.peak = max(self.peak, self.concurrent)
        self._share()

    def finished(self, now: int) -> list[int]:
        """Move time on; the transfers that have ended by now."""
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
        """When the next transfer ends if no other begins, in nanoseconds; None: there is none."""
        if len(self._busy) == 1:  # nearly always
            c = self._busy[0]
            wait = math.ceil((c.active[0][0] - c.counter) / c.rate * NANOSECONDS) if c.rate > 0.0 else None
            return None if wait is None else self.time + (wait if wait > 0 else 0)
        waits = [(c.active[0][0] - c.counter) / c.rate for c in self._busy if c.rate > 0.0]
        return self.time + max(0, math.ceil(min(waits) * NANOSECONDS)) if waits else None

    def _share(self) -> None:
        """Fill all alike; who is limited by its own link keeps that, and the others share what is left."""
        left, count = self.bandwidth, self.concurrent
        if len(self._busy) == 1:
            self._busy[0].rate = min(self._busy[0].limit(), left / count)
            return
        for c in sorted(self._busy, key=Class.limit):
            c.rate = min(c.limit(), left / count)
            if math.isfinite(left):
                left -= c.rate * len(c.active)
            count -= len(c.active)
