"""A worker's calls of its store: claims, pushes and pulls, in the run's codecs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import Fenced, NotFinite, PushRejected, TimedOut
from pyps.formats.records import Span
from pyps.native.transfer import ArrivalCallback, FinishTransfer, TransferRequest
from pyps.native.values import Claim, Codec, DataSet, Flat, PushRequest, PushResult
from pyps.step.transfer import Ask, Transfers, Verb
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
    buffers for those. fenced: the worker was, perhaps after its push.
    """

    outcome: Outcome
    claims: list[Claim] = field(default_factory=list)
    staging: list[StagingBuffer] = field(default_factory=list)
    fenced: bool = False


EndTransfer = Callable[[Flat, ArrivalCallback | None], Transfer]  # the rest of a transfer that was begun


class StoreClient:
    """One thread at a time may use it, not always the same one; begin_transfer() may be called meanwhile.

    `fenced` counts how often it had to rejoin.
    pull: the codec of pulled parameters, `pull_codec`; it may change between transfers. budget: announced
    before each claim; None: the policy does not resize batches. links: emulated ones, which pushes and pulls
    cross. `ahead`: the claims of later steps, and of the current one until it is taken from there;
    after_claim_ahead gets each of them when it is known, in the thread that learns of it. `idle`: makes each
    wait for a claim.
    """

    def __init__(
        self, store: Store, pull: Codec, *, budget: AnnouncedBudget | None, links: EmulatedLinks | None = None
    ) -> None:
        self.store = store
        self._links = links or EmulatedLinks()
        self.fenced = 0
        self.pull_codec, self._budget = pull, budget
        self.has_link = store.servers > 0 or self._links.emulated
        self._uses_turns = store.policy_needs().uses_turns
        self._codes: dict[Codec, NDArray[np.uint8]] = {}
        self.ahead: deque[Claim] = deque()
        self.after_claim_ahead: Callable[[Claim], None] = _ignore
        self.idle: Callable[[Callable[[], Claim]], Claim] = _wait
        self._transfers = Transfers()
        self._trips: RoundTrips[Transfer] | None = None  # over emulated links
        self._spare: list[Flat] = []  # for what travels back

    def claim(self) -> Claim:
        """Claim the next step, waiting until every rank has joined once, and while this one rests.

        Raises Ended, Fenced, TimedOut.
        """
        if self._budget is not None:
            self._budget.announce()
        self._transfers.begin_again()
        deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
        while True:
            try:
                return self.idle(self.store.start)
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
        while len(claims) < count and (claim := self._claim_one()) is not None:
            claims.append(claim)
        return claims

    def _claim_one(self) -> Claim | None:
        if (claim := self.store.start_ahead()) is not None:
            self._note(claim)
        return claim

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
        self._transfers.begin_again()
        self.store.rejoin()
        if self._budget is not None:
            self._budget.forget()

    def begin_transfer(self, request: PushRequest, ask: Ask, pull: Codec) -> EndTransfer:
        """Begin a transfer. Over a link, also an emulated one, this sends all of it; what is returned waits
        for the reply, and writes the parameters. A store on this machine is asked only then, and tells of
        ranges of them as they arrive.

        Call what is returned in the order of the beginnings, perhaps in another thread. It does not rejoin.
        """
        if self._links.emulated:
            return self._travel(request, ask, pull)
        if not self.store.servers:
            return lambda out, arrived: self.transfer(request, ask, pull, out, arrived=arrived)
        self._transfers.check()  # else this gradient would be taken for the one that did not leave
        try:
            return self._leave(request, ask, pull)
        except Exception as error:
            self._transfers.fail(error)
            raise

    def _leave(self, request: PushRequest, ask: Ask, pull: Codec) -> EndTransfer:
        """Send a transfer over a link."""
        try:
            turn = self._await_turn(request)
        except Fenced:
            return _fenced
        most = None if self._budget is None else self._budget.change()
        whole = TransferRequest(request, pull, ask.exchanges, ask.claims, most)
        try:
            return partial(self._finish, turn, request.samples > 0, False, self.store.begin_transfer(whole))
        except NotFinite:
            skip = replace(whole, push=PushRequest(request.staging, 0, request.hyper))
            return partial(self._finish, turn, False, True, self.store.begin_transfer(skip))

    def _await_turn(self, request: PushRequest) -> list[Span]:
        """Over a link, wait until the gradient has the link for itself, where the policy has turns; the wait.

        Raises Fenced, TimedOut.
        """
        if not (self.has_link and self._uses_turns and request.samples):
            return []
        began = time.monotonic()
        try:
            self.store.await_turn()
        except TimedOut as error:
            self._transfers.fail(error)
            raise
        return [("wait", began, time.monotonic())]

    def _travel(self, request: PushRequest, ask: Ask, pull: Codec) -> EndTransfer:
        """A transfer over emulated links."""
        if self._trips is None:
            self._trips = RoundTrips(self._links, f"pyps-transfer-{self.store.rank}-store")
        params = self._spare.pop() if self._spare else np.empty(self.store.layout.flat_elements, np.float32)
        left = time.monotonic()

        def answer() -> tuple[Transfer, int]:
            travelled: Span = ("push" if request.samples else "skip", left, time.monotonic())
            transfer = self.transfer(request, ask, pull, params)
            transfer.outcome.spans.insert(0, travelled)
            return transfer, self._bytes(pull)

        size = self._bytes(request.encoding.codec) if request.samples else 0
        before = partial(self._await_turn, request) if self._uses_turns and request.samples else None
        return partial(self._arrive, self._trips.begin(size, answer, before), params)

    def _arrive(
        self, receive: Callable[[], Transfer], params: Flat, out: Flat, _arrived: ArrivalCallback | None
    ) -> Transfer:
        transfer = receive()
        if not transfer.fenced:
            np.copyto(out, params)
        self._spare.append(params)
        spans = transfer.outcome.spans
        spans.append(("pull", spans[-1][2], time.monotonic()))
        return transfer

    def send(self, request: PushRequest, ask: Ask, out: Flat, arrived: ArrivalCallback | None) -> Transfer:
        """A whole transfer now, over emulated links too. arrived: as for Store.send_and_pull."""
        try:
            turn = self._await_turn(request)
        except Fenced:
            return _fenced(out, arrived)
        began = time.monotonic()
        if request.samples:
            self._carry(Way.TO_STORE, request.encoding.codec)
        tell = None if self.has_link else arrived
        transfer = self.transfer(request, ask, self.pull_codec, out, began, tell)
        transfer.outcome.spans[:0] = turn
        if transfer.outcome.version is not None and self._links.emulated:
            left = time.monotonic()
            self._carry(Way.FROM_STORE, self.pull_codec)
            transfer.outcome.spans.append(("pull", left, time.monotonic()))
        return transfer

    def transfer(
        self,
        request: PushRequest,
        ask: Ask,
        pull: Codec,
        out: Flat,
        began: float | None = None,
        arrived: ArrivalCallback | None = None,
    ) -> Transfer:
        """Make a transfer at the store, call by call. pull: the codec of what comes back. began: when its
        gradient left; None: now. arrived: called with each range that came.

        Raises what ended it, save Fenced.
        """
        outcome = Outcome()
        claims: tuple[Claim, ...] = ()
        staging: list[StagingBuffer] = []
        try:
            done = self._transfers.run(ask, self._verbs(request, ask, pull, out, outcome, began, arrived))
            claims, fenced = done.claims, done.error is not None
            staging = [] if fenced else [self.store.stage() for _ in claims]
        except Fenced:
            fenced = True
        if fenced:
            outcome.version = None
        return Transfer(outcome, list(claims), staging, fenced)

    def _verbs(
        self,
        request: PushRequest,
        ask: Ask,
        codec: Codec,
        out: Flat,
        outcome: Outcome,
        began: float | None,
        arrived: ArrivalCallback | None,
    ) -> dict[Verb, Callable[[], Any]]:
        """How this store answers a transfer; what it came to is noted in `outcome`."""

        def push() -> PushResult | None:
            self._push(lambda: (self.store.send(request), None), request, outcome, began)
            return outcome.result

        def exchange() -> tuple[PushResult | None, int | None]:
            if codec is not Codec.F32:
                return push(), None
            self._push(lambda: self.store.send_and_pull(request, out, arrived), request, outcome, began)
            return outcome.result, outcome.version

        def limit() -> None:
            if self._budget is not None and ask.claims:
                self._budget.announce()

        def pull() -> int:
            left = time.monotonic()
            outcome.version = self._pull(out, codec)
            outcome.spans.append(("pull", left, time.monotonic()))
            return outcome.version

        return {
            Verb.LIMIT: limit,
            Verb.PUSH: push,
            Verb.EXCHANGE: exchange,
            Verb.CLAIM: self._claim_one,
            Verb.PULL: pull,
        }

    def _push(
        self,
        send: Callable[[], tuple[PushResult, int | None]],
        request: PushRequest,
        outcome: Outcome,
        began: float | None,
    ) -> None:
        """Push, and note what became of it. Values that are not finite are skipped: their claim is held."""
        began = time.monotonic() if began is None else began
        try:
            outcome.result, outcome.version = send()
        except PushRejected:
            outcome.rejected = True
            raise
        except NotFinite:
            outcome.unencodable = True
            self.store.send(PushRequest(request.staging, 0, request.hyper))
        finally:
            done = time.monotonic()
            waited = began
            if outcome.result is not None and outcome.result.wait_seconds > 0.0:
                waited = min(began + outcome.result.wait_seconds, done)
                outcome.spans.append(("wait", began, waited))
            outcome.spans.append(("push" if request.samples else "skip", waited, done))

    def _finish(
        self,
        turn: list[Span],
        pushes: bool,
        unencodable: bool,
        finish: FinishTransfer,
        out: Flat,
        _arrived: ArrivalCallback | None,
    ) -> Transfer:
        """A remote store's transfer, as a local one's. It comes as a whole."""
        try:
            done = finish(out)
        except Fenced:
            return Transfer(Outcome(), fenced=True)
        spans: list[Span] = [("skip", *done.spans[0][1:]), *done.spans[1:]] if not pushes else done.spans
        outcome = Outcome(
            None if unencodable else done.result,
            rejected=done.result is None,
            unencodable=unencodable,
            version=done.version,
            spans=[*turn, *spans],
        )
        for claim in done.claims:
            self._note(claim)
        fenced, staging = done.version is None, []
        try:
            staging = [] if fenced else [self.store.stage() for _ in done.claims]
        except Fenced:
            outcome.version, fenced = None, True
        return Transfer(outcome, list(done.claims), staging, fenced)

    def pull(self, out: Flat) -> int:
        """Fetch the parameters, each chunk whole, from the store's fp32 ones; the version."""
        version = self._pull(out, self.pull_codec)
        self._carry(Way.FROM_STORE, self.pull_codec)
        return version

    def _pull(self, out: Flat, codec: Codec) -> int:
        if codec is Codec.F32:
            return self.store.pull(out)[1]
        codes = self._codes.get(codec)
        if codes is None:
            codes = self._codes[codec] = np.empty(self._bytes(codec), np.uint8)
        _, version = self.store.pull_encoded(codec, codes)
        decode_vector(codes, codec, self.store.layout, out)
        return version

    def _carry(self, way: Way, codec: Codec) -> None:
        """Return when a vector in this codec has crossed the emulated links."""
        if self._links.emulated:
            self._links.carry(way, self._bytes(codec))

    def _bytes(self, codec: Codec) -> int:
        return encoded_vector_bytes(codec, self.store.layout)

    def close(self) -> None:
        """Leave the store, after what travels over emulated links."""
        if self._trips is None:
            self.store.close()
        else:
            self._trips.close(self.store.close, CLOSE_SECONDS)


def _fenced(_out: Flat, _arrived: ArrivalCallback | None) -> Transfer:
    """A transfer whose worker was fenced before its gradient left."""
    return Transfer(Outcome(), fenced=True)


def _wait(wait: Callable[[], Claim]) -> Claim:
    """No signal ends it."""
    return wait()


def _ignore(_: Claim) -> None:
    """Without a loader no claim needs to be known early."""
