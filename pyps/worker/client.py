"""A worker's calls of its store: claims, pushes and pulls, in the run's codecs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pyps.errors import Fenced, NotFinite, PushRejected, TimedOut
from pyps.native.values import Claim, Codec, DataSet, Flat, PushRequest
from pyps.store.codec import decode_vector, encoded_vector_bytes
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.worker.emulated_link import EmulatedLinks
from pyps.worker.step import Outcome

JOIN_TIMEOUT_SECONDS = 300.0  # other workers may still be importing torch and reading data

Claimed = tuple[Claim, StagingBuffer]  # the samples of a step, and where its gradient goes


class StoreClient:
    """One thread at a time may use it, not always the same one. `fenced` counts how often it had to rejoin.

    pull: the codec of pulled parameters. uses_turns: a push and the pull after it are one turn.
    before_claim: runs before each claim. links: emulated ones, which pushes and pulls cross. `ahead`: the
    claims of later steps, and of the current one until it is taken from there; after_claim_ahead gets each of
    them when it is made, in the thread that made it.
    """

    def __init__(
        self,
        store: Store,
        pull: Codec,
        *,
        uses_turns: bool,
        before_claim: Callable[[], None],
        links: EmulatedLinks | None = None,
    ) -> None:
        self.store = store
        self._links = links or EmulatedLinks()
        self.fenced = 0
        self._codec, self._uses_turns, self._before_claim = pull, uses_turns, before_claim
        self._codes: NDArray[np.uint8] | None = None
        self.ahead: deque[Claim] = deque()
        self.after_claim_ahead: Callable[[Claim], None] = _ignore

    def claim(self) -> Claimed:
        """Claim the next step, waiting until every rank has joined once. Raises Ended, Fenced, TimedOut."""
        self._before_claim()
        return self._start(), self.store.stage()

    def _start(self) -> Claim:
        deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
        while True:
            try:
                return self.store.start()
            except TimedOut:
                if self.store.status().all_joined or time.monotonic() > deadline:
                    raise

    def claim_ahead(self) -> Claimed | None:
        """With a step under way, claim the one after it; None: nothing is left now. Raises Fenced."""
        claim = self.start_ahead()
        return None if claim is None else (claim, self.store.stage())

    def start_ahead(self) -> Claim | None:
        """As claim_ahead, without a place for the gradient."""
        self._before_claim()
        claim = self.store.start_ahead()
        if claim is not None and not (self.ahead and self.ahead[-1].first == claim.first):
            self.ahead.append(claim)
            self.after_claim_ahead(claim)
        return claim

    def check_data_set(self, data: DataSet) -> None:
        """Compare this rank's data set with the others'. Raises InvalidArgument, naming what differs."""
        try:
            self.store.set_data_set(data)
        except Fenced:  # reading its first samples took longer than the round timeout
            self.rejoin()
            self.store.set_data_set(data)

    def rejoin(self) -> None:
        """After Fenced: join again. All claims are gone."""
        self.fenced += 1
        self.ahead.clear()
        self.store.rejoin()

    def pull(self, out: Flat) -> int:
        """Fetch the parameters, each chunk whole, from the store's fp32 ones; the version."""
        if self._codec is Codec.F32:
            _, version = self.store.pull(out)
            self._carry(Codec.F32)
            return version
        if self._codes is None:
            self._codes = np.empty(encoded_vector_bytes(self._codec, self.store.layout), np.uint8)
        _, version = self.store.pull_encoded(self._codec, self._codes)
        self._carry(self._codec)
        decode_vector(self._codes, self._codec, self.store.layout, out)
        return version

    def push(self, request: PushRequest, out: Flat) -> Outcome:
        """Send a gradient; under a policy of turns fetch the parameters into `out` too.

        A fenced worker has rejoined when this returns.
        """
        began, outcome = time.monotonic(), Outcome()
        try:
            self._send(request, out, outcome)
        except Fenced:
            outcome.fenced = True
            self.rejoin()
        except PushRejected:
            outcome.rejected = True
        except NotFinite:
            outcome.unencodable = True
            self.store.send(PushRequest(request.staging, 0, request.hyper))  # skip: the claim is still held
        done = time.monotonic()
        waited = began
        if outcome.result is not None and outcome.result.wait_seconds > 0.0:
            waited = min(began + outcome.result.wait_seconds, done)
            outcome.spans.append(("wait", began, waited))
        outcome.spans.append(("push" if request.samples else "skip", waited, done))
        return outcome

    def _carry(self, codec: Codec) -> None:
        self._links.carry(encoded_vector_bytes(codec, self.store.layout))

    def _send(self, request: PushRequest, out: Flat, outcome: Outcome) -> None:
        if request.samples:
            self._carry(request.encoding.codec)
        if self._uses_turns and self._codec is Codec.F32:
            outcome.result, outcome.version = self.store.send_and_pull(request, out)
            self._carry(Codec.F32)
            return
        outcome.result = self.store.send(request)
        if self._uses_turns:
            outcome.version = self.pull(out)


def _ignore(_: Claim) -> None:
    """Without a loader no claim needs to be known early."""
