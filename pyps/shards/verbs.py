"""The calls that only a model over several servers has, and what they carry (pyps.remote.verbs).

The client has the first server decide (enter, commit, drop, made, pin_state), and gives every server its part
of a gradient (stage) and takes its part of a pinned version. The other servers follow the first one's log.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

import msgspec

from pyps.native.state import StateHeader
from pyps.native.transfer import Ask, Transferred
from pyps.native.values import Codec, Tag, Ticket
from pyps.remote.verbs import OPENED, Bulk, Caller, Handlers, LinkVerb, verb
from pyps.remote.wire import OpenReply, PushHeader, RequestBytes
from pyps.store.backend import Count, Position, Timeout


class LogKind(IntEnum):
    """Name the kind of an entry of the log by which the first of several servers says what it has decided.

    APPLY: a push is the next version. DROP: a push that was sent is none. END: a client has no more pushes.
    PIN, PIN_ALL: keep a copy of the parameters, or of all state, for a client to fetch. ENTER: a client may
    send pushes.
    """

    APPLY = 0
    DROP = 1
    END = 2
    PIN = 3
    PIN_ALL = 4
    ENTER = 5


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """tag: of the push or the pin; its first number is the client's. proofs: of an ENTER, by which each shard
    knows the client's session (pyps.shards.proofs).
    """

    kind: LogKind
    tag: Tag
    ticket: Ticket | None = None
    proofs: tuple[bytes, ...] = ()


class Following(msgspec.Struct, frozen=True, array_like=True):
    """Where a shard reads the log: from `index` on. When it has come to `end`, pushes of all other clients
    than `live`, which have these proofs, that it still holds are not needed. log: another one for each start
    of the first server. newest: the last client's number; they rise.
    """

    index: int
    end: int
    live: dict[int, tuple[bytes, ...]]
    log: int
    newest: int


class CommitHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold what the first of several servers decides at once: a push whose parts every server has been sent,
    the claims of later steps, and the version to pull.

    seq: the client's number of it; those of its pushes rise. receipts: each shard's for its part. pin: PIN or
    PIN_ALL; None: nothing is pulled.
    """

    seq: Position
    push: PushHeader | None = None
    receipts: tuple[bytes, ...] = ()
    pin: LogKind | None = None
    ask: Ask = Ask(alone=True)


class CommitReply(msgspec.Struct, frozen=True):
    """Hold what was decided. client: the number under which what was pinned is kept."""

    client: int
    transfer: Transferred


class ShardCalls(Protocol):
    """run: of the model, as the runs before and after a checkpoint have clients of the same numbers. tag: its
    client's number is that of the session that calls, or the call is refused.
    """

    def enter(self) -> int:
        """To the first server, after `join` as a worker: this client's number, for the tags of its parts."""

    def commit(self, header: CommitHeader) -> CommitReply:
        """To the first server: decide. Raises as Backend.push."""

    def drop(self, seq: Position, alone: bool) -> None:
        """To the first server: some server has not taken its part of this push. alone: as in Ask."""

    def pin_state(self, seq: Position, timeout: Timeout) -> tuple[int, StateHeader]:
        """To the first server: keep all of one version; this client's number, and the head's state."""

    def made(self) -> None:
        """To the first server: all shards of the head that this session made are there."""

    def remove_head(self, protocol: int, name: str, run: Position) -> None:
        """To the first server: a checkpoint takes the place of this run, of which a shard is lost. Waits as
        long as one may be silent; InvalidArgument where all are there.
        """

    def follow(self, seal: bytes, index: Count, version: Position) -> Following:
        """From the server of shard `index`, which knows the model's seal: where to read the log on."""

    def entries(self, index: Position, timeout: Timeout) -> list[LogEntry]:
        """From another server: the log from `index` on, or nothing new within the timeout."""

    def offer_shard(self, protocol: int, name: str, index: Count) -> None:
        """To each server: whether create_shard would be refused."""

    def create_shard(self, protocol: int, name: str, index: Count, request_bytes: RequestBytes) -> OpenReply:
        """To each server: make its shard of the first one's model. Numbers: pyps.remote.creation."""

    def open_shard(self, protocol: int, name: str, run: Position, index: Count) -> OpenReply:
        """To each server. Raises NotReady."""

    def stage(self, run: Position, tag: Tag, header: PushHeader) -> bytes:
        """To each server: keep this part of a gradient until it is decided on; a receipt. Numbers: it."""

    def pull_pinned(self, run: Position, tag: Tag, codec: Codec, timeout: Timeout) -> None:
        """To each server. Back: its part of the pinned parameters."""

    def read_pinned(self, run: Position, tag: Tag, states: Count, timeout: Timeout) -> None:
        """To each server. Back: its part of all that was pinned."""


# A client has one more session at each server, for its shard: it stays a stranger there, and gives the run,
# and tags of its own, which the shard knows by the first server's log.
ENTER = verb(ShardCalls.enter, Caller.WORKER)
COMMIT = verb(ShardCalls.commit, OPENED)
DROP = verb(ShardCalls.drop, Caller.WORKER)
PIN_STATE = verb(ShardCalls.pin_state, OPENED)
MADE = verb(ShardCalls.made, Caller.CREATOR)
REMOVE_HEAD = verb(ShardCalls.remove_head, Caller.REMOVER, needs_store=False)
FOLLOW = verb(ShardCalls.follow, Caller.OBSERVER | Caller.SERVER, needs_store=False)
ENTRIES = verb(ShardCalls.entries, Caller.SERVER, needs_store=False)
OFFER_SHARD = verb(ShardCalls.offer_shard, Caller.STRANGER, needs_store=False)
CREATE_SHARD = verb(ShardCalls.create_shard, Caller.STRANGER, Bulk.STORE, needs_store=False)
OPEN_SHARD = verb(ShardCalls.open_shard, Caller.STRANGER, needs_store=False)
STAGE = verb(ShardCalls.stage, Caller.STRANGER, Bulk.GRADIENT, needs_store=False)
PULL_PINNED = verb(ShardCalls.pull_pinned, Caller.STRANGER, back=Bulk.GRADIENT, needs_store=False)
READ_PINNED = verb(ShardCalls.read_pinned, Caller.STRANGER, back=Bulk.STORE, needs_store=False)

VERBS: dict[str, LinkVerb[Any, Any]] = {v.name: v for v in list(vars().values()) if isinstance(v, LinkVerb)}
HANDLERS = Handlers()
