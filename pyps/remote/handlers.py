"""Handlers of a remote worker's calls (pyps.remote.wire), each session on its own handle of the store.

A worker that was silent for too long has left the store: its next call raises Fenced, and it may rejoin. An
observer that was silent goes on unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from pyps import native
from pyps.errors import (
    Busy,
    Fenced,
    InvalidArgument,
    PushRejected,
    SegmentNotFound,
    StoreError,
    StoreFull,
    SystemCallFailed,
    TimedOut,
    WaitInterrupted,
)
from pyps.native.decisions import Advice
from pyps.native.interrupt import check_waits
from pyps.native.local import LocalBackend
from pyps.native.ranges import Packer, Ranges, elements
from pyps.native.state import StateHeader
from pyps.native.transfer import Transferred, TransferRequest
from pyps.native.values import Claim, Codec, Encoding, Flat, Layout, PushRequest, PushResult, Role
from pyps.remote import verbs
from pyps.remote.bounds import AnswerRoom
from pyps.remote.creation import created_arrays
from pyps.remote.framing import Frames, Reply, check_size, from_frames
from pyps.remote.parts import Extents, sent_ranges
from pyps.remote.site import MAKER, Site, Whose
from pyps.remote.verbs import Arrays, Bulk, Caller, Handler, Handlers
from pyps.remote.wire import PROTOCOL, OpenReply, PushHeader
from pyps.step.transfer import Transfers, Verb
from pyps.store.codec import encoded_bytes, encoded_vector_bytes

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
MAX_GLOBAL_BATCH = 1 << 24  # samples of a plan that comes over the link
DESCRIPTOR_SECONDS = 2.0  # until connections that brought nothing are cut


@dataclass(frozen=True)
class Place:
    """Hold what a client was in the store before its session left; `role` is None if it had not joined."""

    role: Role | None = None
    rank: int = -1


@dataclass(frozen=True)
class Past:
    """Hold what a session was before its thread ended. in_round: the client's buffer; what its push gave."""

    place: Place | None
    wing: int | None
    in_round: tuple[int, PushResult | None] | None = None


STRANGER = Past(None, None)
HANDLERS = Handlers()


