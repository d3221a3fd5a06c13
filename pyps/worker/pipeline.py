"""A pipeline with two buffers: a worker computes a step while the gradient of the one before travels.

    main thread     compute k          compute k + 1         compute k + 2
    carrier         push k - 1, pull   push k, pull          push k + 1, pull

A step is computed on what the carrier brought back while the step before it was computed: the period is the
longer of compute and transfer instead of their sum, and staleness is one more step of this worker's own. The
carrier claims samples and a staging buffer for the step after the one being computed, so that the main thread
never has to wait for the store while a transfer is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import numpy as np

from pyps.errors import Fenced, TimedOut
from pyps.native.values import Claim, Flat, PushRequest
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.worker.step import Step
from pyps.worker.transport import Outcome, Transfer

CLOSE_SECONDS = 10.0
T = TypeVar("T")


class Carrier(Generic[T]):
    """One thread that runs one job at a time; what a job raises is raised where its result is taken."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._last: Callable[[], None] | None = None
        # A daemon: a process that ends without close() must not wait for a transfer.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, job: Callable[[], T]) -> None:
        self._jobs.put(job)

    def take(self, timeout: float) -> T:
        """The result of the oldest job. Raises what it raised, TimedOut if it is not done by then."""
        try:
            result, error = self._results.get(timeout=timeout)
        except Empty:
            raise TimedOut("pipeline", f"a transfer took longer than {timeout:g} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # a job without an error has a result

    def close(self, last: Callable[[], None], timeout: float) -> None:
        """Run `last` in the thread after the job under way, and end it. Raises TimedOut if that takes longer;
        it is done nevertheless, later.
        """
        if self._last is None:
            self._last = last
            self._jobs.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimedOut("close", f"a transfer is still under way after {timeout:g} s")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._results.put((job(), None))
            except BaseException as error:
                self._results.put((None, error))
        if self._last is not None:
            self._last()


@dataclass(slots=True)
class Delivery:
    """What a transfer came to. `ahead`: for the step after the one being computed; None: nothing now.

    `lost`: the worker was fenced, and has rejoined; its other claim is gone too.
    """

    outcome: Outcome
    ahead: tuple[Claim, StagingBuffer] | None = None
    lost: bool = False


class Pipeline:
    """A worker's transfers, one beside each step. All its methods belong to the main thread.

    `spare` receives what is pulled; `ahead` is what the next step begins with. `prepare` runs in the carrier
    before each claim.
    """

    def __init__(
        self, store: Store, transfer: Transfer, size: int, patience: float, prepare: Callable[[], None]
    ) -> None:
        self.spare: Flat = np.zeros(size, np.float32)
        self.ahead: tuple[Claim, StagingBuffer] | None = None
        self._store, self._transfer, self._prepare, self._patience = store, transfer, prepare, patience
        self._carrier: Carrier[Delivery] = Carrier(f"pyps-carrier-{store.rank}")
        self._sent: Step | None = None
        self._broken: BaseException | None = None  # nothing can follow a transfer that failed

    def claim_ahead(self) -> None:
        """With a step begun and nothing under way: claim the next one. Raises Fenced."""
        self.ahead = self._claimed()

    def send(self, step: Step, request: PushRequest) -> None:
        """Let a gradient travel; receive() has told of the one before."""
        self._sent = step
        self._carrier.give(partial(self._carry, request))

    def receive(self) -> tuple[Step, Delivery] | None:
        """Wait for the transfer under way: the step it was of, and what came of it; None: there is none.

        Raises what the transfer raised, TimedOut after the patience.
        """
        if self._broken is not None:
            raise self._broken
        if self._sent is None:
            return None
        try:
            delivery = self._carrier.take(self._patience)
        except BaseException as error:
            self._broken = error
            raise
        step, self._sent = self._sent, None
        self.ahead = delivery.ahead
        return step, delivery

    @property
    def failed(self) -> bool:
        """Whether receive() has raised what a transfer raised."""
        return self._broken is not None

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Leave the store after the transfer under way. Raises TimedOut. Idempotent."""
        self._carrier.close(self._store.close, timeout)

    def _claimed(self) -> tuple[Claim, StagingBuffer] | None:
        self._prepare()
        claim = self._store.start_ahead()
        return None if claim is None else (claim, self._store.stage())

    def _carry(self, request: PushRequest) -> Delivery:
        delivery = Delivery(self._transfer.push(request, self.spare))
        outcome = delivery.outcome
        if outcome.fenced:
            delivery.lost = True
            return delivery
        try:
            began = time.monotonic()
            if outcome.version is None:
                outcome.version = self._transfer.pull(self.spare)
                outcome.spans.append(("pull", began, time.monotonic()))
            delivery.ahead = self._claimed()
        except Fenced:
            delivery.lost = True
            self._store.rejoin()
        return delivery
