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
from pyps.native.transfer import Finish, TransferRequest
from pyps.native.values import Claim, Codec, DataSet, Flat, PolicyNeeds, PushRequest
from pyps.store.codec import decode_vector, encoded_vector_bytes
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.worker.emulated_link import EmulatedLinks, RoundTrips, Way
from pyps.worker.memory import AnnouncedBudget
from pyps.worker.step import Outcome

CLOSE_SECONDS = 10.0  # that transfers under way may take in the end
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
    """One thread at a time may use it, not always the same one; begin_transfer() may be called meanwhile.

    `fenced` counts how often it had to rejoin.
    pull: the codec of pulled parameters. needs: of the policy. budget: announced before each claim; None: the
    policy does not resize batches. links: emulated ones, which pushes and pulls cross. `ahead`: the claims of
    later steps, and of the current one until it is taken from there; after_claim_ahead gets each of them when
    it is known, in the thread that learns of it.
    """

    def __init__(
        self,
        store: Store,
        pull: Codec,
        *,
        needs: PolicyNeeds,
        budget: AnnouncedBudget | None,
        links: EmulatedLinks | None = None,
    ) -> None:
        self.store = store
        self._links = links or EmulatedLinks()
        self.fenced = 0
        self._codec, self._needs, self._budget = pull, needs, budget
        self._exchanges = needs.uses_turns or needs.starts_at_once  # a push brings the next step's parameters
        self._codes: NDArray[np.uint8] | None = None
        self.ahead: deque[Claim] = deque()
        self.after_claim_ahead: Callable[[Claim], None] = _ignore
        self._failed: BaseException | None = None  # a transfer, and with it all later ones
        self._trips: RoundTrips[Transfer] | None = None  # over emulated links
        self._spare: list[Flat] = []  # for what travels back

    @property
    def waits_for_rounds(self) -> bool:
        """Whether one step takes the gradients of all workers."""
        return self._needs.waits_for_rounds

    def claim(self) -> Claim:
        """Claim the next step, waiting until every rank has joined once, and while this one rests.

        Raises Ended, Fenced, TimedOut.
        """
        if self._budget is not None:
            self._budget.announce()
        deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
        while True:
            try:
                return self.store.start()
            except TimedOut:
                if self._rests():
                    continue
                if self.store.status().all_joined or time.monotonic() > deadline:
                    raise

    def _rests(self) -> bool:
        """Whether nothing is planned for this rank at present."""
        rank = self.store.rank
        return rank is not None and self.store.ranks()[rank].batch == 0

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
        """Push, claim so many steps ahead and pull. Over a link, also an emulated one, this sends all of it;
        what is returned waits for the reply, and writes the parameters. A store on this machine is asked only
        then.

        Call what is returned in the order of the beginnings, perhaps in another thread. It raises Fenced
        without rejoining. After one transfer has failed the others fail alike, until the worker has rejoined.
        """
        if self._links.emulated:
            return self._travel(request, claims)
        if not self.store.servers:
            return partial(self._transfer, request, claims)
        most = None if self._budget is None else self._budget.change()
        whole = TransferRequest(request, self._codec, self._exchanges, claims, most)
        try:
            return partial(self._finish, request.samples > 0, False, self.store.begin_transfer(whole))
        except NotFinite:
            skip = replace(whole, push=PushRequest(request.staging, 0, request.hyper))
            return partial(self._finish, False, True, self.store.begin_transfer(skip))

    def _travel(self, request: PushRequest, claims: int) -> Callable[[Flat], Transfer]:
        """A transfer over emulated links."""
        if self._trips is None:
            self._trips = RoundTrips(self._links, f"pyps-transfer-{self.store.rank}-store")
        params = self._spare.pop() if self._spare else np.empty(self.store.layout.flat_elements, np.float32)
        left = time.monotonic()

        def answer() -> tuple[Transfer, int]:
            travelled: Span = ("push" if request.samples else "skip", left, time.monotonic())
            transfer = self._transfer(request, claims, params)
            transfer.outcome.spans.insert(0, travelled)
            return transfer, self._bytes(self._codec)

        size = self._bytes(request.encoding.codec) if request.samples else 0
        return partial(self._arrive, self._trips.begin(size, answer), params)

    def _arrive(self, receive: Callable[[], Transfer], params: Flat, out: Flat) -> Transfer:
        transfer = receive()
        if not transfer.fenced:
            np.copyto(out, params)
        self._spare.append(params)
        spans = transfer.outcome.spans
        spans.append(("pull", spans[-1][2], time.monotonic()))
        return transfer

    def _transfer(self, request: PushRequest, claims: int, out: Flat) -> Transfer:
        if self._failed is not None:
            raise self._failed
        outcome = Outcome()
        made: list[Claim] = []
        staging: list[StagingBuffer] = []
        try:
            self._push(request, out, outcome)
            if self._budget is not None:
                self._budget.announce()
            made = self.claim_ahead(claims)
            if outcome.version is None:
                began = time.monotonic()
                outcome.version = self._pull(out)
                outcome.spans.append(("pull", began, time.monotonic()))
            staging = [self.store.stage() for _ in made]
        except BaseException as error:
            self._failed = error
            if not isinstance(error, Fenced) or outcome.result is None:
                raise
            outcome.version, staging = None, []
        return Transfer(outcome, made, staging)

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
        try:
            staging = [self.store.stage() for _ in done.claims]
        except Fenced:
            outcome.version, staging = None, []
        return Transfer(outcome, list(done.claims), staging)

    def is_old(self, version: int, claim: Claim) -> bool:
        """Whether parameters that a push brought back should be pulled again before this step: others have
        pushed more than once each since then, while the script evaluated the model, say. Never in a turn.
        """
        return self._needs.starts_at_once and claim.version - version > self.store.layout.ranks

    def pull(self, out: Flat) -> int:
        """Fetch the parameters, each chunk whole, from the store's fp32 ones; the version."""
        version = self._pull(out)
        self._links.carry(Way.FROM_STORE, self._bytes(self._codec))
        return version

    def _pull(self, out: Flat) -> int:
        if self._codec is Codec.F32:
            return self.store.pull(out)[1]
        if self._codes is None:
            self._codes = np.empty(encoded_vector_bytes(self._codec, self.store.layout), np.uint8)
        _, version = self.store.pull_encoded(self._codec, self._codes)
        decode_vector(self._codes, self._codec, self.store.layout, out)
        return version

    def push(self, request: PushRequest, out: Flat) -> Outcome:
        """Send a gradient; in an exchange fetch the parameters into `out` too.

        A fenced worker has rejoined when this returns.
        """
        outcome, began = Outcome(), time.monotonic()
        if request.samples:
            self._links.carry(Way.TO_STORE, self._bytes(request.encoding.codec))
        try:
            self._push(request, out, outcome, began)
        except Fenced:
            outcome.fenced = True
            self.rejoin()
        if outcome.version is not None and self._links.emulated:
            arrived = time.monotonic()
            self._links.carry(Way.FROM_STORE, self._bytes(self._codec))
            outcome.spans.append(("pull", arrived, time.monotonic()))
        return outcome

    def _push(self, request: PushRequest, out: Flat, outcome: Outcome, began: float | None = None) -> None:
        """Fills in the outcome of a push that began then, by default now. Raises Fenced."""
        began = time.monotonic() if began is None else began
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

    def _bytes(self, codec: Codec) -> int:
        return encoded_vector_bytes(codec, self.store.layout)

    def _send(self, request: PushRequest, out: Flat, outcome: Outcome) -> None:
        if self._exchanges and self._codec is Codec.F32:
            outcome.result, outcome.version = self.store.send_and_pull(request, out)
            return
        outcome.result = self.store.send(request)
        if self._exchanges:
            outcome.version = self._pull(out)

    def close(self) -> None:
        """Leave the store, after what travels over emulated links."""
        if self._trips is None:
            self.store.close()
        else:
            self._trips.close(self.store.close, CLOSE_SECONDS)


def _ignore(_: Claim) -> None:
    """Without a loader no claim needs to be known early."""