class LinkSession:
    """One participant of the store: what the handlers of its calls have in common. Not thread-safe.

    `numbers` are the frames that came with a call.
    """

    def __init__(self, site: Site, whose: Whose, past: Past = STRANGER) -> None:
        self.place = place = past.place
        self._site = site
        self._whose = whose
        self._late = place is not None and place.role not in (None, Role.OBSERVER)
        self._backend: LocalBackend | None = None
        self._staging: int | None = None  # handed out and not pushed
        self._room: AnswerRoom | None = None  # of the answer to the call under way
        self._transfers = Transfers()
        self._in_round = past.in_round  # of a push that timed out there
        self._wing = site.shards.session(site, whose, lambda: self.store, past.wing)

    def do(self, name: str, arguments: msgspec.Raw, numbers: Frames) -> Reply:
        """One call. Raises StoreError as a Backend does, or msgspec's errors for wrong arguments."""
        if (handler := self._site.handlers.get(name)) is None:
            known = ", ".join(self._site.handlers)
            raise InvalidArgument("call", f"verb: found {name[:40]!r}; expected one of {known}")
        verb = handler.verb
        values = verb.arguments.decode(arguments)
        if self._late and verb not in (verbs.REJOIN, verbs.LEAVE):
            raise self._resumed(values) or self.late(name)
        self._wing.check()
        verb.check_caller(self.caller)
        if verb.needs_store and self._backend is None:
            self._return()
        own = self if name in HANDLERS else self._wing
        if verb.back is not Bulk.NONE:
            size = _most_bytes(verb.back, own.layout)
            self._room = self._site.bounds.answers.room(self._whose.peer, size)
        return handler.answer(own, numbers, *values)

    @property
    def room(self) -> AnswerRoom:
        """Return the room of the answer to the call under way."""
        if self._room is None:
            self._room = self._site.bounds.answers.room(self._whose.peer, 0)
        return self._room

    def answered(self, size: int) -> AnswerRoom:
        """The room of the answer, which is there and as large as this."""
        room, self._room = self.room, None
        room.settle(size)
        return room

    @property
    def caller(self) -> Caller:
        """Return what this session is, for the table's `by`."""
        other = self._wing.caller
        if self._site.may_remove(self._whose.peer):
            other |= Caller.REMOVER
        if self.place is None:
            return Caller.STRANGER | other
        worker = self.place.role in (Role.WORKER, Role.NEW_WORKER)
        plans = self._site.may_plan(self._whose.peer)
        found = (Caller.WORKER if worker else Caller.OBSERVER) | other
        return found | Caller.PLANNER if plans else found

    def _plan_as(self, worker: bool) -> None:
        """The session is a worker's from now on, or none's; the store's maker plans in any case."""
        if self._site.planners is not None:
            self._site.planners.pop(self._whose.session, None)
            if worker:
                self._site.planners[self._whose.session] = self._whose.peer
        self._site.bounds.new_workers.pop(self._whose.session, None)
        if worker and self.place is not None and self.place.role is Role.NEW_WORKER:
            self._site.bounds.new_workers[self._whose.session] = self._whose.peer

    def _resumed(self, values: tuple[Any, ...]) -> WaitInterrupted | None:
        """Return what ends a push that is resumed by a late client: it counts, as one that was waited for."""
        pushed = getattr(values[0], "push", None) if values else None
        staging, result = self._in_round or (0, None)
        if result is None or not isinstance(pushed, PushHeader) or pushed.staging != staging:
            return None
        error, self._in_round = WaitInterrupted("push", "the session has ended"), None
        error.staged = result
        return error

    def late(self, verb: str) -> StoreError:
        """The error of a call that a silent client's end interrupted: a worker has to rejoin."""
        silence = f"nothing was heard of this client for {self._site.client_timeout_seconds:g} s"
        if self.place is not None and self.place.role in (Role.WORKER, Role.NEW_WORKER):
            return Fenced(verb, f"{silence}: its samples went back")
        return TimedOut(verb, silence)

    def close(self) -> None:
        """Leave the store; the place is remembered. Idempotent."""
        self._wing.forget()
        backend, self._backend = self._backend, None
        self._staging = self._in_round = None
        if backend is not None:
            backend.close()
        self._plan_as(worker=False)
        self._wing.close()

    @property
    def past(self) -> Past:
        """For the session's next thread."""
        return Past(self.place, self._wing.past, self._in_round)

    @property
    def store(self) -> LocalBackend:
        if self._backend is None:
            raise InvalidArgument("call", "found no store open; expected `hello` first")
        return self._backend

    @property
    def layout(self) -> Layout:
        return self.store.layout

    def _return(self) -> None:
        """After the session left: open the store again, and give an observer its place."""
        self._backend = self._open()
        if self.place is not None and self.place.role is Role.OBSERVER:
            self._backend.join(Role.OBSERVER, -1)

    def _check_caller(self, protocol: int, name: str) -> None:
        if protocol != PROTOCOL:
            raise InvalidArgument("hello", f"protocol: found {protocol}; expected {PROTOCOL}")
        if name != self._site.store:
            raise SegmentNotFound("hello", f"store: found {name[:80]!r}; this server's is another")
        if self._backend is not None:
            raise InvalidArgument("hello", "found a second one; expected one for each session")

    @HANDLERS.plain(verbs.HELLO)
    def hello(self, protocol: int, name: str) -> OpenReply:
        self._check_caller(protocol, name)
        self._backend = self._open()
        self.place = Place()
        return self._opened()

    def _open(self) -> LocalBackend:
        """The store. Where strangers hold all descriptors, wait until their connections are cut."""
        deadline = time.monotonic() + DESCRIPTOR_SECONDS
        while True:
            try:
                return LocalBackend.open(self._site.store)
            except SystemCallFailed as error:
                if os.strerror(errno.EMFILE) not in error.message:
                    raise
            if time.monotonic() > deadline:
                raise Busy("session", "the server has no descriptor left; serve with a larger `ulimit -n`")
            check_waits()
            time.sleep(0.01)

    @HANDLERS.bulk(verbs.CREATE)
    def create(
        self, numbers: Frames, protocol: int, name: str, request_bytes: int
    ) -> tuple[OpenReply, Arrays]:
        self._check_caller(protocol, name)
        self._backend = LocalBackend.create(name, *created_arrays(request_bytes, numbers))
        self.place = Place()
        if self._site.planners is not None:
            self._site.planners[MAKER] = self._whose.peer
        self._site.created(LocalBackend.open(name))  # stays open as long as the server is
        self._site.shards.created()
        self._wing.created()
        return self._opened(), ()

    def _opened(self) -> OpenReply:
        self._site.opened(self.layout)
        site, store = self._site, self.store
        timeout, params = site.client_timeout_seconds, store.policy_params
        return OpenReply(site.server, timeout, store.layout, store.tensors, params, store.policy_needs)

    @HANDLERS.plain(verbs.JOIN)
    def join(self, role: Role, rank: int) -> int:
        """Join, waiting for a rank whose worker has died until its silence was noticed."""
        deadline = time.monotonic() + 1.5 * self._site.client_timeout_seconds
        ranks = self._ranks_for(role, rank)
        while True:
            sequence = self.store.status().sequence
            try:
                got = self._joined(role, ranks)
                break
            except Busy:
                if (left := deadline - time.monotonic()) <= 0.0:
                    raise
                with contextlib.suppress(TimedOut):
                    self.store.wait(sequence, left)
        self.place, self._staging, self._in_round = Place(role, got), None, None
        self._plan_as(worker=role is not Role.OBSERVER)
        return got

    def _ranks_for(self, role: Role, rank: int) -> tuple[int, ...]:
        """The ranks to try, in this order; -1: any. Raises InvalidArgument for one that is another key's."""
        bound = self._site.ranks_of(self._whose.peer)
        if role is Role.OBSERVER or bound is None or rank in bound:
            return (rank,)
        if rank >= 0 or role is Role.NEW_WORKER or not bound:
            found = "a rank beyond the plan" if rank < 0 else str(rank)
            expected = f"one of {', '.join(map(str, bound)) or 'none'}, to which {self._whose.peer} is bound"
            raise InvalidArgument("join", f"rank: found {found}; expected {expected}")
        return bound

    def _joined(self, role: Role, ranks: tuple[int, ...]) -> int:
        """Join as the first of these ranks that is free."""
        if role is Role.NEW_WORKER:
            self._site.bounds.check_new_worker(self.store, self._whose.peer)
        for rank in ranks[:-1]:
            with contextlib.suppress(Busy):
                return self.store.join(role, rank)
        return self.store.join(role, ranks[-1])

    @HANDLERS.plain(verbs.LEAVE)
    def leave(self) -> None:
        self._wing.forget()
        if self._backend is not None:
            self._backend.leave()
        self.place, self._late, self._staging = Place(), False, None
        self._plan_as(worker=False)

    @HANDLERS.plain(verbs.REJOIN)
    def rejoin(self) -> None:
        if not self._late:
            self.store.rejoin()
        elif self.place is not None and self.place.role is not None:
            backend = self._open()
            try:
                backend.join(self.place.role, self.place.rank)
            except BaseException:
                backend.close()
                raise
            self._backend, self._late = backend, False
            self._plan_as(worker=self.place.role is not Role.OBSERVER)
        self._staging = self._in_round = None
        self._transfers.begin_again()
        self._wing.forget()

    @HANDLERS.plain(verbs.START)
    def start(self, timeout: float) -> Claim:
        self._transfers.begin_again()
        self._wing.start()
        claim = self.store.start(timeout)
        if self._in_round is not None:  # the store has given that push up
            self._staging = self._in_round = None
        return claim

    @HANDLERS.bulk(verbs.PULL)
    def pull(self, numbers: Frames, codec: Codec, ranges: int | None) -> tuple[int, Arrays]:
        if ranges is not None:
            parts, out = self._sent_ranges("pull", numbers, ranges, codec)
            return self.store.pull(out, parts), (out,)
        check_size("pull", numbers, 0)
        if codec is Codec.F32:
            vector = self.room.take(np.float32, self.layout.flat_elements)
            version = self.store.pull(vector)
        else:
            vector = self.room.take(np.uint8, encoded_vector_bytes(codec, self.layout))
            version = self.store.pull_encoded(codec, vector)
        return version, self._extents.held((vector,), codec)

    @HANDLERS.bulk(verbs.READ)
    def read(self, numbers: Frames, ranges: int, timeout: float) -> tuple[int, Arrays]:
        parts, out = self._sent_ranges("read", numbers, ranges)
        return self.store.read(Packer(parts, out), parts, timeout), (out,)

    def _sent_ranges(
        self, what: str, numbers: Frames, count: int, codec: Codec = Codec.F32
    ) -> tuple[Ranges, Flat]:
        """The ranges that came, and memory for what they hold."""
        parts, rest = sent_ranges(what, count, numbers, self.layout.flat_elements, codec)
        check_size(what, rest, 0)
        size = elements(what, parts, self.layout.flat_elements)
        return parts, self.room.take(np.float32, size)

    @cached_property
    def _extents(self) -> Extents:
        return Extents.of(self.store.tensors, self.layout)

    @HANDLERS.bulk(verbs.TRANSFER)
    def transfer(self, numbers: Frames, request: TransferRequest[PushHeader]) -> tuple[Transferred, Arrays]:
        """Push, claim ahead and pull, as pyps.step.transfer has it."""
        skip, codec = msgspec.structs.replace(request.push, samples=0), request.codec
        arrays: Arrays = ()

        def push() -> PushResult:
            return self._pushed(request.push, numbers, self.store.push)

        def exchange() -> tuple[PushResult, int | None]:
            nonlocal arrays
            if codec is not Codec.F32:
                return push(), None
            flat = self.room.take(np.float32, self.layout.flat_elements)
            found = self._pushed(request.push, numbers, lambda push: self.store.exchange(push, flat))
            arrays = self._extents.held((flat,))
            return found

        def pull() -> int:
            nonlocal arrays
            version, arrays = self.pull((), codec, None)
            return version

        done = self._transfers.run(
            request.ask,
            self.store,
            {
                Verb.PUSH: push,
                Verb.EXCHANGE: exchange,
                Verb.SKIP: lambda: self._pushed(skip, (), self.store.push),
                Verb.PULL: pull,
            },
        )
        return done, () if done.version is None else arrays

    def _pushed(self, header: PushHeader, numbers: Frames, send: Callable[[PushRequest], T]) -> T:
        """Copy the gradient to a staging buffer and push it, or resume a push that waits in an open round."""
        if self._site.shards.is_head:
            raise InvalidArgument(
                "push", "found a model over several servers; expected its parts and a commit"
            )
        if len(header.hyper) != self.layout.groups:
            found = f"hyper: found {len(header.hyper)}; expected {self.layout.groups}, one for each group"
            raise InvalidArgument("push", found)
        if self._in_round is not None and header.staging != self._in_round[0]:
            expected = f"expected {self._in_round[0]}, whose round an earlier push waited for"
            raise InvalidArgument("push", f"staging: found {header.staging}; {expected}")
        if self._staging is None:
            self._staging = self.store.stage(native.timeout_seconds(header.timeout))
        codec = header.encoding.codec if header.samples else Codec.F32
        fields = {name: getattr(header, name) for name in header.__struct_fields__}
        fields |= {"encoding": Encoding(codec, nonfinite=header.encoding.nonfinite), "ranges": None}
        brings = header.samples and self._in_round is None  # else its gradient is there
        if brings and header.ranges is not None:
            fields |= self._of_ranges(header.ranges, codec, numbers)
        elif brings:
            self._fill(self._staging, codec, numbers)
        request = PushRequest(**fields | {"staging": self._staging}, encoded=codec is not Codec.F32)
        try:
            result = send(request)
        except (TimedOut, StoreFull) as error:
            raise self._not_ended(error, header.staging, self._staging) from None
        except (Fenced, PushRejected):
            self._staging = self._in_round = None
            raise
        self._staging = self._in_round = None
        return result

    def _not_ended(self, error: StoreError, theirs: int, staging: int) -> StoreError:
        """The error of a push that did not end; of `stage` if it is not in its round. theirs: its buffer."""
        waits = self.store.policy_needs.waits_for_rounds
        with contextlib.suppress(InvalidArgument):  # it waits there; or it was taken, where none wait
            self.store.unstage(staging)
            error, waits = type(error)("stage", error.message) if waits else error, False  # it comes again
        known = getattr(error, "staged", None)
        self._staging, self._in_round = (staging, (theirs, known)) if waits else (None, None)
        return error

    def _of_ranges(self, count: int, codec: Codec, numbers: Frames) -> dict[str, Any]:
        """The fields of a push whose gradient is of ranges."""
        parts, rest = sent_ranges("push", count, numbers, self.layout.flat_elements, codec)
        gradient = np.empty(elements("push", parts, self.layout.flat_elements), np.float32)
        from_frames("push", rest, gradient)
        return {"ranges": parts, "gradient": gradient}

    def _fill(self, staging: int, codec: Codec, numbers: Frames) -> None:
        flat, trained = self.store.staging(staging), self.layout.trained_elements
        if codec is Codec.F32:
            self._extents.fill("push", numbers, (flat,))
        else:
            codes = self.store.staging_codes(staging, encoded_bytes(codec, trained))
            self._extents.fill("push", numbers, (codes, flat[trained:]), codec=codec)

    @HANDLERS.plain(verbs.SHOULD_CONTINUE)
    def should_continue(self, done: int, following: int) -> Advice:
        advice = self.store.should_continue(done, following)
        if advice is Advice.ABORT:  # the store has taken its staging buffers back
            self._staging = self._in_round = None
            self._wing.abandon()
        return advice

    @HANDLERS.plain(verbs.REPLAN)
    def replan(self, batches: Sequence[int], plan: int | None) -> None:
        if (total := sum(batches)) > MAX_GLOBAL_BATCH:
            found = f"{total} samples in all; expected at most {MAX_GLOBAL_BATCH}"
            raise InvalidArgument("replan", f"batches: found {found}")
        self.store.replan(batches, plan)

    @HANDLERS.bulk(verbs.SNAPSHOT)
    def snapshot(self, numbers: Frames, states: int, timeout: float) -> tuple[int, Arrays]:
        layout = self.layout
        if states not in (0, layout.states):
            raise InvalidArgument("snapshot", f"states: found {states}; expected 0 or {layout.states}")
        vectors = [self.room.take(np.float32, layout.flat_elements) for _ in range(1 + states)]
        steps = self.room.take(np.float64, layout.chunks)
        version = self.store.snapshot(vectors[0], vectors[1:], steps, timeout)
        return version, [*(part for vector in vectors for part in self._extents.held((vector,))), steps]

    @HANDLERS.bulk(verbs.STATE)
    def state(self, numbers: Frames, timeout: float) -> tuple[tuple[StateHeader, tuple[int, ...]], Arrays]:
        found = self.store.state_in(timeout, partial(self.room.take, np.float32))
        vectors = found.parameters, *found.vectors, *found.residuals.values()
        held = [part for vector in vectors for part in self._extents.held((vector,))]
        return (found.header, tuple(found.residuals)), held


def _most_bytes(back: Bulk, layout: Layout) -> int:
    """Return how many bytes an answer may have; residuals of later ranks count once they are there."""
    more = {Bulk.GRADIENT: 0, Bulk.STORE: layout.states, Bulk.STATE: layout.states + layout.ranks}
    return 4 * (1 + more[back]) * layout.flat_elements + 8 * layout.chunks


def _of_store(name: str) -> Callable[..., tuple[Any, Arrays]]:
    """Return what a session's store does by itself, as pyps.store.backend.Backend has it."""
    return lambda session, numbers, *arguments: (getattr(session.store, name)(*arguments), ())


for _verb in (
    *(verbs.REAP, verbs.START_AHEAD, verbs.AWAIT_TURN, verbs.SET_MAX_SAMPLES, verbs.SET_DATA_SET),
    *(verbs.SET_COST_MODEL, verbs.STATUS, verbs.MEMBERS, verbs.RANKS, verbs.COSTS, verbs.HYPER, verbs.WAIT),
    verbs.SET_SCHEDULE,
):
    HANDLERS[_verb.name] = Handler(_verb, _of_store(_verb.name))
