"""Handlers of the calls that only a model over several servers has (pyps.remote.shards).

To the first server, which decides: made, enter, commit, drop, pin_state; the other servers follow its log.
To each server: its part of a gradient, before the push is committed; its part of a version that was pinned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields

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
from pyps.native.values import (
    Codec,
    Config,
    Encoding,
    Layout,
    PolicyParams,
    PushRequest,
    PushResult,
    Tag,
)
from pyps.remote.creation import created_arrays
from pyps.remote.decisions import DecisionLog
from pyps.remote.framing import Frames, Reply
from pyps.remote.shard_host import ShardHost
from pyps.remote.shard_store import ShardStore
from pyps.remote.site import Site
from pyps.remote.wire import PROTOCOL, CommitHeader, LogKind, OpenReply, PushHeader, TransferReply
from pyps.step.transfer import Ask, Transfers, Verb
from pyps.store.codec import encode

MAX_ENTRIES_SECONDS = 1.0
WITHOUT_HEAD = (  # on a session that has not opened the head
    "follow",
    "entries",
    "remove_head",
    "offer_shard",
    "create_shard",
    "open_shard",
    "stage",
    "pull_pinned",
    "read_pinned",
)
VERBS_OF_SHARDS = ("enter", "commit", "drop", "made", "pin_state", *WITHOUT_HEAD)


class HeadSession:
    """A client's calls to the head, on its session's handle of the head's store. Not thread-safe."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._client: int | None = None
        self._log: DecisionLog | None = None  # that the client has entered
        self._staging: int | None = None  # handed out and not pushed
        self._transfers = Transfers()
        self._unfinished: int | None = None  # the run whose shards the client makes

    def created(self) -> None:
        """The client has made a store. If that is a head, its shards follow, then `made`."""
        if self._host.has_log:
            self._unfinished = self._host.log.run

    def made(self) -> None:
        self._unfinished = None

    def close(self) -> None:
        """The session has left. A head whose shards it did not finish goes too: another client can begin."""
        run, self._unfinished = self._unfinished, None
        if run is not None:
            with contextlib.suppress(StoreError):
                self._host.remove_head(run)

    def forget(self) -> None:
        """The session leaves the store, or begins anew: what it staged will not be pushed."""
        client, self._client = self._client, None
        log, self._log = self._log, None
        self._staging = None
        self._transfers.begin_again()
        if client is not None and log is not None:
            log.end(client)

    def enter(self) -> int:
        self.forget()
        self._log = self._host.log
        self._client = self._log.enter()
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

    def drop(self, seq: int, transfer: bool) -> None:
        """A server has not taken its part of a push. Later transfers fail too: they would use its claim."""
        log, tag = self._entered(seq)
        if transfer:
            error = StoreError("push", "an earlier transfer failed: a server did not take its part")
            self._transfers.fail(error)
        log.settle(tag)

    def commit(self, store: LocalBackend, header: CommitHeader) -> TransferReply:
        """Push, claim ahead and pin, as far as the header says. Raises as Store.push."""
        log, tag = self._entered(header.seq)
        layout = store.layout

        def limit() -> None:
            if header.max_samples is not None:
                store.set_max_samples(header.max_samples)

        def push() -> PushResult | None:
            return None if header.push is None else self._pushed(store, layout, header.push, tag)

        def pin() -> int | None:
            if header.pin is None:
                return None
            small = np.empty(layout.flat_elements, np.float32)
            return log.pin(tag, header.pin, lambda: store.pull(small))

        verbs: dict[Verb, Callable[[], object]] = {
            Verb.LIMIT: limit,
            Verb.PUSH: push,
            Verb.EXCHANGE: lambda: (push(), None),
            Verb.CLAIM: lambda: claim if (claim := store.start_ahead()).count else None,
            Verb.PULL: pin,
        }
        try:
            if header.transfer:
                done = self._transfers.run(Ask(header.exchange, header.claims), verbs)
                return TransferReply(done.result, done.claims, done.pulled, done.push_seconds)
            result = push()
            try:
                return TransferReply(result, (), pin(), 0.0)
            except Fenced:
                if result is None:
                    raise
                return TransferReply(result, (), None, 0.0)
        finally:
            if header.push is not None and header.push.samples:
                log.settle(tag)

    def _pushed(self, store: LocalBackend, layout: Layout, header: PushHeader, tag: Tag) -> PushResult:
        """Push zeros to the head: its decision is that of the whole."""
        if len(header.hyper) != layout.groups:
            found = f"hyper: found {len(header.hyper)}; expected {layout.groups}, one for each group"
            raise InvalidArgument("push", found)
        if self._staging is None:
            self._staging = store.stage(native.timeout_seconds(header.timeout))
        values = {name: getattr(header, name) for name in header.__struct_fields__}
        values |= {"encoding": Encoding(Codec.F32), "ranges": None, "tag": tag}
        try:
            result = store.push(PushRequest(self._staging, **values))
        except (Fenced, PushRejected):
            self._staging = None
            raise
        self._staging = None
        return result

    def pin_state(self, store: LocalBackend, seq: int, timeout: float) -> StateHeader:
        """Pin all of one version, and what the head's state is at that version."""
        found: list[StateHeader] = []

        def read() -> int:
            found.append(store.state(timeout).header)
            return found[-1].version

        log, tag = self._entered(seq)
        log.pin(tag, LogKind.PIN_ALL, read)
        return found[-1]


