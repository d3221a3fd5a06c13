"""How long an iteration takes where workers share a link: their transfers followed event by event.

How far transfers over one link meet depends on when each worker sends, and that on how long its others took:
no formula says it. So a few rounds are gone through. Messages on a link divide its bandwidth evenly, each
way by itself (pyps.solver.links); a worker's own follow one another; in a pipeline of depth d a worker
computes, then waits until fewer than d - 1 of its transfers are under way, and sends. In rounds the store
answers when all gradients are there, at a clock's pace when the slowest worker's last but few are, else at
once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from pyps.formats.mode import PaceKind

# Steps of the slowest before it counts. Without rounds it takes tens of them until transfers that began
# together are out of step, and meet as seldom as they will.
WARM: dict[PaceKind, int] = {"round": 10, "clock": 100, "free": 100}
LEAST_WARM = 10  # where workers are so many that there is no time for more
MEASURED = 40  # steps of the slowest that do
AHEAD, AHEAD_PIPELINED = 1, 3  # steps, at a clock's pace; from a larger bound the same comes, but later
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples are evenly spread
ROUNDING = 1e-9  # relative to a step: by so much the same times differ
UNLIKE = 1e-3  # relative: how unlike the steps of equal devices are
MOST_EVENTS = 200_000  # about a second


@dataclass(frozen=True)
class Trip:
    """A worker's transfers. link: those with the same one share it. up_seconds, down_seconds: of a push and
    a pull that are alone on it. latency_seconds: each way. depth: steps under way.
    """

    link: int
    up_seconds: float
    down_seconds: float
    latency_seconds: float
    depth: int


@dataclass
class _Way:
    """One direction of a link. counter: seconds that each message here has had the link for itself."""

    counter: float = 0.0
    time: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)  # counter at its end, worker
    changes: int = 0

    def advance(self, now: float) -> None:
        if self.ends:
            self.counter += (now - self.time) / len(self.ends)
        self.time = now
        self.changes += 1

    def next_end(self) -> float:
        return self.time + max(0.0, self.ends[0][0] - self.counter) * len(self.ends)


@dataclass
class _Worker:
    """Hold how many of its steps have been begun, computed, and passed each point of their way."""

    begun: int = 0
    computed: int = 0
    left: int = 0  # the worker
    asked: int = 0  # that the store answers
    ready: list[int] = field(default_factory=lambda: [0, 0])  # at the link, up and down
    passed: list[int] = field(default_factory=lambda: [0, 0])

    def counts(self) -> tuple[int, ...]:
        return self.begun, self.computed, self.left, self.asked, *self.ready, *self.passed


UP, DOWN = 0, 1
COMPUTED, READY, PASSED = range(3)


class _Motion:
    """The workers of a plan, in motion."""

    def __init__(self, kind: PaceKind, compute: Sequence[float], trips: Sequence[Trip]) -> None:
        self.compute = _unlike(compute) if kind == "free" else compute
        self.trips = trips
        self.repeats = kind != "free"  # there unlike steps never meet twice in the same way
        self.steps = WARM[kind] + MEASURED
        clock = [AHEAD if trip.depth == 1 else AHEAD_PIPELINED for trip in trips]
        bounds: dict[PaceKind, list[float]] = {"round": [0] * len(trips), "clock": [*clock]}
        self.ahead = bounds.get(kind, [math.inf] * len(trips))  # of the slowest, that the store answers
        self.workers = [_Worker() for _ in trips]
        self.ways = {(trip.link, way): _Way() for trip in trips for way in (UP, DOWN)}
        self.events: list[tuple[float, int, int, int, int]] = []  # time, order, what, worker or link, more
        self.order, self.now = 0, 0.0
        self.closed: list[float] = []  # when each round's last gradient came
        self.times: list[list[float]] = [[] for _ in trips]  # at which a worker's gradients reached the store
        self.period: int | None = None  # of how many rounds the last are, from which on all repeat

    def run(self) -> None:
        """Until the slowest worker has made its steps, or all is as it was some rounds ago."""
        for k in range(len(self.trips)):
            self._go_on(k)
        before, seen, looked = self._state(), 0, 0
        while self.order < MOST_EVENTS and len(self.closed) <= self.steps:
            if self.repeats and len(self.closed) > looked:
                state, looked = self._state(), len(self.closed)
                if self._alike(state, before):
                    self.period = looked - seen
                    return
                if looked > 2 * seen:  # so that it is found whatever its rounds
                    before, seen = state, looked
            self.now, _, what, k, more = heapq.heappop(self.events)
            if what == COMPUTED:
                self.workers[k].computed += 1
                self._go_on(k)
            elif what == READY:
                self._enter(k, more)
            else:
                self._passed(k, more)

    def _state(self) -> tuple[list[int], list[float]]:
        """Return what the future depends on: counts, less the rounds that have closed, and seconds."""
        closed = len(self.closed)
        counts = [count - closed for one in self.workers for count in one.counts()]
        due = [(what, k, more, at - self.now) for at, _, what, k, more in self.events if what != PASSED]
        for (_, way), one in self.ways.items():
            counter = one.counter + (self.now - one.time) / max(1, len(one.ends))
            due += [(PASSED, k, way, end - counter) for end, k in one.ends]
        due.sort()
        return counts + [number for row in due for number in row[:3]], [row[3] for row in due]

    def _alike(self, one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> bool:
        within = ROUNDING * max(self.compute)
        return one[0] == other[0] and all(abs(a - b) <= within for a, b in zip(one[1], other[1], strict=True))

    def _at(self, time: float, what: int, k: int, more: int = 0) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, what, k, more))

    def _go_on(self, k: int) -> None:
        """Send what is computed, and compute the next step, if nothing is in the way."""
        one, trip = self.workers[k], self.trips[k]
        if one.computed > one.left and one.left - one.passed[DOWN] < max(1, trip.depth - 1):
            one.left += 1
            self._at(self.now + trip.latency_seconds, READY, k, UP)
        if one.begun > one.left or one.begun - one.passed[DOWN] >= trip.depth:
            return
        one.begun += 1
        self._at(self.now + self.compute[k], COMPUTED, k)

    def _enter(self, k: int, way: int) -> None:
        """A message has come to the link; it waits while an earlier one of this worker is on it."""
        one = self.workers[k]
        one.ready[way] += 1
        if one.ready[way] == one.passed[way] + 1:
            self._travel(k, way)

    def _travel(self, k: int, way: int) -> None:
        trip = self.trips[k]
        link = self.ways[trip.link, way]
        link.advance(self.now)
        heapq.heappush(link.ends, (link.counter + _seconds_on(trip, way), k))
        self._expect(trip.link, way)

    def _expect(self, link: int, way: int) -> None:
        one = self.ways[link, way]
        if one.ends:
            self._at(one.next_end(), PASSED, 2 * link + way, one.changes)

    def _passed(self, number: int, changes: int) -> None:
        """The first message on a way of a link has passed, unless others came or went since."""
        link, way = divmod(number, 2)
        found = self.ways[link, way]
        if found.changes != changes:
            return
        found.advance(self.now)
        end, k = heapq.heappop(found.ends)
        found.counter = end
        self._expect(link, way)
        one = self.workers[k]
        one.passed[way] += 1
        if one.ready[way] > one.passed[way]:
            self._travel(k, way)
        if way == UP:
            self.times[k].append(self.now)
            self._pushed(k)
        else:
            self._go_on(k)

    def _pushed(self, k: int) -> None:
        """A gradient has reached the store, which answers, or has the worker wait for others."""
        least = min(one.passed[UP] for one in self.workers)
        closes = least > len(self.closed)
        if closes:
            self.closed.append(self.now)
        for j in range(len(self.workers)) if closes else [k]:
            one = self.workers[j]
            while one.asked < one.passed[UP] and one.asked + 1 - least <= self.ahead[j]:
                one.asked += 1
                self._at(self.now + self.trips[j].latency_seconds, READY, j, DOWN)


def _unlike(compute: Sequence[float]) -> list[float]:
    """Steps that differ a little. Workers that are alike to the last bit would send together for ever; in a
    run any noise parts them, since the one that sends first has the link alone, and gains.
    """
    return [seconds * (1 + UNLIKE * ((GOLDEN * k + 0.5) % 1 - 0.5)) for k, seconds in enumerate(compute)]


def round_in_motion(compute: Sequence[float], trips: Sequence[Trip]) -> float:
    """Seconds of a round without a pipeline: all pulls begin together, and each worker computes, then pushes.
    So every round is like the last, and one is all there is to follow.
    """
    landed = _divided([trip.latency_seconds for trip in trips], trips, DOWN)
    ready = [
        at + seconds + trip.latency_seconds for at, seconds, trip in zip(landed, compute, trips, strict=True)
    ]
    return max(_divided(ready, trips, UP))


def _divided(ready: Sequence[float], trips: Sequence[Trip], way: int) -> list[float]:
    """Return when each worker's message has passed its link, which they divide evenly. ready: it comes."""
    ends, links = list(ready), dict[int, list[int]]()
    for k, trip in enumerate(trips):
        links.setdefault(trip.link, []).append(k)
    for mine in links.values():
        waiting = sorted(mine, key=lambda k: ready[k], reverse=True)
        here: list[tuple[float, int]] = []  # the counter at its end, worker
        counter = now = 0.0
        while waiting or here:
            passes = now + max(0.0, here[0][0] - counter) * len(here) if here else math.inf
            if waiting and ready[waiting[-1]] < passes:
                k = waiting.pop()
                counter += (ready[k] - now) / len(here) if here else 0.0
                now = ready[k]
                heapq.heappush(here, (counter + _seconds_on(trips[k], way), k))
            else:
                counter, k = heapq.heappop(here)
                ends[k] = now = passes
    return ends


