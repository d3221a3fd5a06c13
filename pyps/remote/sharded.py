"""A store over several servers, one version of it at all of them: pyps.remote.backend with shards.

A push is two steps: every server is sent its part of the gradient, all at once; then the first one decides,
and its decision reaches the others through its log (pyps.remote.decisions). A client that dies before the
second step has pushed nothing; one that dies after it has pushed everywhere. A pull has the first server pin
a version, and fetches each shard's part of that version.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import count
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pyps.errors import Fenced, InvalidArgument, NotFinite, NotReady, SegmentExists, ShardLost
from pyps.native.ranges import Ranges, Visitor
from pyps.native.state import VECTORS, FlatState, StateHeader, StoreState
from pyps.native.transfer import Finish, Transferred, TransferRequest, spans_of
from pyps.native.values import (
    Codec,
    Config,
    EncodeCounts,
    Encoding,
    Flat,
    Layout,
    PushRequest,
    PushResult,
    Role,
    Tag,
    Traffic,
)
from pyps.remote.address import parse_servers
from pyps.remote.backend import RemoteBackend
from pyps.remote.client import Client
from pyps.remote.creation import created_numbers
from pyps.remote.framing import Frames, from_frames
from pyps.remote.shards import (
    Cut,
    check_policy,
    cut,
    cut_of_head,
    flat_of,
    head_config,
    head_state,
    shard_config,
    shard_state,
    split_codes,
    whole_header,
)
from pyps.remote.wire import (
    MAX_CALL_SECONDS,
    PROTOCOL,
    CommitHeader,
    CreateRequest,
    LogKind,
    OpenReply,
    PushHeader,
    TransferReply,
)
from pyps.store.codec import decode_vector, encode, encoded_vector_bytes

PINNED_SECONDS = 60.0  # for a shard to reach a version that the first server has decided
PartNumbers = list[tuple[NDArray[Any], ...]]  # of a gradient, one for each shard


class ShardedBackend(RemoteBackend):
    """An open store over several servers; as RemoteBackend, with the first server for all that is decided."""

    def __init__(self, address: str, config: Config | None = None, state: StoreState | None = None) -> None:
        self._servers = parse_servers(address)
        self._shards: list[Client] = []
        self._cut: Cut
        self._layouts: tuple[Layout, ...] = ()
        self._client = 0
        self._numbers = count(1)  # of pushes and pins
        try:
            super().__init__(address, config, state)
            self.servers = len(self._servers)
        except BaseException:
            self._hang_up()
            raise

    def _open(self) -> OpenReply:
        reply: OpenReply = self.client.call("hello", PROTOCOL, self.address.store)[0]
        whole = cut_of_head(reply.layout, reply.tensors)
        if whole is None or len(whole.shards) != len(self._servers):
            found = "one server" if whole is None else f"{len(whole.shards)} servers"
            expected = f"the {len(self._servers)} of the address"
            raise InvalidArgument(
                "open", f"store {self.address.store!r}: found it on {found}; expected {expected}"
            )
        self._dial()
        arguments = (PROTOCOL, self.address.store, whole.run)
        posted = [shard.post("open_shard", *arguments, k) for k, shard in enumerate(self._shards)]
        try:
            return self._opened_as(whole, reply, self._take("open_shard", posted))
        except NotReady as error:
            members = self.client.call("members")[0]
            if any(member.id and member.role is not Role.OBSERVER for member in members):
                raise ShardLost("open", error.message) from None
            raise

    def _create(self, config: Config, state: StoreState | None) -> OpenReply:
        """The head first: who makes it makes the shards, and others wait for these (NotReady). The head goes
        with a client that ends before all are made.
        """
        check_policy(config)
        whole = cut(secrets.randbits(62), config.tensors, config.chunk_params, len(self._servers))
        initial = {t.name: values for t, values in zip(whole.tensors, config.initial, strict=True)}
        flat = flat_of(whole, initial)
        vectors = {} if state is None else {n: flat_of(whole, dict(v)) for n, v in state.vectors.items()}
        self._dial()
        offered = [s.post("offer_shard", PROTOCOL, self.address.store, k) for k, s in enumerate(self._shards)]
        self._take("offer_shard", offered)
        head = None if state is None else head_state(whole, config, state)
        arguments = "create", (self.address.store,), head_config(whole, config), head
        try:
            reply: OpenReply = _create_at(self.client, *arguments)
        except SegmentExists:
            if state is None:
                raise
            self._remove_broken(state.header.version)
            reply = _create_at(self.client, *arguments)
        posted = []
        for k, (client, shard) in enumerate(zip(self._shards, whole.shards, strict=True)):
            own = None if state is None else shard_state(whole, shard, state.header, flat, vectors)
            made = shard_config(whole, shard, config, flat)
            posted.append(_post_creation(client, "create_shard", (self.address.store, k), made, own))
        replies = self._take("create_shard", posted)
        self.client.call("made")
        return self._opened_as(whole, reply, replies)

    def _remove_broken(self, version: int) -> None:
        """Make room for a state where a server has lost its shard, with a warning. Raises SegmentExists where
        all of them are there.
        """
        name = self.address.store
        probe = Client(self._servers[0])
        try:
            head: OpenReply = probe.call("hello", PROTOCOL, name)[0]
            whole = cut_of_head(head.layout, head.tensors)
            present = whole is not None and self._are_there(whole.run)
            if whole is None or present:
                raise SegmentExists("create", f"{name!r}: found it at {self.address}")
            self.undone = max(0, probe.call("status")[0].version - version)
            self.client.call("remove_head", PROTOCOL, name, whole.run)
        finally:
            probe.close()
        lost = f"a server has lost its shard; all go back to version {version}"
        warnings.warn(f"store {name!r}: {lost}, and {self.undone} pushes are undone", stacklevel=2)

    def _are_there(self, run: int) -> bool:
        arguments = (PROTOCOL, self.address.store, run)
        posted = [shard.post("open_shard", *arguments, k) for k, shard in enumerate(self._shards)]
        try:
            self._take("open_shard", posted)
        except NotReady:
            return False
        return True

    def _dial(self) -> None:
        for server in self._servers:
            self._shards.append(Client(server))

    def _take(self, verb: str, posted: Sequence[int]) -> list[tuple[Any, Frames]]:
        """The shards' replies to a call; all have come before the first error is raised."""
        found: list[tuple[Any, Frames]] = []
        error: BaseException | None = None
        for shard, seq in zip(self._shards, posted, strict=True):
            try:
                found.append(shard.take(verb, seq))
            except Exception as one:
                error = error or one
        if error is not None:
            raise error
        return found

    def _opened_as(self, whole: Cut, head: OpenReply, shards: list[tuple[Any, Frames]]) -> OpenReply:
        replies: list[OpenReply] = [reply for reply, _ in shards]
        for client, reply in zip(self._shards, replies, strict=True):
            client.set_server(reply.server, reply.client_timeout_seconds)
        self._cut = whole
        self._layouts = tuple(reply.layout for reply in replies)
        for shard, layout in zip(whole.shards, self._layouts, strict=True):
            if (layout.flat_elements, layout.trained_elements) != (shard.elements, shard.trained):
                found = f"found {layout.flat_elements} elements in a shard; expected {shard.elements}"
                raise InvalidArgument("open", f"store {self.address.store!r}: {found}")
        return OpenReply(
            head.server,
            head.client_timeout_seconds,
            whole.layout(head.layout, self._layouts),
            whole.tensors,
            head.policy_params,
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
        self._client = int(self.client.call("enter")[0])
        return got

    def rejoin(self) -> None:
        super().rejoin()
        self._client = int(self.client.call("enter")[0])

    def pull(self, flat: Flat, ranges: Ranges | None = None) -> int:
        if ranges is not None:
            _refuse_ranges("pull")
        seq = next(self._numbers)
        reply: TransferReply = self.client.call("commit", CommitHeader(seq, pin=LogKind.PIN))[0]
        self._fetch(seq, flat, self.address.pull)
        self._compute_began = time.monotonic()
        return int(reply.version or 0)

    def _fetch(self, seq: int, flat: Flat, codec: Codec) -> None:
        """Every shard's part of what was pinned, to `flat`."""
        arguments = self._cut.run, (self._client, seq), codec, PINNED_SECONDS
        posted = [shard.post("pull_pinned", *arguments) for shard in self._shards]
        replies = self._take("pull_pinned", posted)
        for shard, layout, (_, found) in zip(self._cut.shards, self._layouts, replies, strict=True):
            own = shard.of(flat)
            if codec is Codec.F32:
                from_frames("pull", found, own)
                continue
            codes = np.empty(encoded_vector_bytes(codec, layout), np.uint8)
            from_frames("pull", found, codes)
            decode_vector(codes, codec, layout, own)

    def pull_encoded(self, codec: Codec, out: NDArray[np.uint8]) -> int:
        flat = np.empty(self._opened.layout.flat_elements, np.float32)
        version, trained = self.pull(flat), self._opened.layout.trained_elements
        codes, _ = encode(flat[:trained], codec)
        out[: codes.size] = codes
        out[codes.size :].view(np.float32)[:] = flat[trained:]
        return version

    def read(self, visit: Visitor, ranges: Ranges | None, timeout: float) -> int:
        _refuse_ranges("read")

    def push(self, request: PushRequest) -> PushResult:
        return self._push(request, None)[0]

    def exchange(self, request: PushRequest, flat: Flat) -> tuple[PushResult, int]:
        result, version, seq = self._push(request, LogKind.PIN)
        if version is None:
            raise Fenced("pull", "after its push, which counts")
        self._fetch(seq, flat, self.address.pull)
        return result, version

    def _push(self, request: PushRequest, pin: LogKind | None) -> tuple[PushResult, int | None, int]:
        seq = next(self._numbers)
        header, parts, counts = self._sent(request)
        with self._settling(request):
            self._stage(seq, header, self._post_parts(seq, header, parts))
            reply: TransferReply = self.client.call("commit", CommitHeader(seq, header, pin))[0]
        assert reply.result is not None
        result = replace(reply.result, nonfinite=counts.nonfinite, blocks_skipped=counts.blocks_skipped)
        return result, reply.version, seq

    def _post_parts(self, seq: int, header: PushHeader, parts: PartNumbers) -> list[int]:
        tag: Tag = (self._client, seq)
        posted = []
        for client, shard, numbers in zip(self._shards, self._cut.shards, parts, strict=False):
            own = PushHeader(
                **{name: getattr(header, name) for name in PushHeader.__struct_fields__}
                | {"hyper": tuple(header.hyper[group] for group in shard.groups)}
            )
            posted.append(client.post("stage", self._cut.run, tag, own, numbers=numbers))
        return posted

    def _stage(self, seq: int, header: PushHeader, posted: list[int], transfer: bool = False) -> None:
        """Wait until every shard has its part. If one has not, none is needed."""
        if not header.samples:
            return
        try:
            self._take("stage", posted)
        except Exception:
            self.client.call("drop", seq, transfer)
            raise

    def begin_transfer(self, request: TransferRequest) -> Finish:
        """As RemoteBackend's; the parts of the gradient are sent now, the rest is for what is returned."""
        push, seq = request.push, next(self._numbers)
        header, parts, counts = self._sent(push)
        began, posted = time.monotonic(), self._post_parts(seq, header, parts)
        codec = self.address.pull if request.codec is Codec.F32 else request.codec
        commit = CommitHeader(
            seq, header, LogKind.PIN, True, request.exchange, request.claims, request.max_samples
        )
        return lambda out: self._finish(push, commit, posted, began, codec, counts, out)

    def _finish(
        self,
        push: PushRequest,
        commit: CommitHeader,
        posted: list[int],
        began: float,
        codec: Codec,
        counts: EncodeCounts,
        out: Flat,
    ) -> Transferred:
        begun = self._begins_residual(push)
        try:
            self._stage(commit.seq, header_of(commit), posted, True)
            reply: TransferReply = self.client.call("commit", commit)[0]
        except BaseException:
            if begun:
                self._residual.commit(admitted=False)
            raise
        if begun:
            self._residual.commit(admitted=reply.result is not None)
        self._staging_taken.discard(push.staging)
        pushed = time.monotonic()
        if reply.version is not None:
            self._fetch(commit.seq, out, codec)
        self._compute_began = time.monotonic()
        result = reply.result
        if result is not None:
            result = replace(result, nonfinite=counts.nonfinite, blocks_skipped=counts.blocks_skipped)
        spans = spans_of(began, pushed, self._compute_began, result)
        return Transferred(result, tuple(reply.claims), reply.version, spans)

    def _sent(self, request: PushRequest) -> tuple[PushHeader, PartNumbers, EncodeCounts]:
        """What is sent for a push: its header, each shard's numbers, and what was not finite among them.

        Raises NotFinite, and InvalidArgument for what needs all of the gradient at one place.
        """
        if request.ranges is not None:
            _refuse_ranges("push")
        if any(hyper.clip_norm for hyper in request.hyper):
            expected = "expected 0 on several servers: clip the gradient before the push"
            raise InvalidArgument(
                "push", f"clip_norm: found {max(h.clip_norm for h in request.hyper)}; {expected}"
            )
        seconds = request.compute_seconds or time.monotonic() - self._compute_began
        if not request.samples:
            return self._header(request, request.scale, seconds), [], EncodeCounts(0, 0)
        whole, shards, how = self._values(request), self._cut.shards, request.encoding
        averaged = [whole[s.first + s.trained : s.first + s.elements] for s in shards]
        counts, scale = EncodeCounts(0, 0), request.scale
        if request.encoded and request.gradient is not None:
            codes = split_codes(request.gradient, how.codec, shards)
        elif how.codec is not Codec.F32:
            codes, counts = self._encoded_parts(self._without_gaps(request), how, scale, request.staging)
            scale = 1.0
        else:
            values = self._without_gaps(request)
            if how.nonfinite == "error":
                _check_finite(values)
            return self._header(request, scale, seconds), [(shard.of(values),) for shard in shards], counts
        parts: PartNumbers = list(zip(codes, averaged, strict=True))
        return self._header(request, scale, seconds), parts, counts

    def _encoded_parts(
        self, values: Flat, how: Encoding, scale: float, staging: int
    ) -> tuple[list[NDArray[np.uint8]], EncodeCounts]:
        """Each shard's codes, with the residual if errors are fed back. Raises NotFinite."""
        old, new = self._residual.begin() if how.error_feedback else (None, None)
        codes, nonfinite, skipped = [], 0, 0
        try:
            for shard in self._cut.shards:
                own = slice(shard.first, shard.first + shard.trained)
                data, counts = encode(
                    values[own],
                    how,
                    scale=scale,
                    first=shard.first,
                    residual=None if old is None else old[own],
                    residual_out=None if new is None else new[own],
                )
                codes.append(data)
                nonfinite, skipped = nonfinite + counts.nonfinite, skipped + counts.blocks_skipped
        except BaseException:
            if how.error_feedback:
                self._residual.cancel()
            raise
        if new is not None and self._keep_residual is not None:
            self._keep_residual(staging, new)
        return codes, EncodeCounts(nonfinite, skipped)

    def snapshot(self, flat: Flat, state: Sequence[Flat], steps: NDArray[np.float64], timeout: float) -> int:
        seq = next(self._numbers)
        reply: TransferReply = self.client.call("commit", CommitHeader(seq, pin=LogKind.PIN_ALL))[0]
        self._read(seq, flat, state, steps, timeout)
        return int(reply.version or 0)

    def _read(
        self, seq: int, flat: Flat, state: Sequence[Flat], steps: NDArray[np.float64], timeout: float
    ) -> None:
        """Every shard's part of all that was pinned."""
        seconds = min(max(timeout, PINNED_SECONDS), MAX_CALL_SECONDS)
        arguments = self._cut.run, (self._client, seq), len(state), seconds
        posted = [shard.post("read_pinned", *arguments) for shard in self._shards]
        at = 0
        for shard, layout, (_, found) in zip(
            self._cut.shards, self._layouts, self._take("read_pinned", posted), strict=True
        ):
            vectors = [shard.of(vector) for vector in (flat, *state)]
            from_frames("snapshot", found, *vectors, steps[at : at + layout.chunks])
            at += layout.chunks

    def state(self, timeout: float) -> FlatState:
        layout = self.layout
        seq = next(self._numbers)
        header: StateHeader = self.client.call("pin_state", seq, min(max(timeout, 0.0), MAX_CALL_SECONDS))[0]
        flat = np.empty(layout.flat_elements, np.float32)
        states = tuple(np.empty_like(flat) for _ in VECTORS[header.optimizer])
        self._read(seq, flat, states, np.empty(layout.chunks, np.float64), timeout)
        return FlatState(whole_header(self._cut, header), flat, states, {})


def header_of(commit: CommitHeader) -> PushHeader:
    """The push of a commit that has one."""
    assert commit.push is not None
    return commit.push


def _check_finite(values: Flat) -> None:
    if not np.isfinite(values).all():
        raise NotFinite("push", "the gradient has a value that is not finite")


def _refuse_ranges(what: str) -> NoReturn:
    raise InvalidArgument(
        what, "ranges: found some with a store on several servers; expected all of the model"
    )


def _create_at(
    client: Client, verb: str, where: tuple[Any, ...], config: Config, state: StoreState | None
) -> Any:
    return client.take(verb, _post_creation(client, verb, where, config, state))[0]


def _post_creation(
    client: Client, verb: str, where: tuple[Any, ...], config: Config, state: StoreState | None
) -> int:
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "initial"}
    if state is not None:
        options |= {"state": state.header, "residuals": tuple(state.residuals)}
    size, numbers = created_numbers(CreateRequest(**options), config, state)
    return client.post(verb, PROTOCOL, *where, size, numbers=numbers)
