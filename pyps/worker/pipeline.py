"""A pipeline with two buffers: a worker computes a step while the gradient of the one before travels.

    main thread          compute k          compute k + 1         compute k + 2
    background thread    push k - 1, pull   push k, pull          push k + 1, pull

A step is computed on the parameters that came back while the step before it was computed: the period is the
longer of compute and transfer instead of their sum, and staleness grows by one step of this worker. The
background thread claims samples and a staging buffer for the step after the one being computed, so the main
thread never waits for the store while a transfer is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import numpy as np

from pyps.errors import Ended, Fenced, TimedOut
from pyps.formats.records import Span
from pyps.native.values import Advice, Flat, PushRequest, PushResult
from pyps.worker.binding import Binding
from pyps.worker.client import Claimed, StoreClient
from pyps.worker.step import Outcome, Step
from pyps.worker.transport import StepCallback, Transport

CLOSE_SECONDS = 10.0
T = TypeVar("T")


class BackgroundThread(Generic[T]):
    """A thread that runs one job at a time. What a job raises is raised where its result is taken."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._last: Callable[[], None] | None = None
        # A daemon: a process that ends without close() must not wait for a transfer.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> None:
        """Run a job after those submitted before."""
        self._jobs.put(job)

    @property
    def result_ready(self) -> bool:
        """Whether take() would return at once."""
        return not self._results.empty()

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
        """Run `last` in the thread after the job under way, and end it.

        Raises TimedOut if that takes longer; `last` still runs, later.
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
class TransferResult:
    """What a transfer came to. `prefetched_claim`: of the step after the one being computed; None: none now.

    `fenced`: the worker was fenced during the transfer and has rejoined; its other claim is gone too.
    """

    outcome: Outcome
    prefetched_claim: Claimed | None = None
    fenced: bool = False


class PipelinedTransport(Transport):
    """Transfers overlap with the next step's compute. All methods belong to the main thread.

    timeout: seconds that a transfer may take.
    """

    depth = 2

    def __init__(
        self, client: StoreClient, binding: Binding, report: StepCallback, *, timeout: float
    ) -> None:
        super().__init__(client, binding, report)
        self._timeout = timeout
        self._back_buffer: Flat = np.zeros(binding.flat.size, np.float32)  # receives what is pulled
        self._prefetched_claim: Claimed | None = None
        self._thread: BackgroundThread[TransferResult] = BackgroundThread(
            f"pyps-transfer-{client.store.rank}"
        )
        self._sent: Step | None = None
        self._failure: BaseException | None = None  # nothing can follow a transfer that failed
        self._waited: list[Span] = []

    @property
    def idle(self) -> bool:
        """Whether no transfer is under way."""
        return self._sent is None or self._thread.result_ready

    def begin(self) -> Step | None:
        if self._prefetched_claim is None:
            self.receive()
        began, waited = time.monotonic(), self._waited
        self._waited = []
        while True:
            try:
                claim, staging = self._next_claim()
                ready = time.monotonic()
                self._binding.attach_grads(staging)
                version = self._prefetched_version
                if version is None:
                    version = self._prefetched_version = self._client.pull(self._binding.flat)
                    self._prefetched_claim = self._client.claim_ahead()
                break
            except Ended:
                return None
            except Fenced:
                self._prefetched_version = None
                self._client.rejoin()
        self._binding.refresh()
        spans = [*waited, ("wait", began, ready), ("pull", ready, time.monotonic())]
        return Step(claim, staging, version, spans)

    def claim_ahead(self) -> None:
        """The background thread does, after each transfer."""

    def _next_claim(self) -> Claimed:
        if self._prefetched_claim is not None:
            claimed, self._prefetched_claim = self._prefetched_claim, None
            return claimed
        self._prefetched_version = None
        return self._client.claim()

    def send(self, step: Step, request: PushRequest) -> PushResult | None:
        """Let the gradient travel while the next step is computed; the result of the step before."""
        # The claim was made long before the compute began, and the model goes on while this travels.
        params = None if request.base_params is None else request.base_params.copy()
        request = replace(request, base_params=params, compute_seconds=time.monotonic() - step.created)
        before = self._take()
        if before is not None and before[1].fenced:
            self._report(step, Outcome(rejected=True))
        else:
            self._sent = step
            self._thread.submit(partial(self._transfer, request))
        return before[1].outcome.result if before is not None and before[0].finite else None

    def receive(self) -> None:
        """Wait for the transfer under way, and bring its parameters into the model.

        Raises what the transfer raised, TimedOut if it takes too long.
        """
        self._take()

    def _take(self) -> tuple[Step, TransferResult] | None:
        if self._failure is not None:
            raise self._failure
        if self._sent is None:
            return None
        began = time.monotonic()
        try:
            result = self._thread.take(self._timeout)
        except BaseException as error:
            self._failure = error
            raise
        step, self._sent = self._sent, None
        self._prefetched_claim = result.prefetched_claim
        if result.outcome.version is not None:
            np.copyto(self._binding.flat, self._back_buffer)
            self._binding.refresh()
            self._prefetched_version = result.outcome.version
        self._waited = [("wait", began, time.monotonic())]
        self._report(step, result.outcome)
        return step, result

    def should_continue(self, done: int, following: int) -> Advice:
        """The store is not asked: it would answer about the gradient that travels."""
        return Advice.CONTINUE

    def refresh(self) -> int:
        self._prefetched_version = super().refresh()
        return self._prefetched_version

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        self._thread.close(self._client.store.close, timeout)
        if self._failure is None:
            self.receive()

    def _transfer(self, request: PushRequest) -> TransferResult:
        """In the background thread: push, pull, and claim the step after the one being computed."""
        outcome = self._client.push(request, self._back_buffer)
        if outcome.fenced:
            return TransferResult(outcome, fenced=True)
        try:
            began = time.monotonic()
            if outcome.version is None:
                outcome.version = self._client.pull(self._back_buffer)
                outcome.spans.append(("pull", began, time.monotonic()))
            return TransferResult(outcome, self._client.claim_ahead())
        except Fenced:
            self._client.rejoin()
            return TransferResult(outcome, fenced=True)
