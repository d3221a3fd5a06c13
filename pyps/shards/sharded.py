"""A store over several servers, one version of it at all of them: pyps.remote.link with shards.

A push is two steps: every server is sent its part of the gradient, all at once; then the first one decides,
and its decision reaches the others through its log (pyps.shards.decisions). A client that dies before the
second step has pushed nothing; one that dies after it has pushed everywhere. A pull has the first server pin
a version, and fetches each shard's part of that version.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import count
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyps.errors import Fenced, InvalidArgument, NotFinite, NotReady, SegmentExists, ShardLost
from pyps.native.ranges import Ranges, Visitor
from pyps.native.state import VECTORS, FlatState, StoreState
from pyps.native.transfer import ArrivalCallback, FinishTransfer, Transferred, TransferRequest
from pyps.native.values import (
    Codec,
    Config,
    EncodeCounts,
    Flat,
    Layout,
    PushRequest,
    Role,
    Tag,
    Traffic,
)
from pyps.remote.address import parse_servers
from pyps.remote.away import NO_COUNTS, Away, Outgoing, bounded
from pyps.remote.client import Client, Posted
from pyps.remote.creation import created_numbers
from pyps.remote.framing import Frames, from_frames
from pyps.remote.verbs import CREATE, HELLO, MEMBERS, STATUS, Asked
from pyps.remote.wire import PROTOCOL, OpenReply, PushHeader
from pyps.shards import verbs
from pyps.shards.cut import (
    Cut,
    check_policy,
    cut,
    cut_of_head,
    flat_of,
    head_config,
    head_state,
    shard_config,
    shard_state,
    whole_header,
)
from pyps.shards.proofs import shard_session
from pyps.shards.verbs import CommitHeader, CommitReply, LogKind
from pyps.store.backend import MAX_CALL_SECONDS
from pyps.store.codec import decode_vector, encoded_vector_bytes
from pyps.store.marks import SEAL_BYTES

R = TypeVar("R")
PINNED_SECONDS = 60.0  # for a shard to reach a version that the first server has decided
PartNumbers = list[list[NDArray[np.uint8]]]  # of a gradient, one for each shard


class ShardedBackend(Away):
    """An open store over several servers; the first one, `client`'s, for all that is decided."""

    def __init__(self, address: str, config: Config | None = None, state: StoreState | None = None) -> None:
        """config, state: of a store to create there; None: to open the one that is there."""
        self._servers = parse_servers(address)
        self.servers = len(self._servers)
        self._store = self._servers[0].store
        self._shards: list[Client] = []
        self._cut: Cut
        self._layouts: tuple[Layout, ...] = ()
        self._client = 0
        self._numbers = count(1)  # of pushes and pins
        head = Client(self._servers[0])
        try:
            opened = self._open(head) if config is None else self._create(head, config, state)
        except BaseException:
            head.close()
            self._hang_up()
            raise
        super().__init__(self._servers[0], head, opened)

    def _open(self, head: Client) -> OpenReply:
        reply = head.call(HELLO(PROTOCOL, self._store))
        whole = cut_of_head(reply.layout, reply.tensors)
        if whole is None or len(whole.shards) != len(self._servers):
            found = "one server" if whole is None else f"{len(whole.shards)} servers"
            expected = f"the {len(self._servers)} of the address"
            raise InvalidArgument("open", f"store {self._store!r}: found it on {found}; expected {expected}")
        self._dial(head)
        try:
            return self._opened_as(whole, reply, self._open_shards(whole.run))
        except NotReady as error:
            if any(member.role is not Role.OBSERVER for member in head.call(MEMBERS())):
                raise ShardLost("open", error.message) from None
            raise

    def _open_shards(self, run: int) -> list[OpenReply]:
        asked = [verbs.OPEN_SHARD(PROTOCOL, self._store, run, k) for k in range(len(self._shards))]
        return [reply for reply, _ in self._all(asked)]

    def _create(self, head: Client, config: Config, state: StoreState | None) -> OpenReply:
        """The head first: who makes it makes the shards, and others wait for these (NotReady). The head goes
        with a client that ends before all are made.
        """
        check_policy(config)
        seal = secrets.token_bytes(SEAL_BYTES)
        whole = cut(secrets.randbits(62), config.tensors, config.chunk_params, len(self._servers), seal)
        initial = {t.name: values for t, values in zip(whole.tensors, config.initial, strict=True)}
        flat = flat_of(whole, initial)
        vectors = {} if state is None else {n: flat_of(whole, dict(v)) for n, v in state.vectors.items()}
        self._dial(head)
        self._all([verbs.OFFER_SHARD(PROTOCOL, self._store, k) for k in range(len(self._shards))])
        size, numbers = created_numbers(
            head_config(whole, config), None if state is None else head_state(whole, config, state)
        )
        asked = CREATE(PROTOCOL, self._store, size)
        try:
            reply = head.exchange(asked, numbers)[0]
        except SegmentExists:
            if state is None:
                raise
            self._remove_broken(state.header.version)
            reply = head.exchange(asked, numbers)[0]
        posted = []
        for k, (client, shard) in enumerate(zip(self._shards, whole.shards, strict=True)):
            own = None if state is None else shard_state(whole, shard, state.header, flat, vectors)
            size, numbers = created_numbers(shard_config(whole, shard, config, flat), own)
            posted.append(client.post(verbs.CREATE_SHARD(PROTOCOL, self._store, k, size), numbers))
        replies = [made for made, _ in self._take(posted)]
        head.call(verbs.MADE())
        return self._opened_as(whole, reply, replies)

    def _remove_broken(self, version: int) -> None:
        """Make room for a state where a server has lost its shard, with a warning. Raises SegmentExists where
        all of them are there.
        """
        probe = Client(self._servers[0])
        try:
            head = probe.call(HELLO(PROTOCOL, self._store))
            whole = cut_of_head(head.layout, head.tensors)
            if whole is None or self._are_there(whole.run):
                raise SegmentExists("create", f"{self._store!r}: found it at {self._servers[0]}")
            self.undone = max(0, probe.call(STATUS()).version - version)
            probe.call(verbs.REMOVE_HEAD(PROTOCOL, self._store, whole.run))
        finally:
            probe.close()
        lost = f"a server has lost its shard; all go back to version {version}"
        warnings.warn(f"store {self._store!r}: {lost}, and {self.undone} pushes are undone", stacklevel=2)

    def _are_there(self, run: int) -> bool:
        try:
            self._open_shards(run)
        except NotReady:
            return False
        return True

    def _dial(self, head: Client) -> None:
        for k, server in enumerate(self._servers):
            self._shards.append(Client(server, shard_session(head.session, k)))

    def _all(self, asked: Sequence[Asked[R]]) -> list[tuple[R, Frames]]:
        """Each shard's reply to its own call."""
        return self._take([shard.post(one) for shard, one in zip(self._shards, asked, strict=True)])

    def _take(self, posted: Sequence[Posted[R]]) -> list[tuple[R, Frames]]:
        """The shards' replies to a call; all have come before the first error is raised."""
        found: list[tuple[R, Frames]] = []
        error: BaseException | None = None
        for shard, one in zip(self._shards, posted, strict=True):
            try:
                found.append(shard.take(one))
            except Exception as raised:
                error = error or raised
        if error is not None:
            raise error
        return found

    def _opened_as(self, whole: Cut, head: OpenReply, replies: list[OpenReply]) -> OpenReply:
        for client, reply in zip(self._shards, replies, strict=True):
            client.set_server(reply.server, reply.client_timeout_seconds)
        self._cut = whole
        self._layouts = tuple(reply.layout for reply in replies)
        for shard, layout in zip(whole.shards, self._layouts, strict=True):
            if (layout.flat_elements, layout.trained_elements) != (shard.elements, shard.trained):
                found = f"found {layout.flat_elements} elements in a shard; expected {shard.elements}"
                raise InvalidArgument("open", f"store {self._store!r}: {found}")
        return OpenReply(
            head.server,
            head.client_timeout_seconds,
            whole.layout(head.layout, self._layouts),
            whole.tensors,
            head.policy_params,
            head.policy_needs,
        )

    def close(self) -> None:
        super().close()
        self._hang_up()

    def _hang_up(self) -> None:
        for shard in self._shards:
            shard.close()

    @property
    def traffic(self) -> Traffic:
        clients = (self.client, *self._shards)
        return Traffic(*(sum(getattr(c.traffic, f.name) for c in clients) for f in fields(Traffic)))

    def join(self, role: Role, rank: int) -> int:
        got = super().join(role, rank)
        if role is not Role.OBSERVER:  # which enters by what it reads
            self._client = self.client.call(verbs.ENTER())
        return got

    def rejoin(self) -> None:
        entered = False
        while not entered:
            super().rejoin()
            with suppress(Fenced):  # found silent again since then
                self._client = self.client.call(verbs.ENTER())
                entered = True

    def pull(self, out: Flat, ranges: Ranges | None = None, codec: Codec = Codec.F32) -> int:
        if ranges is not None:
            _refuse_ranges("pull")
        codec = self.address.pull if codec is Codec.F32 else codec
        version = self._pin(LogKind.PIN, lambda tag: self._fetch(tag, out, codec))
        self._compute_began = time.monotonic()
        return version

    def _pin(self, kind: LogKind, fetch: Callable[[Tag], None]) -> int:
        """Have the first server pin a version, and fetch it; that version."""
        seq = next(self._numbers)
        reply = self.client.call(verbs.COMMIT(CommitHeader(seq, pin=kind)))
        fetch((reply.client, seq))
        return reply.transfer.version or 0

    def _fetch(self, tag: Tag, flat: Flat, codec: Codec) -> None:
        """Every shard's part of what was pinned, to `flat`."""
        if codec is Codec.F32:
            self._fetch_codes(tag, flat, codec)
        else:
            codes = np.empty(encoded_vector_bytes(codec, self.layout), np.uint8)
            self._fetch_codes(tag, codes, codec)
            decode_vector(codes, codec, self.layout, flat)

    def _fetch_codes(self, tag: Tag, out: NDArray[Any], codec: Codec) -> None:
        """The same, as the codec has it."""
        asked = verbs.PULL_PINNED(self._cut.run, tag, codec, PINNED_SECONDS)
        replies = self._all([asked] * len(self._shards))
        for extents, (_, found) in zip(self._cut.extents, replies, strict=True):
            from_frames("pull", found, *extents.held((out,), codec))
        self._extents.blank((out,), codec)

    def pull_encoded(self, codec: Codec, out: NDArray[np.uint8]) -> int:
        version = self._pin(LogKind.PIN, lambda tag: self._fetch_codes(tag, out, codec))
        self._compute_began = time.monotonic()
        return version

    def read(self, visit: Visitor, ranges: Ranges | None, timeout: float) -> int:
        _refuse_ranges("read")

    def _post_parts(self, seq: int, header: PushHeader, parts: PartNumbers) -> list[Posted[bytes]]:
        tag: Tag = (self._client, seq)
        posted = []
        for client, shard, numbers in zip(self._shards, self._cut.shards, parts, strict=False):
            own = PushHeader(
                **{name: getattr(header, name) for name in PushHeader.__struct_fields__}
                | {"hyper": tuple(header.hyper[group] for group in shard.groups)}
            )
            posted.append(client.post(verbs.STAGE(self._cut.run, tag, own), numbers))
        return posted

    def _stage(
        self, seq: int, header: PushHeader, posted: list[Posted[bytes]], alone: bool = True
    ) -> tuple[bytes, ...]:
        """Wait until every shard has its part: their receipts. If one has not, none is needed."""
        if not header.samples:
            return ()
        try:
            return tuple(receipt for receipt, _ in self._take(posted))
        except Exception:
            self.client.call(verbs.DROP(seq, alone))
            raise

    def begin_transfer(self, request: TransferRequest[PushRequest]) -> FinishTransfer:
        """The parts of the gradient are sent now, the rest is for what is returned."""
        seq, ask = next(self._numbers), request.ask
        push, (header, parts, counts) = self._sendable(request, self._sent)
        codec = self.address.pull if request.codec is Codec.F32 else request.codec
        sent = Outgoing(push, codec, counts, time.monotonic(), push is not request.push)
        posted = self._post_parts(seq, header, parts)

        def decide() -> CommitReply:
            receipts = self._stage(seq, header, posted, ask.alone)
            pin = LogKind.PIN if ask.pulls else None
            asked = CommitHeader(seq, header, receipts, pin, ask)
            return self.client.call(verbs.COMMIT(asked))

        return partial(self._finish, sent, seq, decide)

    def _finish(
        self,
        sent: Outgoing,
        seq: int,
        decide: Callable[[], CommitReply],
        out: Flat,
        arrived: ArrivalCallback | None = None,
    ) -> Transferred:
        try:
            decided = decide()
        except BaseException as error:
            self._not_ended(sent.push, error, sent.began)
            raise
        reply = decided.transfer
        self._ended(sent.push, admitted=reply.result is not None)
        pushed = time.monotonic()
        if reply.version is not None:
            try:
                self._fetch((decided.client, seq), out, sent.codec)
            except (Fenced, NotFinite):
                if reply.result is None:
                    raise
                reply = msgspec.structs.replace(reply, version=None, fenced=True)
        return self._finished(sent, reply, pushed, out, arrived)

    def _sent(self, request: PushRequest) -> tuple[PushHeader, PartNumbers, EncodeCounts]:
        """Give what is sent for a push: its header, each shard's numbers, and what was not finite among them.

        Raises NotFinite, and InvalidArgument for what needs all of the gradient at one place.
        """
        self._check_staged(request.staging)
        if request.ranges is not None:
            _refuse_ranges("push")
        if any(hyper.clip_norm for hyper in request.hyper):
            expected = "expected 0 on several servers: clip the gradient before the push"
            raise InvalidArgument(
                "push", f"clip_norm: found {max(h.clip_norm for h in request.hyper)}; {expected}"
            )
        header, codec = self._header(request), request.encoding.codec
        if not request.samples:
            return header, [], NO_COUNTS
        vector, counts = self._vector(request)
        return header, [extents.held(vector, codec) for extents in self._cut.extents], counts

    def snapshot(self, out: Flat, state: Sequence[Flat], steps: NDArray[np.float64], timeout: float) -> int:
        return self._pin(LogKind.PIN_ALL, lambda tag: self._read(tag, out, state, steps, timeout))

    def _read(
        self, tag: Tag, flat: Flat, state: Sequence[Flat], steps: NDArray[np.float64], timeout: float
    ) -> None:
        """Every shard's part of all that was pinned."""
        seconds = min(max(timeout, PINNED_SECONDS), MAX_CALL_SECONDS)
        asked = verbs.READ_PINNED(self._cut.run, tag, len(state), seconds)
        replies, at = self._all([asked] * len(self._shards)), 0
        for extents, layout, (_, found) in zip(self._cut.extents, self._layouts, replies, strict=True):
            held = [part for vector in (flat, *state) for part in extents.held((vector,))]
            from_frames("snapshot", found, *held, steps[at : at + layout.chunks])
            at += layout.chunks
        for vector in (flat, *state):
            self._extents.blank((vector,))

    def state(self, timeout: float) -> FlatState:
        layout, seq = self.layout, next(self._numbers)
        client, header = self.client.call(verbs.PIN_STATE(seq, bounded(max(timeout, 0.0))))
        flat = np.empty(layout.flat_elements, np.float32)
        states = tuple(np.empty_like(flat) for _ in VECTORS[header.optimizer])
        self._read((client, seq), flat, states, np.empty(layout.chunks, np.float64), timeout)
        return FlatState(whole_header(self._cut, header), flat, states, {})


def _refuse_ranges(what: str) -> NoReturn:
    raise InvalidArgument(
        what, "ranges: found some with a store on several servers; expected all of the model"
    )
