"""A pipelined worker in virtual time: pyps.worker.pipeline's two threads as two lives of the clock.

The worker computes a step on what its carrier brought back while the step before it was computed. The carrier
pushes, pulls and claims the samples of the step after the one that is being computed.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from pyps.errors import Ended, Fenced, PushRejected
from pyps.simulate.metrics import WAIT
from pyps.simulate.problem import Vector

if TYPE_CHECKING:
    from pyps.simulate.engine import Engine

Held = tuple[Vector, int]  # parameters and their version
Samples = tuple[int, int]  # the first, and how many
Step = Generator[int | None, None, None]


class PipelinedWorker:
    """Worker k of an engine; its carrier is the clock's life k + N."""

    def __init__(self, engine: Engine, k: int) -> None:
        self._engine, self._k = engine, k
        self._carrier = k + len(engine.workers)
        self._held: Held | None = None
        self._ahead: Samples | None = None  # what the next step begins with
        self._brought: tuple[Held | None, Samples | None] | None = None  # since the last look
        self._busy = self._waits = False

    def life(self) -> Step:
        """The worker's own life, to its end."""
        engine, k = self._engine, self._k
        yield from engine.join(k)
        while True:
            try:
                first, count = yield from self._begin()
                began, held = engine.clock.now, self._held
                assert held is not None  # _begin() pulls where nothing is held
                done = yield from engine.compute(k, count, checks=False)
                ended = engine.clock.now
                if (yield from self._receive()):
                    engine.tally.rejected += 1  # this step's samples went back with the other's
                else:
                    self._send(first, done, held, began + engine.clock.now - ended)
            except Ended:
                break
            except Fenced:
                engine.rejoin(k)
                self._held = self._ahead = None
        engine.leave(k)

    def _begin(self) -> Generator[int | None, None, Samples]:
        if self._ahead is None:
            yield from self._receive()
        if self._ahead is not None:
            claim, self._ahead = self._ahead, None
            return claim
        claim = yield from self._engine.start(self._k)
        self._held = yield from self._engine.pull(self._k, self._k)
        self._ahead = self._engine.start_ahead(self._k)
        return claim

    def _receive(self) -> Generator[int | None, None, bool]:
        """Wait for the transfer under way; whether it came to nothing because the worker was fenced."""
        clock, began = self._engine.clock, self._engine.clock.now
        if self._busy:
            self._waits = True
            yield None
            self._waits = False
        self._engine.tally.add(self._k, WAIT, began, clock.now, self._engine.version)
        if self._brought is None:
            return False
        (held, self._ahead), self._brought = self._brought, None
        self._held = held or self._held
        return held is None

    def _send(self, first: int, done: int, held: Held, began: int) -> None:
        self._busy = True
        clock = self._engine.clock
        clock.begin(self._carrier, self._carry(first, done, held, began), clock.now)

    def _carry(self, first: int, done: int, held: Held, began: int) -> Step:
        """The carrier's life: one gradient there, new parameters and a claim back."""
        engine, k, lane = self._engine, self._k, self._carrier
        try:
            try:
                back = yield from engine.push(k, lane, first, done, held, began, base_version=1 + held[1])
            except PushRejected:
                engine.rejected()
                back = None
            if back is None:
                back = yield from engine.pull(k, lane)
            self._brought = back, engine.start_ahead(k)
        except Fenced:
            engine.rejoin(k)
            self._brought = None, None
        self._busy = False
        if self._waits:
            engine.clock.resume(k)
