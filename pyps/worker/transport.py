"""How a worker's steps reach the store and come back: serially here, overlapped in pyps.worker.pipeline.

begin()     claims samples, and brings parameters into the model
send()      pushes the step's gradient
receive()   waits until what was sent has arrived, and takes what came back
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from pyps.errors import Ended, Fenced
from pyps.native.values import Advice, PushRequest, PushResult
from pyps.worker.binding import Binding
from pyps.worker.client import StoreClient
from pyps.worker.step import Outcome, Step

StepCallback = Callable[[Step, Outcome], None]


class Transport(ABC):
    """A worker's transport. `report` receives each step that was sent, once its outcome is known.

    A fenced worker rejoins by itself; what it had claimed is dropped.
    """

    depth: int  # steps of one worker that may be under way at once

    def __init__(self, client: StoreClient, binding: Binding, report: StepCallback) -> None:
        self._client, self._binding, self._report = client, binding, report
        self._prefetched_version: int | None = None  # of parameters that came before they were asked for

    @abstractmethod
    def begin(self) -> Step | None:
        """The next step, its parameters in the model; None when the run's samples are used up."""

    @abstractmethod
    def claim_ahead(self) -> None:
        """Claim the samples of the next step now, if the policy lets it: they are loaded meanwhile."""

    @abstractmethod
    def send(self, step: Step, request: PushRequest) -> PushResult | None:
        """Push a step's gradient; the result of the step that has arrived, None if that was not applied."""

    @abstractmethod
    def receive(self) -> None:
        """Wait for the transfer under way."""

    @property
    def has_arrived(self) -> bool:
        """Whether parameters have come that are newer than the model's."""
        return False

    def take_arrived(self) -> int:
        """Within a step: bring parameters that have come into the model, without buffers; their version.

        Raises Fenced for a worker that was fenced meanwhile.
        """
        raise NotImplementedError("nothing arrives by itself")

    @abstractmethod
    def should_continue(self, done: int, following: int) -> Advice:
        """Between two micro-batches: what the policy advises. Raises Fenced."""

    def refresh(self) -> int:
        """Pull one single version into the model, after any transfer under way; the version."""
        self.receive()
        _, version = self._client.store.pull(self._binding.flat, strict=True)
        self._binding.refresh()
        return version

    @abstractmethod
    def close(self) -> None:
        """Leave the store after any transfer under way. Raises TimedOut. Idempotent."""


class SerialTransport(Transport):
    """Push, pull and compute follow one another."""

    depth = 1

    def begin(self) -> Step | None:
        began = time.monotonic()
        while True:
            try:
                claim, staging = self._client.claim(), self._client.store.stage()
                ready = time.monotonic()
                version = self._prefetched_version
                if version is None or self._client.is_old(version, claim):
                    # while the last gradient is still in its staging buffer
                    version = self._client.pull(self._binding.flat)
                self._binding.attach_grads(staging)
                break
            except Ended:
                return None
            except Fenced:
                self._prefetched_version = None
                self._client.rejoin()
        self._prefetched_version = None
        self._binding.refresh()
        return Step(claim, staging, version, [("wait", began, ready), ("pull", ready, time.monotonic())])

    def claim_ahead(self) -> None:
        with suppress(Fenced):  # the push will say so
            self._client.claim_ahead(1)

    def send(self, step: Step, request: PushRequest) -> PushResult | None:
        outcome = self._client.push(request, self._binding.flat)
        self._prefetched_version = outcome.version
        self._binding.commit_residual(outcome.result is not None and step.finite)
        self._report(step, outcome)
        return outcome.result if step.finite else None

    def receive(self) -> None:
        """Nothing is under way between two calls."""

    def should_continue(self, done: int, following: int) -> Advice:
        return self._client.store.should_continue(done, following)

    def close(self) -> None:
        self._client.store.close()
