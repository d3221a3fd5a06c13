"""Answer the calls of pyps.shards.verbs: at the first server, which decides, and at each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from pyps import native
from pyps.errors import (
    Fenced,
    InvalidArgument,
    LinkLost,
    NotReady,
    PushRejected,
    SegmentNotFound,
    StoreError,
)
from pyps.native.local import LocalBackend
from pyps.native.state import StateHeader
from pyps.native.values import Codec, Encoding, Layout, PushRequest, PushResult, Tag
from pyps.remote.creation import created_arrays
from pyps.remote.framing import Frames
from pyps.remote.site import Site, Whose
from pyps.remote.verbs import Arrays, Caller
from pyps.remote.wire import PROTOCOL, OpenReply, PushHeader
from pyps.shards import verbs
from pyps.shards.decisions import DecisionLog
from pyps.shards.host import ShardHost
from pyps.shards.shard import ShardStore
from pyps.shards.verbs import HANDLERS, CommitHeader, CommitReply, Following, LogEntry, LogKind
from pyps.step.transfer import Transfers, Verb
from pyps.store.codec import encode

MAX_ENTRIES_SECONDS = 1.0


class HeadSession:
    """A client's calls to the head, on its session's handle of the head's store. Not thread-safe."""

    def __init__(self, host: ShardHost, whose: Whose) -> None:
        self._host, self._whose = host, whose
        self._client: int | None = None
        self._log: DecisionLog | None = None  # that the client has entered
        self._staging: int | None = None  # handed out and not pushed
        self._transfers = Transfers()
        self._last = 0  # push that was decided, by its number
        self.unfinished: int | None = None  # the run whose shards the client makes

    def created(self) -> None:
        """The client has made a store. If that is a head, its shards follow, then `made`."""
        if self._host.is_head:
            self.unfinished = self._host.log.run

    def made(self) -> None:
        self.unfinished = None

    def close(self) -> None:
        """The session has left. A head whose shards it did not finish goes too: another client can begin."""
        run, self.unfinished = self.unfinished, None
        if run is not None:
            with contextlib.suppress(StoreError):
                self._host.remove_head(run)

    def forget(self) -> None:
        """The session leaves the store, or begins anew: what it staged will not be pushed."""
        client, self._client = self._client, None
        log, self._log = self._log, None
        self._staging, self._last = None, 0
        self._transfers.begin_again()
        if client is not None and log is not None:
            log.end(client)

    def enter(self) -> int:
        self.forget()
        self._log = self._host.log
        self._client = self._log.enter(self._whose.session)
        return self._client

    def check(self) -> None:
        """Raise LinkLost where the head that the client has entered was removed: all shards began anew."""
        if self._log is not None and self._log.closed:
            raise LinkLost("session", "all shards went back to a checkpoint, or the server is ending")

    def start(self) -> None:
        """The worker starts afresh after a failure."""
        self._transfers.begin_again()

    def abandon(self) -> None:
        """The store has taken its staging buffers back."""
        self._staging = None

    def _entered(self, seq: int) -> tuple[DecisionLog, Tag]:
        if self._client is None or self._log is None:
            raise InvalidArgument(
                "call", "found a client that has not entered; expected `enter` after `join`"
            )
        return self._log, (self._client, seq)

    def _reading(self, seq: int) -> tuple[DecisionLog, Tag]:
        """For a call without a gradient: a client that only reads, or was silent, enters by it."""
        if self._client is None or self._log is None:
            self.enter()
        return self._entered(seq)

    def drop(self, seq: int, alone: bool) -> None:
        """A server has not taken its part of a push. Later transfers fail too: they would use its claim."""
        log, tag = self._entered(seq)
        if not alone:
            error = StoreError("push", "an earlier transfer failed: a server did not take its part")
            self._transfers.fail(error)
        if seq > self._last:  # else it was decided
            self._last = seq
            log.settle(tag)

    def commit(self, store: LocalBackend, header: CommitHeader) -> CommitReply:
        """Push, claim ahead and pin, as far as the header says. Raises as Backend.begin_transfer."""
        pushes = header.push is not None and header.push.samples > 0
        log, tag = self._reading(header.seq) if header.push is None else self._entered(header.seq)
        layout = store.layout
        if pushes:
            self._check_push(tag, header)

        def push() -> PushResult | None:
            return None if header.push is None else self._pushed(store, layout, header.push, tag)

        def pin() -> int | None:
            if header.pin is None:
                return None
            small = np.empty(layout.flat_elements, np.float32)
            return log.pin(tag, header.pin, lambda: store.pull(small))

        steps: dict[Verb, Callable[[], object]] = {
            Verb.PUSH: push,
            Verb.EXCHANGE: lambda: (push(), None),
            Verb.PULL: pin,
        }
        try:
            return CommitReply(tag[0], self._transfers.run(header.ask, store, steps))
        finally:
            if pushes:
                log.settle(tag)

    def _check_push(self, tag: Tag, header: CommitHeader) -> None:
        """Raise InvalidArgument unless all shards have its parts, and nothing was decided on it yet."""
        if header.seq <= self._last:
            raise InvalidArgument("push", f"seq: found {header.seq}; expected one after {self._last}")
        self._host.check_receipts(tag, header.receipts)
        self._last = header.seq

    def _pushed(self, store: LocalBackend, layout: Layout, header: PushHeader, tag: Tag) -> PushResult:
        """Push zeros to the head: its decision is that of the whole."""
        if len(header.hyper) != layout.groups:
            found = f"hyper: found {len(header.hyper)}; expected {layout.groups}, one for each group"
            raise InvalidArgument("push", found)
        if self._staging is None:
            self._staging = store.stage(native.timeout_seconds(header.timeout))
        values = {name: getattr(header, name) for name in header.__struct_fields__}
        values |= {"encoding": Encoding(Codec.F32), "ranges": None, "tag": tag, "staging": self._staging}
        try:
            result = store.push(PushRequest(**values))
        except (Fenced, PushRejected):
            self._staging = None
            raise
        self._staging = None
        return result

    def pin_state(self, store: LocalBackend, seq: int, timeout: float) -> tuple[int, StateHeader]:
        """Pin all of one version, and what the head's state is at that version."""
        found: list[StateHeader] = []

        def read() -> int:
            found.append(store.state(timeout).header)
            return found[-1].version

        log, tag = self._reading(seq)
        log.pin(tag, LogKind.PIN_ALL, read)
        return tag[0], found[-1]


