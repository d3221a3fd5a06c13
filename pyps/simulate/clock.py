"""Virtual time: what is to happen when, and who waits for whom. Times are whole nanoseconds.

A life is a generator. It yields the time at which it wants to go on, or None after it has parked itself or
handed a transfer to a network; whoever it waits for resumes it. Between two yields no time passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator

from pyps.simulate.network import Network

Life = Generator[int | None, None, None]
Action = Callable[[], None]
Plan = tuple[int, int]
NEVER: Plan = (1 << 127, 0)


class Clock:
    """The queue of events, the parked lives, and the networks."""

    def __init__(self, lives: int, networks: tuple[Network, ...]) -> None:
        self.now = 1  # 0 means "no time" to the decision core
        self.progress = 0
        self.parked: dict[int, tuple[int, int]] = {}  # life -> when it was parked, and which time
        self.stopped_until = [0] * lives
        self.networks = networks
        self._queue: list[tuple[int, int, int, Action | None]] = []  # time, order, life or -1, action
        self._order = 0
        self._lives: list[Life | None] = [None] * lives
        self._expected = [0] * lives  # the order number of the entry that may resume a life
        self._waiting: list[tuple[int, int, int]] = []  # heap: progress, life, parking
        self._parkings = 0
        self._plans = [NEVER] * len(networks)  # time and order at which each has something to say
        self._first = NEVER
        self._transfers: list[dict[int, int]] = [{} for _ in networks]  # life -> expected at its beginning

    def begin(self, k: int, life: Life, at: int) -> None:
        """Let a life begin at a time, in place of one that has ended."""
        self._lives[k] = life
        self._resume_at(k, at)

    def end(self, k: int) -> None:
        """A life that is killed, wherever it is."""
        life, self._lives[k] = self._lives[k], None
        self.parked.pop(k, None)
        self._expected[k] = 0
        if life is not None:
            life.close()

    def call(self, at: int, action: Action) -> None:
        """Do something at a time."""
        self._order += 1
        heapq.heappush(self._queue, (max(at, self.now), self._order, -1, action))

    def step(self) -> bool:
        """The next event; False: there is none."""
        first = self._first
        if not self._queue or first < self._queue[0]:
            if first is NEVER:
                return False
            self.now = first[0]
            self._ended(self._plans.index(first))
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
        """Before `yield None`: until progress is `until`, then not before the time `at`; 0 for neither: until
        `wake_all`.
        """
        self._parkings += 1
        parking = self._parkings
        self.parked[k] = (self.now, parking)
        if until > self.progress:
            heapq.heappush(self._waiting, (until, k, parking))
        elif at:
            self.call(at, lambda: self._wake(k, parking))

    def wake(self, progress: int) -> None:
        """Progress has been made: those who waited for it look again."""
        self.progress = progress
        while self._waiting and self._waiting[0][0] <= progress:
            _, k, parking = heapq.heappop(self._waiting)
            self._wake(k, parking)

    def resume(self, k: int) -> None:
        """A life that yielded None and that nothing else will resume."""
        self._resume_at(k, self.now)

    def wake_all(self) -> None:
        for k in sorted(self.parked):
            self._wake(k, self.parked[k][1])

    def transfer(self, k: int, network: int, kind: int, size: float) -> None:
        """Before `yield None`: until `size` bytes have crossed a network."""
        self._arrive(network)
        self._transfers[network][k] = self._begun(k)
        self.networks[network].add(self.now, kind, size, k)
        self._plan(network)

    def _begun(self, k: int) -> int:
        """A number that no other wait of this life has."""
        self._order += 1
        self._expected[k] = -self._order
        return -self._order

    def _wake(self, k: int, parking: int) -> None:
        if self.parked.get(k, (0, 0))[1] == parking:
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
        life = self._lives[k]
        if life is None:
            return
        try:
            at = next(life)
        except StopIteration:
            self._lives[k] = None
            return
        if at is not None:
            self._resume_at(k, at)

    def _arrive(self, network: int) -> None:
        """Resume those whose transfers have ended by now."""
        for k in self.networks[network].finished(self.now):
            begun = self._transfers[network].pop(k, 0)
            if begun and self._expected[k] == begun:
                self._resume_at(k, self.now)

    def _plan(self, network: int) -> None:
        """When the network has something to say next, in place of what was planned before."""
        end = self.networks[network].next_end()
        if end is None:
            self._plans[network] = NEVER
        else:
            self._order += 1
            self._plans[network] = (end if end > self.now else self.now, self._order)
        self._first = min(self._plans)

    def _ended(self, network: int) -> None:
        self._arrive(network)
        self._plan(network)
