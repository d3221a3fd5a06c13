"""A pipelined worker in virtual time, as pyps.worker.pipeline has it, of processes of the clock.

The compute process computes a step while up to depth - 1 transfers push the gradients of the steps before it,
claim the samples of later steps and pull parameters. They travel at once, but use the link, each way, and the
store one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

from pyps.errors import Ended, Fenced, PushRejected
from pyps.simulate.metrics import WAIT
from pyps.simulate.optimizer import Vector
from pyps.step.machine import Rules, has_run_ahead

if TYPE_CHECKING:
    from pyps.simulate.engine import Engine

Merge = Callable[[int, int, int], Generator[int | None, None, None]]
Pulled = tuple[Vector, int]  # parameters and their version
SampleRange = tuple[int, int]  # first, count
Returned = tuple[Pulled, list[SampleRange], bool]  # with claims; whether the worker had run ahead
TransferProcess = Generator[int | None, None, None]
UP, STORE, DOWN = range(3)  # what transfers use in turn


class Sent(NamedTuple):
    """A gradient on its way: its samples, what it was computed on, in what time, and the claims to make."""

    samples: int
    gradient: tuple[Vector, float] | None
    pulled: Pulled
    nanoseconds: int
    claims: int


class PipelinedWorker:
    """Worker k of an engine with N workers: process k computes, k + N, k + 2 N ... transfer in turn."""

    def __init__(self, engine: Engine, k: int, depth: int) -> None:
        self._engine, self._k, self._depth = engine, k, depth
        self._pulled: Pulled | None = None
        self._taken = 0  # samples whose local steps were taken before the newest parameters came
        self._travelling: deque[Vector] = deque()  # pseudo-gradients that these do not have
        self._claims: deque[SampleRange] = deque()  # of the next steps
        self._under_way: deque[int] = deque()  # transfers: the claims that each asks for
        self._results: deque[Returned | None] = deque()  # of ended ones; None: fenced
        self._count = 0  # transfers that began
        self._passed = [0, 0, 0]  # transfers that have used the way up, the store, the way down
        self._queue: dict[tuple[int, int], int] = {}  # (what, transfer) -> the process that waits for it
        self._fenced = self._waiting = False
        self._unaligned = local = engine.scenario.local
        self._may_run_ahead = Rules(depth, engine.needs, len(engine.workers), local).may_run_ahead

    def process(self) -> TransferProcess:
        """The compute process, from join to leave."""
        engine, k = self._engine, self._k
        yield from engine.join(k)
        while True:
            try:
                first, count = yield from self._begin()
                began = engine.clock.now
                done = yield from engine.compute(k, count, checks=False, merge=self._merging(first))
                ended, pulled = engine.clock.now, self._pulled
                assert pulled is not None  # _begin() has pulled
                gradient = engine.gradient(k, self._base(pulled), first + self._taken, done - self._taken)
                if engine.scenario.local and gradient:
                    self._travelling.append(gradient[0])
                if (yield from self._settle(self._depth - 2)):
                    engine.metrics.rejected += 1  # the store took this step's samples back too
                else:
                    self._send(done, gradient, pulled, ended - began)
            except Ended:
                break
            except Fenced:
                self._rejoin()
        engine.leave(k)

    def _base(self, pulled: Pulled) -> Vector:
        """Where steps go on from: the newest parameters, less the pseudo-gradients that they do not have."""
        w, _ = pulled
        for way in self._travelling:
            w = w - way
        return w

    def _merging(self, first: int) -> Merge | None:
        """How local steps go on from parameters that come between two of them; None: no local steps."""
        engine, k = self._engine, self._k
        self._taken = 0
        if not engine.scenario.local:
            return None

        def merge(before: int, done: int, count: int) -> TransferProcess:
            if self._results and self._pulled is not None:
                base, limit = self._base(self._pulled), engine.workers[k].micro_batch
                engine.model.advance(base, first + self._taken, done - self._taken, k, limit)
                self._taken = done
                if (yield from self._settle(len(self._under_way), rejoins=False)):
                    raise Fenced("step", "fenced while local steps were taken")

        return merge

    def _begin(self) -> Generator[int | None, None, SampleRange]:
        if self._under_way and self._unaligned:
            self._unaligned = False
            fenced = yield from self._settle(0)
            self._unaligned = fenced and self._engine.scenario.local
        while self._under_way and not self._claims:
            yield from self._settle(len(self._under_way) - 1)
        if not self._claims:
            claim = yield from self._engine.start(self._k)
            self._claims.append(claim)
            self._claims.extend(self._claim(self._depth - 1))
            self._pulled = yield from self._engine.pull(self._k, self._k)
        return self._claims.popleft()

    def _claim(self, count: int) -> list[SampleRange]:
        claims: list[SampleRange] = []
        while len(claims) < count and (claim := self._engine.start_ahead(self._k)) is not None:
            claims.append(claim)
        return claims

    def _settle(self, most: int, *, rejoins: bool = True) -> Generator[int | None, None, bool]:
        """Take what has come back, and wait until at most so many transfers are under way; True if the worker
        was fenced, and has rejoined if it `rejoins`.
        """
        clock, began = self._engine.clock, self._engine.clock.now
        fenced = False
        while self._under_way and (fenced or len(self._under_way) > most or self._results):
            if not self._results:
                self._waiting = True
                yield None
                self._waiting = False
            self._under_way.popleft()
            if (result := self._results.popleft()) is None:
                fenced = True
            else:
                self._pulled, claims, ahead = result
                self._claims.extend(claims)
                self._unaligned = self._unaligned or ahead
            if self._travelling:
                self._travelling.popleft()
        self._engine.metrics.add(self._k, WAIT, began, clock.now, self._engine.version)
        if fenced and rejoins:
            self._rejoin()
        return fenced

    def _rejoin(self) -> None:
        self._engine.rejoin(self._k)
        self._claims.clear()
        self._travelling.clear()
        self._pulled, self._fenced, self._unaligned = None, False, self._engine.scenario.local

    def _send(
        self, count: int, gradient: tuple[Vector, float] | None, pulled: Pulled, nanoseconds: int
    ) -> None:
        claims = max(0, self._depth - len(self._claims) - sum(self._under_way))
        self._under_way.append(claims)
        engine, number = self._engine, self._count
        self._count += 1
        channel = self._k + len(engine.workers) * (1 + number % (self._depth - 1))
        process = self._transfer(number, channel, Sent(count, gradient, pulled, nanoseconds, claims))
        engine.clock.begin(channel, process, engine.clock.now)

    def _transfer(self, number: int, channel: int, sent: Sent) -> TransferProcess:
        """A transfer process: push one gradient, claim samples, pull parameters."""
        engine, k, left = self._engine, self._k, self._engine.clock.now
        turns = engine.needs.uses_turns  # then the gradient leaves in its turn, which ends with the pull
        if not turns:
            yield from engine.travel_up(k, channel, self._in_turn(UP, number, channel))
            self._pass(UP)
        yield from self._in_turn(STORE, number, channel)
        back: Pulled | None = None
        result: tuple[Pulled, list[SampleRange]] | None = None
        waited = 0
        try:
            if self._fenced:
                raise Fenced("transfer", "one before it was fenced")
            arrived = engine.clock.now
            back = yield from self._push(channel, sent, travelled=not turns)
            waited = engine.clock.now - arrived
            if turns and back is None:
                back = yield from engine.pull(k, channel)
            result = back or (engine.ahead(k), engine.version), self._claim(sent.claims)
        except Fenced:
            self._fenced = True
        self._pass(STORE)
        if result is not None and back is None:
            try:
                yield from engine.travel_down(k, channel, self._in_turn(DOWN, number, channel), result[0][1])
            except Fenced:  # while the parameters travelled
                self._fenced, result = True, None
        else:
            yield from self._in_turn(DOWN, number, channel)
        self._pass(DOWN)
        way = engine.clock.now - left - waited
        ahead = self._may_run_ahead and has_run_ahead(waited, way, sent.nanoseconds)
        self._results.append(None if result is None else (*result, ahead))
        if self._waiting:
            engine.clock.resume(k)

    def _push(
        self, channel: int, sent: Sent, *, travelled: bool
    ) -> Generator[int | None, None, Pulled | None]:
        """What the pull of the same turn brought; None without turns, or if the push was rejected."""
        count, gradient, pulled, nanoseconds, _ = sent
        try:
            return (
                yield from self._engine.push(
                    self._k,
                    channel,
                    count,
                    gradient,
                    pulled[0],
                    self._engine.clock.now - nanoseconds,
                    base_version=1 + pulled[1],
                    travelled=travelled,
                )
            )
        except PushRejected:
            self._engine.rejected(self._k)
            return None

    def _in_turn(self, what: int, number: int, channel: int) -> TransferProcess:
        """Wait until the transfers before this one have used it."""
        if self._passed[what] != number:
            self._queue[what, number] = channel
            yield None

    def _pass(self, what: int) -> None:
        self._passed[what] += 1
        channel = self._queue.pop((what, self._passed[what]), None)
        if channel is not None:
            self._engine.clock.resume(channel)
