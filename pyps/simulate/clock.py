"""A clock of virtual time: a queue of events and the processes that they resume. Times are whole nanoseconds.

A process is a generator, as in SimPy. It yields the time at which it continues. After it has parked itself or
has begun a transfer it yields None, and the clock resumes it later. No time passes between two yields.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

Process = Generator[int | None, None, None]
Callback = Callable[[], None]
When = tuple[int, int]  # a time, and a number that orders events of the same time
NEVER: When = (1 << 127, 0)
NANOSECONDS = 1e9
ROUNDING = 1e-6  # bytes: the rounding error of a counter


class Clock:
    """The queue of events, the parked processes and the networks.

    Process `k` is a number from 0 to `processes` - 1; `networks` carry the transfers.
    """

    def __init__(self, processes: int, networks: tuple[Network, ...]) -> None:
        self.now = 1  # 0 means "no time" to the decision core
        self.progress = 0
        self.parked: dict[int, tuple[int, int]] = {}  # process -> since when, and park_id
        self.stopped_until = [0] * processes
        self.networks = networks
        self._queue: list[tuple[int, int, int, Callback | None]] = []  # time, order, process or -1, action
        self._order = 0
        self._processes: list[Process | None] = [None] * processes
        self._expected = [0] * processes  # the order of the only entry that may resume a process
        self._waiting: list[tuple[int, int, int]] = []  # heap: progress, process, park_id
        self._park_count = 0
        self._next_ends = [NEVER] * len(networks)  # of a transfer, in each network
        self._first = NEVER
        self._transfers: list[dict[int, int]] = [{} for _ in networks]  # number -> process

    def begin(self, k: int, process: Process, at: int) -> None:
        """Start process k at a time; the one before it under this number must have ended."""
        self._processes[k] = process
        self._resume_at(k, at)

    def end(self, k: int) -> None:
        """Kill process k, wherever it is."""
        process, self._processes[k] = self._processes[k], None
        self.parked.pop(k, None)
        self._expected[k] = self.stopped_until[k] = 0
        if process is not None:
            process.close()

    def call(self, at: int, action: Callback) -> None:
        """Call `action` at a time, or now if that time is past."""
        self._order += 1
        heapq.heappush(self._queue, (max(at, self.now), self._order, -1, action))

    @property
    def next_at(self) -> int:
        """Return when the next event is; now, if there is none."""
        first = self._first[0] if self._first is not NEVER else 0
        queued = self._queue[0][0] if self._queue else 0
        return min(filter(None, (first, queued)), default=self.now)

    def step(self) -> bool:
        """Handle the next event; False if there is none."""
        first = self._first
        if not self._queue or first < self._queue[0]:
            if first is NEVER:
                return False
            self.now = first[0]
            self._finish_transfers(self._next_ends.index(first))
            return True
        at, order, k, action = heapq.heappop(self._queue)
        if action is not None:
            self.now = at
            action()
        elif self._expected[k] == order:
            self.now = at
            self._resume(k)
        return True

    def park(self, k: int, until: int, at: int) -> None:
        """Park process k, which then yields None, until one of three things.

        until: the progress to wait for; 0 or reached: none. at: the time to wait for where there is no
        progress to wait for; 0: none. With neither, only `wake_all` resumes the process.
        """
        self._park_count += 1
        park_id = self._park_count
        self.parked[k] = (self.now, park_id)
        if until > self.progress:
            heapq.heappush(self._waiting, (until, k, park_id))
        elif at:
            self.call(at, lambda: self._wake(k, park_id))

    def wake(self, progress: int) -> None:
        """Progress was made: resume the processes that waited for it."""
        self.progress = progress
        while self._waiting and self._waiting[0][0] <= progress:
            _, k, park_id = heapq.heappop(self._waiting)
            self._wake(k, park_id)

    def resume(self, k: int) -> None:
        """Resume a process that yielded None and that nothing else will resume."""
        self._resume_at(k, self.now)

    def wake_all(self) -> None:
        """Resume every parked process."""
        for k in sorted(self.parked):
            self._wake(k, self.parked[k][1])

    def transfer(self, k: int, network: int, kind: int, size: float) -> None:
        """Begin a transfer; process k then yields None and is resumed when it has ended.

        network: its index. kind: the link class of the worker in that network. size: in bytes.
        """
        self._resume_finished(network)
        self._order += 1
        self._transfers[network][self._order] = k
        self._expected[k] = -self._order  # a successor of k does not wait for this one
        self.networks[network].add(self.now, kind, size, self._order)
        self._schedule_end(network)

    def set_bandwidth(self, kind: int, bandwidth: float) -> None:
        """From now on the links of a class carry so many bytes a second, each way."""
        for number, network in enumerate(self.networks):
            self._resume_finished(number)
            network.set_bandwidth(kind, bandwidth)
            self._schedule_end(number)

    def _wake(self, k: int, park_id: int) -> None:
        if self.parked.get(k, (0, 0))[1] == park_id:
            del self.parked[k]
            self._resume_at(k, self.now)

    def _resume_at(self, k: int, at: int) -> None:
        self._order += 1
        self._expected[k] = self._order
        heapq.heappush(self._queue, (at if at > self.now else self.now, self._order, k, None))

    def _resume(self, k: int) -> None:
        if self.now < self.stopped_until[k]:
            self._resume_at(k, self.stopped_until[k])
            return
        process = self._processes[k]
        if process is None:
            return
        try:
            at = next(process)
        except StopIteration:
            self._processes[k] = None
            return
        if at is not None:
            self._resume_at(k, at)

    def _resume_finished(self, network: int) -> None:
        """Resume the processes whose transfers have ended by now."""
        for number in self.networks[network].finished(self.now):
            k = self._transfers[network].pop(number)
            if self._expected[k] == -number:
                self._resume_at(k, self.now)

    def _schedule_end(self, network: int) -> None:
        """Schedule the next end of a transfer, in place of the one scheduled before."""
        end = self.networks[network].next_end()
        if end is None:
            self._next_ends[network] = NEVER
        else:
            self._order += 1
            self._next_ends[network] = (end if end > self.now else self.now, self._order)
        self._first = min(self._next_ends)

    def _finish_transfers(self, network: int) -> None:
        self._resume_finished(network)
        self._schedule_end(network)


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
    """One direction of a star network, of links as fluids; the server's link has `bandwidth` bytes/s.

    Every transfer gets its max-min fair share of the links it crosses: that of its worker or host, and the
    server's. Transfers over equal links form a class and have the same rate at any time. So a class keeps one
    counter, the bytes that each of its transfers has received since the start; a transfer ends when the
    counter has grown by its size. An event costs the logarithm of the number of transfers, plus the number of
    classes.

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

    def set_bandwidth(self, kind: int, bandwidth: float) -> None:
        """Another bandwidth of a class. Call `finished(now)` first."""
        self.classes[kind].bandwidth = bandwidth
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