def _seconds_on(trip: Trip, way: int) -> float:
    return trip.up_seconds if way == UP else trip.down_seconds


def iteration_in_motion(
    kind: PaceKind, batches: Sequence[int], compute: Sequence[float], trips: Sequence[Trip]
) -> float | None:
    """Seconds of an iteration, one global batch of samples, of workers in use; None: of too many workers.

    kind: round, clock or free. batches, compute, trips: each worker's samples, seconds and transfers. Their
    order decides nothing.
    """
    if kind == "round" and all(trip.depth == 1 for trip in trips):
        return round_in_motion(compute, trips)
    rows = sorted(
        zip(compute, trips, batches, strict=True), key=lambda row: (row[0], astuple(row[1]), row[2])
    )
    compute, trips, batches = (list(column) for column in zip(*rows, strict=True))
    motion = _Motion(kind, compute, trips)
    motion.run()
    rounds = motion.period or MEASURED
    if motion.period is None and len(motion.closed) <= LEAST_WARM + MEASURED:
        return None
    begin, end = motion.closed[-1 - rounds], motion.closed[-1]
    if kind != "free":
        return max(_least(compute, trips), (end - begin) / rounds)
    rate = 0.0
    for batch, all_times in zip(batches, motion.times, strict=True):
        times = [time for time in all_times if begin <= time <= end]
        rate += batch * (len(times) - 1) / (times[-1] - times[0])
    return float(sum(batches) / rate)


def _least(compute: Sequence[float], trips: Sequence[Trip]) -> float:
    """Return the seconds of a step of all that no pipeline hides: the longest compute, or all messages on one
    way of a link. While a pipeline fills, rounds close faster or later than they go on to.
    """
    ways: dict[tuple[int, int], float] = {}
    for trip, way in itertools.product(trips, (UP, DOWN)):
        ways[trip.link, way] = ways.get((trip.link, way), 0.0) + _seconds_on(trip, way)
    return max(*compute, *ways.values())
