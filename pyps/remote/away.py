"""Define what a store behind a link has in its client: calls that one server answers, gradients that leave.

Staging buffers are this process's own memory. What is encoded is encoded here, and what the code does not
carry (error feedback) is kept here too, for this process's next gradient: another process that inherits the
rank begins without it, unless it is given to it (keep_residual).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyps import native
from pyps.errors import InvalidArgument, NotFinite, PushRejected, StoreError, StoreFull, TimedOut
from pyps.formats.records import Span
from pyps.native.decisions import Advice
from pyps.native.transfer import ArrivalCallback, Transferred, TransferRequest, skipping
from pyps.native.values import Claim, Codec, EncodeCounts, Encoding, Flat, PushRequest, PushResult, Role
from pyps.remote import verbs
from pyps.remote.address import Address
from pyps.remote.client import Client
from pyps.remote.parts import Coded, Extents
from pyps.remote.verbs import call
from pyps.remote.wire import OpenReply, PushHeader
from pyps.store.backend import MAX_CALL_SECONDS
from pyps.store.codec import Residual, encode

NO_COUNTS = EncodeCounts(0, 0)
T = TypeVar("T")


class Outgoing(NamedTuple):
    """A transfer under way: its push, the codec of what comes back, what was not finite, and when it left.
    skipped: the push has taken the place of one that is not finite.
    """

    push: PushRequest
    codec: Codec
    counts: EncodeCounts
    began: float
    skipped: bool


class Away:
    """The part of a Backend that is alike over one server and over several; `client` is at the one that
    decides. Not thread-safe, but one thread may begin transfers while another finishes them.
    """

    undone = 0

    def __init__(self, address: Address, client: Client, opened: OpenReply) -> None:
        self.address, self.client, self.tensors = address, client, opened.tensors
        self.layout, self.policy_params = opened.layout, opened.policy_params
        self.policy_needs = opened.policy_needs
        client.set_server(opened.server, opened.client_timeout_seconds)
        trained = opened.layout.trained_elements
        self._extents = Extents.of(opened.tensors, opened.layout)
        self._joined = False
        self._staging_buffers: dict[int, Flat] = {}
        self._staging_taken: set[int] = set()
        self._in_round: int | None = None  # that of a push that timed out in its round
        self._counts = NO_COUNTS  # of the last push
        self._interrupted = False  # or of one whose reply is not waited for: its server goes on with it
        self._residual: Residual[Flat] = Residual(lambda: np.empty(trained, np.float32))
        self._keep_residual: Callable[[int, Flat], None] | None = None
        self._compute_began = time.monotonic()  # when the last claim or pull had come

    reap = call(verbs.REAP)
    start_ahead = call(verbs.START_AHEAD)
    set_max_samples = call(verbs.SET_MAX_SAMPLES)
    set_data_set = call(verbs.SET_DATA_SET)
    set_cost_model = call(verbs.SET_COST_MODEL)
    status = call(verbs.STATUS)
    members = call(verbs.MEMBERS)
    ranks = call(verbs.RANKS)
    costs = call(verbs.COSTS)
    hyper = call(verbs.HYPER)
    set_schedule = call(verbs.SET_SCHEDULE)

    def close(self) -> None:
        """Leave and hang up."""
        with suppress(StoreError):
            if self._joined:
                self.leave()
        self.client.close()

    def join(self, role: Role, rank: int) -> int:
        self._forget_staging()
        got = self.client.call(verbs.JOIN(role, rank))
        self._joined = True
        return got

    def leave(self) -> None:
        self._joined = False
        self.client.call(verbs.LEAVE())

    def rejoin(self) -> None:
        self.client.call(verbs.REJOIN())
        self._forget_staging()

    def start(self, timeout: float) -> Claim:
        claim = self.client.call(verbs.START(bounded(timeout)))
        self._give_up_round()
        self._compute_began = time.monotonic()
        return claim

    def should_continue(self, done: int, following: int) -> Advice:
        advice = self.client.call(verbs.SHOULD_CONTINUE(done, following))
        if advice is Advice.ABORT:
            self._forget_staging()
        return advice

    def await_turn(self, timeout: float) -> None:
        began = time.monotonic()
        try:
            self.client.call(verbs.AWAIT_TURN(bounded(timeout)))
        finally:
            self._compute_began += time.monotonic() - began  # a wait is no computing

    def wait(self, sequence: int, timeout: float) -> None:
        self.client.call(verbs.WAIT(sequence, bounded(timeout)))

    def replan(self, batches: Sequence[int], plan: int | None) -> None:
        self.client.call(verbs.REPLAN(tuple(native.u32_array("replan", "batches", batches)), plan))

    def journal(self, path: str | None) -> None:
        raise InvalidArgument("journal", f"{path}: the store is elsewhere, and so is its journal")

    def stage(self, timeout: float) -> int:
        """A staging buffer that no step has: it is free again when the reply to its push has come."""
        count = self.layout.staging_buffers
        for staging in range(count):
            if staging not in self._staging_taken:
                self._staging_taken.add(staging)
                return staging
        raise InvalidArgument("stage", f"all {count} staging buffers are in use; push one first")

    def unstage(self, staging: int) -> None:
        waits = staging == self._in_round  # until the next start it is the round's
        if staging not in self._staging_taken or waits:
            expected = "one that stage() returned" + ", and that waits in no round" * waits
            raise InvalidArgument("unstage", f"staging: found {staging}; expected {expected}")
        self._staging_taken.discard(staging)

    def _give_up_round(self) -> None:
        """No call waits any more for the round of a push that timed out there: it counts when that closes."""
        if self._in_round is not None:
            self._residual.commit(admitted=True)
            self._staging_taken.discard(self._in_round)
            self._in_round, self._interrupted = None, False

    def _forget_staging(self) -> None:
        """The store has taken all staging buffers back."""
        self._staging_taken.clear()
        self._give_up_round()

    def staging(self, staging: int) -> Flat:
        flat = self._staging_buffers.get(staging)
        if flat is None:
            flat = self._staging_buffers[staging] = np.zeros(self.layout.flat_elements, np.float32)
        return flat[:]  # a later holder of the staging buffer gets one that may be written again

    def keep_residual(self, start: Flat | None, keep: Callable[[int, Flat], None]) -> None:
        trained = self.layout.trained_elements
        if start is not None and start.shape != (trained,):
            found = f"{list(start.shape)}; expected [{trained}]"
            raise InvalidArgument("residual", f"shape: found {found}")
        self._residual.begin_with(start)
        self._keep_residual = keep

    @property
    def _waits_for_rounds(self) -> bool:
        return self.policy_needs.waits_for_rounds

    def _check_staged(self, staging: int) -> None:
        """Raise InvalidArgument, as the core does, for a buffer that no push may have now."""
        if staging in self._staging_taken and self._in_round in (None, staging) and not self._interrupted:
            return
        expected = "one that stage() returned"
        if self._interrupted:
            expected = f"none before start(): the push of {self._in_round} was interrupted, and may count"
        elif staging in self._staging_taken:
            expected = f"{self._in_round}, whose round an earlier push waited for"
        raise InvalidArgument("push", f"staging: found {staging}; expected {expected}")

    def _ended(self, request: PushRequest, admitted: bool) -> None:
        """Its reply has come, and it is neither to be waited for nor to be pushed again."""
        resumed = self._in_round == request.staging  # it was encoded, if at all, by the call that timed out
        if resumed or _keeps_residual(request):
            self._residual.commit(admitted)
        if resumed:
            self._in_round = None
        self._staging_taken.discard(request.staging)

    def _not_ended(self, request: PushRequest, error: BaseException, began: float) -> None:
        """A push, or a transfer with it, has raised this. began: by the monotonic clock.

        What becomes of one that waits in a round is known when the next step starts, or it is pushed again.
        """
        if self._in_round not in (None, request.staging):  # it was sent behind that one, and fails alike
            if _keeps_residual(request):
                self._residual.cancel()
        elif not isinstance(
            error, StoreError
        ):  # a signal's handler raised it, while the reply was waited for
            self._in_round, self._interrupted = request.staging, True
        elif isinstance(error, TimedOut | StoreFull) and error.what != "stage" and self._waits_for_rounds:
            self._in_round = request.staging
        elif self._in_round is None:
            if _keeps_residual(request):
                self._residual.commit(admitted=False)
            if isinstance(error, PushRejected):
                self._staging_taken.discard(request.staging)
            if isinstance(error, TimedOut):  # it waited for its turn
                self._compute_began += time.monotonic() - began

    def _sendable(
        self, request: TransferRequest[PushRequest], send: Callable[[PushRequest], T]
    ) -> tuple[PushRequest, T]:
        """The push, and what `send` makes of it; a step that is not finite is skipped, unless it is alone."""
        try:
            return request.push, send(request.push)
        except NotFinite:
            if request.ask.alone:
                raise
            skip = skipping(request.push)
            return skip, send(skip)

    def _finished(
        self, sent: Outgoing, reply: Transferred, pushed: float, out: Flat, arrived: ArrivalCallback | None
    ) -> Transferred:
        """A transfer of which all has come, by this time. pushed: seconds of the monotonic clock."""
        self._compute_began = time.monotonic()
        spans = spans_of(sent.began, pushed, self._compute_began, reply.result)
        skipped = sent.skipped or reply.skipped
        result, counts = None if skipped else reply.result, sent.counts
        if result is not None:  # what was not finite was found where the gradient was encoded
            result = replace(result, nonfinite=counts.nonfinite, blocks_skipped=counts.blocks_skipped)
        if reply.version is not None and arrived is not None:
            arrived(0, out.size)
        rejected = reply.rejected and not skipped
        return msgspec.structs.replace(reply, result=result, rejected=rejected, skipped=skipped, spans=spans)

    def _header(self, request: PushRequest) -> PushHeader:
        """Say what precedes a push. Before it is encoded, which is no computing. Raises InvalidArgument."""
        scale = 1.0 if _is_encoded_here(request) else request.scale  # the codes are of the scaled gradient
        timeout = None if request.timeout is None else bounded(native.timeout_seconds(request.timeout))
        how = Encoding(request.encoding.codec, nonfinite=request.encoding.nonfinite)
        seconds = request.compute_seconds or time.monotonic() - self._compute_began
        return PushHeader.of(
            replace(request, scale=scale, timeout=timeout, encoding=how, compute_seconds=seconds)
        )

    def _encode(self, values: Flat, request: PushRequest) -> tuple[NDArray[np.uint8], EncodeCounts]:
        """Codes of a gradient, with the residual if errors are fed back. Raises NotFinite."""
        how = request.encoding
        old, new = self._residual.begin() if how.error_feedback else (None, None)
        try:
            found = encode(values, how, scale=request.scale, residual=old, residual_out=new)
        except BaseException:
            if how.error_feedback:
                self._residual.cancel()
            raise
        if new is not None and self._keep_residual is not None:
            self._keep_residual(request.staging, new)
        return found

    def _vector(self, request: PushRequest) -> tuple[Coded, EncodeCounts]:
        """Return the gradient as its codec has it, zero where no value lies, and what was not finite.

        Raises NotFinite.
        """
        given, codec, trained = request.gradient, request.encoding.codec, self.layout.trained_elements
        values: Any = self.staging(request.staging) if given is None or request.encoded else given
        if codec is Codec.F32 and not request.encoded:
            check_finite(request, *(part.view(np.float32) for part in self._extents.held((values,))))
            return (values,), NO_COUNTS
        values = values if given is None or request.encoded else given.copy()
        self._extents.blank((values,))  # a code's block may reach there
        check_finite(request, values[trained:])  # the averaged ones
        if request.encoded and given is not None:
            return (given, values[trained:]), NO_COUNTS
        codes, counts = self._encode(values[:trained], request)
        return (codes, values[trained:]), counts


def _is_encoded_here(request: PushRequest) -> bool:
    given = request.encoded and request.gradient is not None
    return request.samples > 0 and not given and request.encoding.codec is not Codec.F32


def _keeps_residual(request: PushRequest) -> bool:
    return _is_encoded_here(request) and request.encoding.error_feedback


def spans_of(began: float, pushed: float, pulled: float, result: PushResult | None) -> tuple[Span, ...]:
    """Return the spans of a transfer over a link, of which the push ended with its wait for others.

    began, pushed, pulled: seconds of the monotonic clock. result: of the push; None: rejected.
    """
    waited = min(result.wait_seconds, pushed - began) if result is not None else 0.0
    arrived = pushed - waited
    waits: list[Span] = [("wait", arrived, pushed)] if waited > 0.0 else []
    return ("push", began, arrived), *waits, ("pull", pushed, pulled)


def check_finite(request: PushRequest, *values: NDArray[Any]) -> None:
    """Raise NotFinite for values that a push in fp32 may not have."""
    if request.encoding.nonfinite == "error" and not all(np.isfinite(part).all() for part in values):
        raise NotFinite("push", "the gradient has a value that is not finite")


def bounded(timeout: float) -> float:
    """A timeout that a server accepts."""
    return min(timeout, MAX_CALL_SECONDS)
