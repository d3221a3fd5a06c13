"""A worker's calls of its store: claims, pushes and pulls, in the run's codecs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pyps.errors import Fenced, NotFinite, PushRejected, TimedOut
from pyps.formats.records import Span
from pyps.native.values import Claim, Codec, DataSet, Flat, PushRequest
from pyps.remote.store import RemoteStore
from pyps.store.codec import decode_vector, encoded_vector_bytes
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.store.transfer import Finish, TransferRequest
from pyps.worker.emulated_link import EmulatedLinks
from pyps.worker.memory import AnnouncedBudget
from pyps.worker.step import Outcome

JOIN_TIMEOUT_SECONDS = 300.0  # other workers may still be importing torch and reading data


@dataclass(slots=True)
class Transfer:
    """What a step's way to the store and back came to: its outcome, claims of later steps, and staging
    buffers for those. No version came back: the worker was fenced.
    """

    outcome: Outcome
    claims: list[Claim] = field(default_factory=list)
    staging: list[StagingBuffer] = field(default_factory=list)

    @property
    def fenced(self) -> bool:
        return self.outcome.version is None


class StoreClient:
    """One thread at a time may use it, not always the same one. `fenced` counts how often it had to rejoin.

    pull: the codec of pulled parameters. uses_turns: a push and the pull after it are one turn. budget:
    announced before each claim; None: the policy does not resize batches. links: emulated ones, which pushes
    and pulls cross. `ahead`: the claims of later steps, and of the current one until it is taken from there;
    after_claim_ahead gets each of them when it is known, in the thread that learns of it.
    """

    def __init__(
        self,
        store: Store,
        pull: Codec,
        *,
        uses_turns: bool,
        budget: AnnouncedBudget | None,
        links: EmulatedLinks | None = None,
    ) -> None:
        self.store = store
        self._links = links or EmulatedLinks()
        self.fenced = 0
        self._codec, self._uses_turns, self._budget = pull, uses_turns, budget
        self._codes: NDArray[np.uint8] | None = None
        self.ahead: deque[Claim] = deque()
        self.after_claim_ahead: Callable[[Claim], None] = _ignore
        self._failed: BaseException | None = None  # a transfer, and with it all later ones

    def claim(self) -> Claim:
        """Claim the next step, waiting until every rank has joined once. Raises Ended, Fenced, TimedOut."""
        if self._budget is not None:
            self._budget.announce()
        deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
        while True:
            try:
                return self.store.start()
            except TimedOut:
                if self.store.status().all_joined or time.monotonic() > deadline:
                    raise

    def claim_ahead(self, count: int) -> list[Claim]:
        """With a step under way, claim up to `count` after it, as far as the policy allows. Raises Fenced."""
        claims: list[Claim] = []
        while len(claims) < count and (claim := self.store.start_ahead()) is not None:
            claims.append(claim)
            self._note(claim)
        return claims

    def _note(self, claim: Claim) -> None:
        self.ahead.append(claim)
        self.after_claim_ahead(claim)

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
        self._failed = None
        self.store.rejoin()
        if self._budget is not None:
            self._budget.forget()

    def begin_transfer(self, request: PushRequest, claims: int) -> Callable[[Flat], Transfer]:
        """Push, claim so many steps ahead and pull. Over a link this sends all of it; what is returned waits
        for the reply, and writes the parameters. A store on this machine is asked only then.

        Call what is returned in the order of the beginnings, perhaps in another thread. It raises Fenced
        without rejoining. After one transfer has failed the others fail alike, until the worker has rejoined.
        """
        if not isinstance(self.store, RemoteStore) or self._links.emulated:
            return partial(self._transfer, request, claims)
        most = None if self._budget is None else self._budget.change()
        whole = TransferRequest(request, self._codec, self._uses_turns, claims, most)
        try:
            return partial(self._finish, request.samples > 0, False, self.store.begin_transfer(whole))
        except NotFinite:
            skip = replace(whole, push=PushRequest(request.staging, 0, request.hyper))
            return partial(self._finish, False, True, self.store.begin_transfer(skip))

    def _transfer(self, request: PushRequest, claims: int, out: Flat) -> Transfer:
        if self._failed is not None:
            raise self._failed
        outcome = Outcome()
        made: list[Claim] = []
        try:
            self._push(request, out, outcome)
            if self._budget is not None:
                self._budget.announce()
            made = self.claim_ahead(claims)
            if outcome.version is None:
                began = time.monotonic()
                outcome.version = self.pull(out)
                outcome.spans.append(("pull", began, time.monotonic()))
        except BaseException as error:
            self._failed = error
            if not isinstance(error, Fenced) or outcome.result is None:
                raise
            outcome.version = None
        return Transfer(outcome, made)

    def _finish(self, pushes: bool, unencodable: bool, finish: Finish, out: Flat) -> Transfer:
        """A remote store's transfer, as a local one's."""
        done = finish(out)
        spans: list[Span] = [("skip", *done.spans[0][1:]), *done.spans[1:]] if not pushes else done.spans
        outcome = Outcome(
            None if unencodable else done.result,
            rejected=done.result is None,
            unencodable=unencodable,
            version=done.version,
            spans=spans,
        )
        for claim in done.claims:
            self._note(claim)
        return Transfer(outcome, list(done.claims))

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
        outcome = Outcome()
        try:
            self._push(request, out, outcome)
        except Fenced:
            outcome.fenced = True
            self.rejoin()
        return outcome

    def _push(self, request: PushRequest, out: Flat, outcome: Outcome) -> None:
        """Fills in the outcome. Raises Fenced."""
        began = time.monotonic()
        try:
            self._send(request, out, outcome)
        except PushRejected:
            outcome.rejected = True
        except NotFinite:
            outcome.unencodable = True
            self.store.send(PushRequest(request.staging, 0, request.hyper))  # skip: the claim is still held
        finally:
            done = time.monotonic()
            waited = began
            if outcome.result is not None and outcome.result.wait_seconds > 0.0:
                waited = min(began + outcome.result.wait_seconds, done)
                outcome.spans.append(("wait", began, waited))
            outcome.spans.append(("push" if request.samples else "skip", waited, done))

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