class ShardSession:
    """One session's calls, by their verbs. store: gives its handle of the head's store."""

    def __init__(
        self, host: ShardHost, site: Site, whose: Whose, store: Callable[[], LocalBackend], past: int | None
    ) -> None:
        self.head = HeadSession(host, whose)
        self._host, self._site, self._whose, self._store = host, site, whose, store
        self.past = past  # the shard whose server this is

    @property
    def caller(self) -> Caller:
        found = Caller(0) if self.past is None else Caller.SERVER
        return found | Caller.CREATOR if self.head.unfinished is not None else found

    @property
    def layout(self) -> Layout:
        return self._host.shard.layout

    def check(self) -> None:
        self.head.check()

    def created(self) -> None:
        self.head.created()

    def start(self) -> None:
        self.head.start()

    def abandon(self) -> None:
        self.head.abandon()

    def forget(self) -> None:
        self.head.forget()

    def close(self) -> None:
        self.head.close()

    @HANDLERS.plain(verbs.ENTER)
    def enter(self) -> int:
        return self.head.enter()

    @HANDLERS.plain(verbs.COMMIT)
    def commit(self, header: CommitHeader) -> CommitReply:
        return self.head.commit(self._store(), header)

    @HANDLERS.plain(verbs.MADE)
    def made(self) -> None:
        self.head.made()

    @HANDLERS.plain(verbs.DROP)
    def drop(self, seq: int, alone: bool) -> None:
        self.head.drop(seq, alone)

    @HANDLERS.plain(verbs.PIN_STATE)
    def pin_state(self, seq: int, timeout: float) -> tuple[int, StateHeader]:
        return self.head.pin_state(self._store(), seq, timeout)

    @HANDLERS.plain(verbs.FOLLOW)
    def follow(self, seal: bytes, index: int, version: int) -> Following:
        found = self._host.log.follow(seal, index, version)
        self.past = index
        self._host.note_read(index)
        return found

    @HANDLERS.plain(verbs.ENTRIES)
    def entries(self, index: int, timeout: float) -> list[LogEntry]:
        if self.past is not None:
            self._host.note_read(self.past)
        return self._host.log.entries(index, min(timeout, MAX_ENTRIES_SECONDS))

    @HANDLERS.plain(verbs.REMOVE_HEAD)
    def remove_head(self, protocol: int, name: str, run: int) -> None:
        """For a run that goes on from a checkpoint, since a shard of this one is lost."""
        self._check_caller(protocol, name)
        self._host.await_lost(run, self._site.client_timeout_seconds)
        self._host.remove_head(run)

    @HANDLERS.plain(verbs.OFFER_SHARD)
    def offer_shard(self, protocol: int, name: str, index: int) -> None:
        self._check_caller(protocol, name)
        self._host.check_place(index)

    @HANDLERS.bulk(verbs.CREATE_SHARD)
    def create_shard(
        self, numbers: Frames, protocol: int, name: str, index: int, request_bytes: int
    ) -> tuple[OpenReply, Arrays]:
        self._check_caller(protocol, name)
        self._host.create(index, *created_arrays(request_bytes, numbers))
        self._site.created(None)
        return self._opened(), ()

    @HANDLERS.plain(verbs.OPEN_SHARD)
    def open_shard(self, protocol: int, name: str, run: int, index: int) -> OpenReply:
        """Raises NotReady while there is no shard of this run that can go on, as while it is being made."""
        self._check_caller(protocol, name)
        try:
            shard = self._host.shard
        except SegmentNotFound as error:
            raise NotReady("open", error.message) from None
        if shard.fault is not None:
            raise NotReady("open", f"store {name!r}: found a shard that cannot go on: {shard.fault}")
        if shard.run != run:
            raise NotReady("open", f"store {name!r}: found a shard of another run at this server")
        if f".shard-{index}-of-" not in shard.name:
            found = f"found {shard.name!r} at address {index + 1}"
            raise InvalidArgument("open", f"{found}; expected the addresses in the order of the shards")
        return self._opened()

    def _shard_of(self, run: int) -> ShardStore:
        """Raises LinkLost where the shards began anew since the client opened them: clients have the same
        numbers again.
        """
        shard = self._host.shard
        if shard.run != run:
            raise LinkLost("session", "all shards went back to a checkpoint")
        return shard

    @HANDLERS.bulk(verbs.STAGE)
    def stage(self, numbers: Frames, run: int, tag: Tag, header: PushHeader) -> tuple[bytes, Arrays]:
        return self._shard_of(run).stage(self._whose.session, tag, header, numbers), ()

    @HANDLERS.bulk(verbs.PULL_PINNED)
    def pull_pinned(
        self, numbers: Frames, run: int, tag: Tag, codec: Codec, timeout: float
    ) -> tuple[None, Arrays]:
        shard = self._shard_of(run)
        flat, trained = shard.pinned(self._whose.session, tag, timeout).flat, shard.layout.trained_elements
        coded = (flat,) if codec is Codec.F32 else (encode(flat[:trained], codec)[0], flat[trained:])
        return None, shard.extents.held(coded, codec)

    @HANDLERS.bulk(verbs.READ_PINNED)
    def read_pinned(
        self, numbers: Frames, run: int, tag: Tag, states: int, timeout: float
    ) -> tuple[None, Arrays]:
        shard = self._shard_of(run)
        kept = shard.pinned(self._whose.session, tag, timeout)
        if kept.steps is None or states not in (0, len(kept.states)):
            raise InvalidArgument("snapshot", f"states: found {states}; expected 0 or {len(kept.states)}")
        vectors = kept.flat, *kept.states[:states]
        return None, [*(part for vector in vectors for part in shard.extents.held((vector,))), kept.steps]

    def _check_caller(self, protocol: int, name: str) -> None:
        if protocol != PROTOCOL:
            raise InvalidArgument("open", f"protocol: found {protocol}; expected {PROTOCOL}")
        if name != self._site.store:
            raise SegmentNotFound("open", f"store: found {name[:80]!r}; this server's is another")

    def _opened(self) -> OpenReply:
        """Without its tensors: the model's seal is in their names."""
        shard, site = self._host.shard, self._site
        needs = native.policy_needs(shard.layout.policy)
        timeout, params = site.client_timeout_seconds, shard.policy_params
        return OpenReply(site.server, timeout, shard.layout, (), params, needs)
