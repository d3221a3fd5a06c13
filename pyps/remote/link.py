"""A store behind one server: pyps.store.backend over a link."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InvalidArgument
from pyps.native.ranges import Ranges, Visitor, elements
from pyps.native.state import FlatState, StoreState
from pyps.native.transfer import ArrivalCallback, FinishTransfer, Transferred, TransferRequest, seconds_of
from pyps.native.values import Codec, Config, EncodeCounts, Flat, PushRequest
from pyps.remote import verbs
from pyps.remote.address import parse_address
from pyps.remote.away import NO_COUNTS, Away, Outgoing, bounded, check_finite
from pyps.remote.client import Client, Posted
from pyps.remote.creation import created_numbers
from pyps.remote.framing import Frames, from_frames
from pyps.remote.parts import packed, show
from pyps.remote.wire import PROTOCOL, OpenReply, PushHeader
from pyps.store.codec import decode_vector, encoded_vector_bytes
from pyps.store.marks import run_and_servers

OutgoingPush = tuple[PushHeader, Sequence[NDArray[Any]], EncodeCounts]


class LinkBackend(Away):
    """An open store behind a server."""

    servers = 1

    def __init__(self, address: str, config: Config | None = None, state: StoreState | None = None) -> None:
        """config, state: of a store to create there; None: to open the one that is there."""
        where = parse_address(address)
        client = Client(where)
        try:
            if config is None:
                opened = _hello(client)
            else:
                size, numbers = created_numbers(config, state)
                opened = client.exchange(verbs.CREATE(PROTOCOL, where.store, size), numbers)[0]
        except BaseException:
            client.close()
            raise
        super().__init__(where, client, opened)
        self._back, self.traffic = np.empty(0, np.uint8), client.traffic

    def pull(self, out: Flat, ranges: Ranges | None = None, codec: Codec = Codec.F32) -> int:
        codec = self.address.pull if ranges is None and codec is Codec.F32 else codec
        if ranges is None:
            version, found = self.client.exchange(verbs.PULL(codec, None))
            self._receive("pull", found, out, codec)
        else:
            version, found = self.client.exchange(verbs.PULL(codec, len(ranges)), (ranges,))
            from_frames("pull", found, out)
        self._compute_began = time.monotonic()
        return version

    def pull_encoded(self, codec: Codec, out: NDArray[np.uint8]) -> int:
        version, found = self.client.exchange(verbs.PULL(codec, None))
        self._extents.fill("pull", found, (out,), codec=codec)
        self._compute_began = time.monotonic()
        return version

    def read(self, visit: Visitor, ranges: Ranges | None, timeout: float) -> int:
        """One version's parameters come over, and are shown then."""
        layout = self.layout
        held = [(a, b - a) for a, b in self._extents.parts]
        parts = np.array(held, np.uint64).reshape(-1, 2) if ranges is None else ranges
        out = np.empty(elements("read", parts, layout.flat_elements), np.float32)
        version, found = self.client.exchange(verbs.READ(len(parts), bounded(timeout)), (parts,))
        from_frames("read", found, out)
        show(parts, out, self._extents, visit, layout.chunk_params)
        return version

    def snapshot(self, out: Flat, state: Sequence[Flat], steps: NDArray[np.float64], timeout: float) -> int:
        version, found = self.client.exchange(verbs.SNAPSHOT(len(state), bounded(timeout)))
        self._extents.fill("snapshot", found, (out,), *((vector,) for vector in state), rest=(steps,))
        return version

    def state(self, timeout: float) -> FlatState:
        layout = self.layout
        (header, ranks), found = self.client.exchange(verbs.STATE(bounded(timeout)))
        vectors = [np.empty(layout.flat_elements, np.float32) for _ in range(1 + layout.states + len(ranks))]
        self._extents.fill("state", found, *((vector,) for vector in vectors))
        residuals = vectors[1 + layout.states :]
        states = tuple(vectors[1 : 1 + layout.states])
        return FlatState(header, vectors[0], states, dict(zip(ranks, residuals, strict=True)))

    def begin_transfer(self, request: TransferRequest[PushRequest]) -> FinishTransfer:
        push, (header, numbers, counts) = self._sendable(request, self._sent)
        codec = self.address.pull if request.codec is Codec.F32 else request.codec
        sent = Outgoing(push, codec, counts, time.monotonic(), push is not request.push)
        asked = TransferRequest(header, codec, request.ask)
        return partial(self._finish, sent, self.client.post(verbs.TRANSFER(asked), numbers))

    def _finish(
        self, sent: Outgoing, posted: Posted[Transferred], out: Flat, arrived: ArrivalCallback | None = None
    ) -> Transferred:
        try:
            reply, found = self.client.take(posted)
        except BaseException as error:
            self._not_ended(sent.push, error, sent.began)
            raise
        self._ended(sent.push, admitted=reply.result is not None)
        pulled = time.monotonic()
        if reply.version is not None:
            self._receive("transfer", found, out, sent.codec)
        # The server's clock is another: the way there counts as long as the way back.
        at_server = seconds_of(reply.spans, "wait", "push")
        pushed = sent.began + at_server + max(0.0, pulled - sent.began - at_server) / 2
        return self._finished(sent, reply, pushed, out, arrived)

    def _receive(self, what: str, found: Frames, flat: Flat, codec: Codec) -> None:
        """Parameters, as they came back, to `flat`."""
        if codec is Codec.F32:
            self._extents.fill(what, found, (flat,))
            return
        size = encoded_vector_bytes(codec, self.layout)
        if self._back.size != size:
            self._back = np.empty(size, np.uint8)
        self._extents.fill(what, found, (self._back,), codec=codec)
        decode_vector(self._back, codec, self.layout, flat)

    def _sent(self, request: PushRequest) -> OutgoingPush:
        """Return what is sent for a push: its header, its numbers, and what was not finite among them.

        Raises NotFinite, InvalidArgument.
        """
        self._check_staged(request.staging)
        header = self._header(request)
        if request.staging == self._in_round:  # it has left: only its round is waited for
            return header, (), self._counts
        self._counts = NO_COUNTS
        if request.ranges is not None:
            return header, self._of_ranges(request, request.ranges), NO_COUNTS
        if not request.samples:
            return header, (), NO_COUNTS
        vector, self._counts = self._vector(request)
        return header, self._extents.held(vector, request.encoding.codec), self._counts

    def _of_ranges(self, request: PushRequest, ranges: Ranges) -> tuple[NDArray[Any], ...]:
        """The ranges of a push, and the gradient there."""
        if request.encoding.codec is not Codec.F32:
            found = f"codec: found {request.encoding.codec.name} with ranges"
            raise InvalidArgument("push", f"{found}; expected F32")
        if not request.samples:
            return ()
        given = request.gradient
        values = packed(self.staging(request.staging), ranges) if given is None else given
        check_finite(request, values)
        return ranges, values


def _hello(client: Client) -> OpenReply:
    reply = client.call(verbs.HELLO(PROTOCOL, client.address.store))
    if (marked := run_and_servers(reply.tensors)) is not None:
        expected = f"the addresses of its {marked[1]} servers, as tcp://host:port,host:port/name"
        raise InvalidArgument("open", f"address: found {client.address}; expected {expected}")
    return reply
