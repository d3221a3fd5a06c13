"""A pipelined worker in virtual time: its two threads (pyps.worker) as two processes of the clock.

The compute process computes a step while the transfer process pushes the gradient of the step before, pulls
parameters and claims the samples of the step after.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from pyps.errors import Ended, Fenced, PushRejected
from pyps.simulate.metrics import WAIT
from pyps.simulate.problem import Vector

if TYPE_CHECKING:
    from pyps.simulate.engine import Engine

Pulled = tuple[Vector, int]  # parameters and their version
SampleRange = tuple[int, int]  # first, count
TransferProcess = Generator[int | None, None, None]


class PipelinedWorker:
    """Worker k of an engine with N workers: process k computes, process k + N transfers."""

    def __init__(self, engine: Engine, k: int) -> None:
        self._engine, self._k = engine, k
        self._transfers = k + len(engine.workers)
        self._pulled: Pulled | None = None
        self._prefetched: SampleRange | None = None  # the next step's claim
        self._result: tuple[Pulled | None, SampleRange | None] | None = None  # of the last transfer
        self._busy = self._waiting = False

    def process(self) -> TransferProcess:
        """The compute process, from join to leave."""
        engine, k = self._engine, self._k
        yield from engine.join(k)
        while True:
            try:
                first, count = yield from self._begin()
                began, pulled = engine.clock.now, self._pulled
                assert pulled is not None  # _begin() has pulled
                done = yield from engine.compute(k, count, checks=False)
                ended = engine.clock.now
                if (yield from self._receive()):
                    engine.metrics.rejected += 1  # the store took this step's samples back too
                else:
                    self._send(first, done, pulled, began + engine.clock.now - ended)
            except Ended:
                break
            except Fenced:
                engine.rejoin(k)
                self._pulled = self._prefetched = None
        engine.leave(k)

    def _begin(self) -> Generator[int | None, None, SampleRange]:
        if self._prefetched is None:
            yield from self._receive()
        if self._prefetched is not None:
            claim, self._prefetched = self._prefetched, None
            return claim
        claim = yield from self._engine.start(self._k)
        self._pulled = yield from self._engine.pull(self._k, self._k)
        self._prefetched = self._engine.start_ahead(self._k)
        return claim

    def _receive(self) -> Generator[int | None, None, bool]:
        """Wait for the transfer under way; True if the worker was fenced in it."""
        clock, began = self._engine.clock, self._engine.clock.now
        if self._busy:
            self._waiting = True
            yield None
            self._waiting = False
        self._engine.metrics.add(self._k, WAIT, began, clock.now, self._engine.version)
        if self._result is None:
            return False
        (pulled, self._prefetched), self._result = self._result, None
        self._pulled = pulled or self._pulled
        return pulled is None

    def _send(self, first: int, done: int, pulled: Pulled, began: int) -> None:
        self._busy = True
        clock = self._engine.clock
        clock.begin(self._transfers, self._transfer(first, done, pulled, began), clock.now)

    def _transfer(self, first: int, done: int, pulled: Pulled, began: int) -> TransferProcess:
        """The transfer process: push one gradient, pull parameters, claim samples."""
        engine, k, channel = self._engine, self._k, self._transfers
        try:
            try:
                back = yield from engine.push(
                    k, channel, first, done, pulled, began, base_version=1 + pulled[1]
                )
            except PushRejected:
                engine.rejected()
                back = None
            if back is None:
                back = yield from engine.pull(k, channel)
            self._result = back, engine.start_ahead(k)
        except Fenced:
            engine.rejoin(k)
            self._result = None, None
        self._busy = False
        if self._waiting:
            engine.clock.resume(k)
