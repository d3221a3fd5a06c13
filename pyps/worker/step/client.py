"""A worker's calls of its store: claims, pushes and pulls, in the run's codecs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from msgspec import structs

from pyps.errors import Fenced, TimedOut
from pyps.formats.records import Span, SpanKind
from pyps.native.transfer import ArrivalCallback, FinishTransfer, Transferred, TransferRequest
from pyps.native.values import Claim, Codec, DataSet, Flat, PushRequest
from pyps.step.transfer import Transfers
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.worker.run.memory import MemoryBudget

JOIN_TIMEOUT_SECONDS = 300.0  # other workers may still be importing torch and reading data


Landed = tuple[Transferred, list[StagingBuffer]]  # what a transfer came to, and a buffer for each claim
Land = Callable[[Flat, ArrivalCallback | None], Landed]  # the rest of a transfer that was begun


class StoreClient:
    """One thread at a time may use it, not always the same one; begin_transfer() may be called meanwhile.

    `fenced` counts how often it had to rejoin.
    pull: the codec of pulled parameters, `pull_codec`; it may change between transfers. budget: announced
    before each claim; None: the policy does not resize batches. `ahead`: the claims of later steps, and of
    the current one until it is taken from there; after_claim_ahead gets each of them when it is known, in
    the thread that learns of it. `idle`: makes each wait for a claim.
    """

    def __init__(self, store: Store, pull: Codec, *, budget: MemoryBudget | None) -> None:
        self.store = store
        self.fenced = 0
        self.pull_codec, self._budget = pull, budget
        self._uses_turns = store.policy_needs().uses_turns
        self.ahead: deque[Claim] = deque()
        self._last: Claim | None = None  # that this one has
        self._begun = self._ended = 0  # transfers
        self.after_claim_ahead: Callable[[Claim], None] = lambda _: None
        self.idle: Callable[[Callable[[], Claim]], Claim] = lambda wait: wait()
        self._transfers = Transfers()

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
                claim = self.idle(self.store.start)
                if all(other.first != claim.first for other in self.ahead):
                    self._last = claim
                return claim
            except TimedOut:
                if self._rests():
                    continue
                if self.store.status().all_joined or time.monotonic() > deadline:
                    raise

    def _rests(self) -> bool:
        """Return whether nothing is planned for this rank at present."""
        rank = self.store.rank
        return rank is not None and self.store.ranks()[rank].batch == 0

    def claim_ahead(self, count: int) -> list[Claim]:
        """With a step under way, claim up to `count` after it, as far as the policy allows. Raises Fenced."""
        claims: list[Claim] = []
        while len(claims) < count and (claim := self.store.start_ahead(self._last)) is not None:
            self._note(claim)
            claims.append(claim)
        return claims

    def _note(self, claim: Claim) -> None:
        self.ahead.append(claim)
        self._last = claim
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
        self._last = None
        self._transfers.begin_again()
        self.store.rejoin()
        if self._budget is not None:
            self._budget.forget()

    def begin_transfer(self, request: TransferRequest[PushRequest]) -> Land:
        """Begin a transfer. Over a link, also an emulated one, this sends all of it; what is returned waits
        for the reply, and writes the parameters. A store on this machine is asked only then, and tells of
        ranges of them as they arrive.

        Call what is returned in the order of the beginnings, perhaps in another thread; it raises what ended
        the transfer, save Fenced, and does not rejoin.
        """
        self._transfers.check()  # else this gradient would be taken for the one that did not leave
        try:
            turn = self._await_turn(request.push)
            most = self._budget.change() if self._budget is not None and request.ask.claims else None
            last = self._last if self._begun == self._ended else None
            ask = replace(request.ask, after=None if last is None else last.first, max_samples=most)
            finish = self.store.begin_transfer(structs.replace(request, ask=ask))
        except Fenced:
            return _fenced
        except Exception as error:
            self._transfers.fail(error)
            raise
        self._begun += 1
        return partial(self._finish, request.push, turn, finish)

    def _await_turn(self, request: PushRequest) -> list[Span]:
        """Over a link, wait until the gradient has the link for itself, where the policy has turns; the wait.

        Raises Fenced, TimedOut.
        """
        if not (self.store.servers and self._uses_turns and request.samples):
            return []
        began = time.monotonic()
        self.store.await_turn()
        return [("wait", began, time.monotonic())]

    def _finish(
        self,
        request: PushRequest,
        turn: list[Span],
        finish: FinishTransfer,
        out: Flat,
        arrived: ArrivalCallback | None,
    ) -> Landed:
        try:
            done = finish(out, arrived)
            for claim in done.claims:
                self._note(claim)
        except Fenced:
            return Transferred(fenced=True), []
        finally:
            self._ended += 1
        kind: SpanKind = "push" if request.samples and not done.skipped else "skip"
        spans = tuple((kind if name == "push" else name, a, b) for name, a, b in done.spans)
        done = structs.replace(done, spans=(*turn, *spans))
        try:
            return done, [] if done.fenced else [self.store.stage() for _ in done.claims]
        except Fenced:
            return structs.replace(done, version=None, fenced=True), []

    def pull(self, out: Flat) -> int:
        """Fetch the parameters, each chunk whole, in this worker's codec; the version."""
        return self.store.pull(out, codec=self.pull_codec)[1]


def _fenced(_out: Flat, _arrived: ArrivalCallback | None) -> Landed:
    """A transfer whose worker was fenced before its gradient left."""
    return Transferred(fenced=True), []