class ShardCalls:
    """The calls by their names on the link, of one session. store: gives its handle of the head's store."""

    def __init__(self, site: Site, store: Callable[[], LocalBackend]) -> None:
        self.head = HeadSession(site.shards)
        self._site, self._store = site, store

    def enter(self) -> Reply:
        return self.head.enter(), ()

    def commit(self, header: CommitHeader) -> Reply:
        return self.head.commit(self._store(), header), ()

    def made(self) -> Reply:
        self.head.made()
        return None, ()

    def drop(self, seq: int, transfer: bool) -> Reply:
        self.head.drop(seq, transfer)
        return None, ()

    def pin_state(self, seq: int, timeout: float) -> Reply:
        return self.head.pin_state(self._store(), seq, timeout), ()

    def follow(self, run: int, version: int) -> Reply:
        return self._site.shards.log.follow(run, version), ()

    def entries(self, index: int, timeout: float) -> Reply:
        return self._site.shards.log.entries(index, min(timeout, MAX_ENTRIES_SECONDS)), ()

    def remove_head(self, protocol: int, name: str, run: int) -> Reply:
        """For a run that goes on from a checkpoint, since a shard of this one is lost."""
        self._check_caller(protocol, name)
        self._site.shards.remove_head(run)
        return None, ()

    def offer_shard(self, protocol: int, name: str, index: int) -> Reply:
        """Raises what `create_shard` would, as far as it is known before."""
        self._check_caller(protocol, name)
        self._site.shards.check_place(index)
        return None, ()

    def create_shard(
        self, protocol: int, name: str, index: int, request_bytes: int, numbers: Frames
    ) -> Reply:
        self._check_caller(protocol, name)
        request, initial, state = created_arrays(request_bytes, numbers)
        options = {f.name: getattr(request, f.name) for f in fields(Config) if f.name != "initial"}
        self._site.shards.create(index, Config(initial=initial, **options), state)
        self._site.created()
        return self._opened()

    def open_shard(self, protocol: int, name: str, run: int, index: int) -> Reply:
        """Raises NotReady while there is no shard of this run that can go on, as while it is being made."""
        self._check_caller(protocol, name)
        try:
            shard = self._site.shards.shard
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
        shard = self._site.shards.shard
        if shard.run != run:
            raise LinkLost("session", "all shards went back to a checkpoint")
        return shard

    def stage(self, run: int, tag: Tag, header: PushHeader, numbers: Frames) -> Reply:
        self._shard_of(run).stage(tag, header, numbers)
        return None, ()

    def pull_pinned(self, run: int, tag: Tag, codec: Codec, timeout: float) -> Reply:
        shard = self._shard_of(run)
        flat = shard.pinned(tag, timeout).flat
        if codec is Codec.F32:
            return None, (flat,)
        trained = shard.layout.trained_elements
        codes, _ = encode(flat[:trained], codec)
        return None, (codes, flat[trained:])

    def read_pinned(self, run: int, tag: Tag, states: int, timeout: float) -> Reply:
        kept = self._shard_of(run).pinned(tag, timeout)
        if kept.steps is None or states not in (0, len(kept.states)):
            raise InvalidArgument("snapshot", f"states: found {states}; expected 0 or {len(kept.states)}")
        return None, (kept.flat, *kept.states[:states], kept.steps)

    def _check_caller(self, protocol: int, name: str) -> None:
        if protocol != PROTOCOL:
            raise InvalidArgument("open", f"protocol: found {protocol}; expected {PROTOCOL}")
        if name != self._site.store:
            raise SegmentNotFound("open", f"store: found {name[:80]!r}; this server's is another")

    def _opened(self) -> Reply:
        shard, site = self._site.shards.shard, self._site
        return OpenReply(
            site.server, site.client_timeout_seconds, shard.layout, shard.tensors, PolicyParams()
        ), ()
