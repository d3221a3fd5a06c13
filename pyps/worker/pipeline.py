"""A pipeline: a worker computes a step while the gradients of the d - 1 steps before it travel.

    main thread, d = 2   compute k          compute k + 1         compute k + 2
    transfers            push k - 1, pull   push k, pull          push k + 1, pull

A step is computed on the newest parameters that had come back when the step before was sent: those after the
push d steps before it, or newer. The period is the longest of compute, of what the link's busier direction
takes, and of 1 / (d - 1) of a transfer. Over a link several transfers travel at once; a store on this machine
does one after the other. Each brings the claim and the staging buffer of a step to come, so the main
thread never waits for the store while it has some.

A worker that has run ahead of the others waits once for all its transfers (pyps.worker.lead). With local
steps it also waits for the first: workers may join long after each other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from pyps.errors import Ended, Fenced, InputError
from pyps.formats.records import Span
from pyps.native.values import Advice, Claim, Flat, PushRequest, PushResult
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.worker.background import BackgroundThread
from pyps.worker.binding import Binding
from pyps.worker.client import StoreClient, Transfer
from pyps.worker.lead import has_run_ahead, may_run_ahead
from pyps.worker.step import Outcome, Step
from pyps.worker.transport import StepCallback, Transport

CLOSE_SECONDS = 10.0
BACK_BUFFERS = 2


class PipelinedTransport(Transport):
    """Transfers overlap with the next steps' compute. All methods belong to the main thread.

    depth: steps under way at once: one computed, the others in transfer. timeout: seconds that a transfer may
    take. aligns: wait for the first transfer.
    """

    def __init__(
        self,
        client: StoreClient,
        binding: Binding,
        report: StepCallback,
        *,
        depth: int,
        timeout: float,
        aligns: bool = False,
    ) -> None:
        super().__init__(client, binding, report)
        self.depth, self._timeout = depth, timeout
        self._aligns = self._unaligned = aligns  # unaligned: waits for all transfers before the next step
        self._may_run_ahead = may_run_ahead(depth, local=aligns, in_rounds=client.waits_for_rounds)
        # One receives what is pulled while the other has the newest parameters.
        self._back_buffers: list[Flat] = [
            np.zeros(binding.flat.size, np.float32) for _ in range(BACK_BUFFERS)
        ]
        self._newest, self._newest_version = 0, 0
        self._buffers_lock = threading.Lock()
        name = f"pyps-transfer-{client.store.rank}"
        self._sender: BackgroundThread[None] = BackgroundThread(f"{name}-out")
        self._receiver: BackgroundThread[Transfer] = BackgroundThread(name)
        self._sent: deque[tuple[Step, int]] = deque()  # under way, and the claims that each asks for
        self._claims: deque[Claim] = deque()  # of the next steps
        self._staging: deque[StagingBuffer] = deque()  # for them
        self._failure: BaseException | None = None  # nothing can follow a transfer that failed
        self._waited: list[Span] = []

    @property
    def idle(self) -> bool:
        """Whether no transfer is under way."""
        return self._receiver.results_ready >= len(self._sent)

    def begin(self) -> Step | None:
        if self._sent and self._unaligned:
            self._unaligned = False
            fenced, _ = self._settle(0)
            self._unaligned = fenced and self._aligns  # waits of what came back do not count again
        while self._sent and not self._claims:
            self._settle(len(self._sent) - 1)
        began, waited = time.monotonic(), self._waited
        self._waited = []
        while True:
            try:
                claim = self._next_claim()
                ready = time.monotonic()
                staging = self._staging.popleft()
                if self._prefetched_version is None:
                    self._prefetched_version = self._client.pull(self._binding.flat)
                self._binding.attach_grads(staging)
                break
            except Ended:
                return None
            except Fenced:
                self._rejoin()
        self._binding.refresh()
        spans = [*waited, ("wait", began, ready), ("pull", ready, time.monotonic())]
        return Step(claim, staging, self._prefetched_version, spans)

    def claim_ahead(self) -> None:
        """Each transfer does."""

    def _next_claim(self) -> Claim:
        """The next step's claim; if there is none, no transfer is under way."""
        if self._claims:
            return self._claims.popleft()
        self._prefetched_version = None
        claim = self._client.claim()
        self._claims.extend(self._client.claim_ahead(self.depth - 1))
        self._staging.extend(self._client.store.stage() for _ in range(1 + len(self._claims)))
        return claim

    def _rejoin(self) -> None:
        """After Fenced, with no transfer under way."""
        self._forget()
        self._client.rejoin()

    def _forget(self) -> None:
        """A fenced worker's claims and staging buffers are gone."""
        self._claims.clear()
        self._staging.clear()
        self._prefetched_version = None
        self._unaligned = self._aligns

    def send(self, step: Step, request: PushRequest) -> PushResult | None:
        """Let the gradient travel while the next steps are computed; the result of the step that came back
        last.
        """
        # The claim was made long before the compute began, and the model goes on while this travels.
        params = None if request.base_params is None else request.base_params.copy()
        request = replace(request, base_params=params, compute_seconds=time.monotonic() - step.created)
        fenced, back = self._settle(self.depth - 2)
        if fenced:
            self._report(step, Outcome(rejected=True))
        else:
            asked = sum(claims for _, claims in self._sent)
            claims = max(0, self.depth - len(self._claims) - asked)
            self._sent.append((step, claims))
            self._sender.submit(partial(self._post, request, claims))
            while self._sender.results_ready > 1:
                self._sender.take(0.0)
        return back[1].result if back is not None and back[0].finite else None

    @property
    def has_arrived(self) -> bool:
        return self._receiver.results_ready > 0

    def take_arrived(self) -> int:
        fenced, _ = self._settle(len(self._sent), rejoins=False, within_step=True)
        if fenced:
            self._forget()
        if self._prefetched_version is None:
            raise Fenced("pipeline", "fenced while local steps were taken")
        return self._prefetched_version

    def receive(self) -> None:
        """Wait for all transfers under way, and bring the newest parameters into the model.

        Raises what a transfer raised, TimedOut if one takes too long.
        """
        self._settle(0)

    def _settle(
        self, most: int, *, rejoins: bool = True, within_step: bool = False
    ) -> tuple[bool, tuple[Step, Outcome] | None]:
        """Take the transfers that have ended, and wait until at most so many are under way.

        Whether the worker was fenced meanwhile, and has rejoined if it `rejoins`; and the last step that came
        back. within_step: leave averaged buffers alone, which the step under way has changed.
        """
        if self._failure is not None:
            raise self._failure
        fenced, back = False, None
        while self._sent and (fenced or len(self._sent) > most or self._receiver.results_ready):
            step, transfer = self._take()
            fenced = fenced or transfer.fenced
            if not transfer.fenced:
                back = step, transfer.outcome
            self._report(step, transfer.outcome)
        if back is not None and not fenced:
            with self._buffers_lock:
                np.copyto(self._binding.flat, self._back_buffers[self._newest])
                self._prefetched_version = self._newest_version
            if within_step:
                self._binding.refresh_parameters()
            else:
                self._binding.refresh()
        if fenced and rejoins:
            self._rejoin()
        return fenced, back

    def _take(self) -> tuple[Step, Transfer]:
        """The oldest transfer under way, once it has ended."""
        began, waits = time.monotonic(), not self._receiver.results_ready
        step, _ = self._sent[0]
        try:
            transfer = self._receiver.take(self._timeout)
        except Fenced:
            transfer = Transfer(Outcome(fenced=True))
        except BaseException as error:
            self._failure = error
            raise
        self._sent.popleft()
        if waits:
            self._waited.append(("wait", began, time.monotonic()))
        if not transfer.fenced:
            self._claims.extend(transfer.claims)
            self._staging.extend(transfer.staging)
            self._unaligned = self._unaligned or (self._may_run_ahead and _has_run_ahead(step, transfer))
        return step, transfer

    def should_continue(self, done: int, following: int) -> Advice:
        """The store is not asked: it would answer about the gradient that travels."""
        return Advice.CONTINUE

    def refresh(self) -> int:
        self._prefetched_version = super().refresh()
        return self._prefetched_version

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        deadline = time.monotonic() + timeout
        self._sender.close(_nothing, timeout)
        self._receiver.close(self._client.close, max(0.0, deadline - time.monotonic()))
        if self._failure is None:
            self._settle(0, rejoins=False)

    def _post(self, request: PushRequest, claims: int) -> None:
        """In the sending thread: send, or hand over what is sent when its turn comes."""
        try:
            finish = self._client.begin_transfer(request, claims)
        except BaseException as error:
            finish = partial(_fail, error)
        self._receiver.submit(partial(self._finish, finish))

    def _finish(self, finish: Callable[[Flat], Transfer]) -> Transfer:
        """In the receiving thread: what came back of a transfer."""
        other = 1 - self._newest
        transfer = finish(self._back_buffers[other])
        if transfer.outcome.version is None:
            return transfer
        with self._buffers_lock:
            self._newest, self._newest_version = other, transfer.outcome.version
        return transfer


def check_depth(depth: int, store: Store) -> None:
    """Raise InputError for more steps under way than the store has staging buffers for."""
    if depth > store.layout.staging_buffers:
        found = f"{depth}, in a store made for at most {store.layout.staging_buffers}"
        raise InputError("pipeline", "depth", found, "one depth for all ranks, or rank 0's the greatest")


def extra_buffers(depth: int) -> int:
    """How many more vectors of parameters a pipelined worker holds than a serial one, which has one staging
    buffer.
    """
    return depth - 1 + BACK_BUFFERS if depth > 1 else 0


def _has_run_ahead(step: Step, transfer: Transfer) -> bool:
    result = transfer.outcome.result
    if result is None:
        return False
    way = sum(end - begin for kind, begin, end in transfer.outcome.spans if kind in ("push", "pull"))
    return has_run_ahead(result.wait_seconds, way, step.compute_seconds)


def _fail(error: BaseException, out: Flat) -> Transfer:
    raise error


def _nothing() -> None:
    """After the last transfer was sent."""
