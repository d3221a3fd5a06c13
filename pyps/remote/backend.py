"""pyps.native's functions on a store, over a link: the same names, arguments and results.

Staging buffers are this process's own memory. What is encoded is encoded here, and what the code does not
carry (error feedback) is kept here too, for this process's next gradient: another process that inherits the
rank begins without it, unless it is given to it (keep_residual).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps import native
from pyps.errors import InvalidArgument, NotFinite, PushRejected, StoreError
from pyps.formats.turns import TurnSchedule
from pyps.native.ranges import Ranges, Visitor, elements
from pyps.native.state import FlatState, StoreState
from pyps.native.status import Member, RankCounters, Status
from pyps.native.transfer import Finish, Transferred, TransferRequest, spans_of
from pyps.native.values import (
    Advice,
    Claim,
    Codec,
    Config,
    CostModel,
    DataSet,
    EncodeCounts,
    Encoding,
    Flat,
    Hyper,
    Layout,
    PolicyParams,
    PushRequest,
    PushResult,
    RankCost,
    Role,
    Tensor,
    Traffic,
)
from pyps.remote.address import Address, parse_servers
from pyps.remote.client import Client
from pyps.remote.creation import created_numbers
from pyps.remote.framing import Frames, from_frames
from pyps.remote.parts import extents, packed, show
from pyps.remote.wire import (
    MAX_CALL_SECONDS,
    PROTOCOL,
    CreateRequest,
    OpenReply,
    PushHeader,
    TransferHeader,
)
from pyps.store.codec import Residual, decode_vector, encode, encoded_vector_bytes
from pyps.store.marks import run_and_servers


class RemoteBackend:
    """An open remote store. Not thread-safe: pyps.Store makes one call at a time. But one thread may begin
    transfers while another finishes them.
    """

    def __init__(self, address: str, config: Config | None = None, state: StoreState | None = None) -> None:
        """config, state: of a store to create there; None: to open the one that is there."""
        self.servers, self.undone, self._joined = 1, 0, False
        self.address: Address = parse_servers(address)[0]
        self.client = Client(self.address)
        try:
            self._opened = self._open() if config is None else self._create(config, state)
        except BaseException:
            self.client.close()
            raise
        self.client.set_server(self._opened.server, self._opened.client_timeout_seconds)
        elements, trained = self._opened.layout.flat_elements, self._opened.layout.trained_elements
        self._gaps = _gaps(self._opened.tensors, elements)
        self._staging_buffers: dict[int, Flat] = {}
        self._back = np.empty(0, np.uint8)
        self._residual: Residual[Flat] = Residual(lambda: np.empty(trained, np.float32))
        self._keep_residual: Callable[[int, Flat], None] | None = None
        self._compute_began = time.monotonic()  # when the last claim or pull had come
        self._staging_taken: set[int] = set()

    def _open(self) -> OpenReply:
        reply: OpenReply = self.client.call("hello", PROTOCOL, self.address.store)[0]
        if (marked := run_and_servers(reply.tensors)) is not None:
            expected = f"the addresses of its {marked[1]} servers, as tcp://host:port,host:port/name"
            raise InvalidArgument("open", f"address: found {self.address}; expected {expected}")
        return reply

    @property
    def traffic(self) -> Traffic:
        """What went over the link so far."""
        return self.client.traffic

    def _create(self, config: Config, state: StoreState | None) -> OpenReply:
        options = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "initial"}
        if state is not None:
            options |= {"state": state.header, "residuals": tuple(state.residuals)}
        size, numbers = created_numbers(CreateRequest(**options), config, state)
        reply: OpenReply = self.client.call("create", PROTOCOL, self.address.store, size, numbers=numbers)[0]
        return reply

    def close(self) -> None:
        """Leave and hang up."""
        with suppress(StoreError):
            if self._joined:
                self.leave()
        self.client.close()

    @property
    def layout(self) -> Layout:
        return self._opened.layout

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._opened.tensors

    @property
    def policy_params(self) -> PolicyParams:
        return self._opened.policy_params

    def join(self, role: Role, rank: int) -> int:
        self._staging_taken.clear()
        got = int(self.client.call("join", role, rank)[0])
        self._joined = True
        return got

    def leave(self) -> None:
        self._joined = False
        self.client.call("leave")

    def rejoin(self) -> None:
        self.client.call("rejoin")
        self._staging_taken.clear()

    def reap(self) -> int:
        return int(self.client.call("reap")[0])

    def start(self, timeout: float) -> Claim:
        claim: Claim = self.client.call("start", _bounded(timeout))[0]
        self._compute_began = time.monotonic()
        return claim

    def start_ahead(self) -> Claim:
        claim: Claim = self.client.call("start_ahead")[0]
        return claim

    def pull(self, flat: Flat, ranges: Ranges | None = None) -> int:
        if ranges is not None:
            return self._pull_ranges(ranges, flat)
        if self.address.pull is Codec.F32:
            version, found = self.client.call("pull", None)
        else:
            version, found = self.client.call("pull_encoded", self.address.pull)
        self._receive("pull", found, flat, self.address.pull)
        self._compute_began = time.monotonic()
        return int(version)

    def _pull_ranges(self, ranges: Ranges, out: Flat) -> int:
        version, found = self.client.call("pull", len(ranges), numbers=(ranges,))
        from_frames("pull", found, out)
        self._compute_began = time.monotonic()
        return int(version)

    def read(self, visit: Visitor, ranges: Ranges | None, timeout: float) -> int:
        """One version's parameters come over, and are shown then."""
        layout = self._opened.layout
        parts = extents(self._gaps, layout.flat_elements) if ranges is None else ranges
        out = np.empty(elements("read", parts, layout.flat_elements), np.float32)
        version, found = self.client.call("read", len(parts), _bounded(timeout), numbers=(parts,))
        from_frames("read", found, out)
        show(parts, out, self._gaps, visit, layout.chunk_params)
        return int(version)

    def pull_encoded(self, codec: Codec, out: NDArray[np.uint8]) -> int:
        version, found = self.client.call("pull_encoded", codec)
        from_frames("pull", found, out)
        self._compute_began = time.monotonic()
        return int(version)

    def stage(self, timeout: float) -> int:
        """A staging buffer that no step has: it is free again when the reply to its push has come."""
        count = self._opened.layout.staging_buffers
        for staging in range(count):
            if staging not in self._staging_taken:
                self._staging_taken.add(staging)
                return staging
        raise InvalidArgument("stage", f"all {count} staging buffers are in use; push one first")

    def unstage(self, staging: int) -> None:
        if staging not in self._staging_taken:
            raise InvalidArgument("unstage", f"staging: found {staging}; expected one that stage() returned")
        self._staging_taken.discard(staging)

    def staging(self, staging: int) -> Flat:
        flat = self._staging_buffers.get(staging)
        if flat is None:
            flat = self._staging_buffers[staging] = np.zeros(self.layout.flat_elements, np.float32)
        return flat[:]  # a later holder of the staging buffer gets one that may be written again

    def push(self, request: PushRequest) -> PushResult:
        header, numbers, counts = self._encoded(request)
        with self._settling(request):
            result: PushResult = self.client.call("push", header, numbers=numbers)[0]
        return replace(result, nonfinite=counts.nonfinite, blocks_skipped=counts.blocks_skipped)

    def exchange(self, request: PushRequest, flat: Flat) -> tuple[PushResult, int]:
        header, numbers, counts = self._encoded(request)
        with self._settling(request):
            (result, version), found = self.client.call(
                "exchange", header, self.address.pull, numbers=numbers
            )
        self._receive("exchange", found, flat, self.address.pull)
        result = replace(result, nonfinite=counts.nonfinite, blocks_skipped=counts.blocks_skipped)
        return result, int(version)

    @contextmanager
    def _settling(self, request: PushRequest) -> Iterator[None]:
        """A push that was encoded: its residual counts if it was admitted, and its staging buffer is free."""
        begun = self._begins_residual(request)
        try:
            yield
        except BaseException as error:
            if begun:
                self._residual.commit(admitted=False)
            if isinstance(error, PushRejected):
                self._staging_taken.discard(request.staging)
            raise
        if begun:
            self._residual.commit(admitted=True)
        self._staging_taken.discard(request.staging)

    def begin_transfer(self, request: TransferRequest) -> Finish:
        """Send a transfer; what is returned waits for its reply. Several may be under way; finish them in
        order. Raises NotFinite, having sent nothing.
        """
        header, numbers, counts = self._encoded(request.push)
        codec = self.address.pull if request.codec is Codec.F32 else request.codec
        call = TransferHeader(
            push=header,
            codec=codec,
            exchange=request.exchange,
            claims=request.claims,
            max_samples=request.max_samples,
        )
        began, seq = time.monotonic(), self.client.post("transfer", call, numbers=numbers)
        return lambda out: self._finish_transfer(request.push, seq, began, codec, counts, out)

    def _finish_transfer(
        self, push: PushRequest, seq: int, began: float, codec: Codec, counts: EncodeCounts, out: Flat
    ) -> Transferred:
        try:
            reply, found = self.client.take("transfer", seq)
        except BaseException:
            if self._begins_residual(push):
                self._residual.commit(admitted=False)
            raise
        if self._begins_residual(push):
            self._residual.commit(admitted=reply.result is not None)
        self._staging_taken.discard(push.staging)
        pulled = time.monotonic()
        if reply.version is not None:
            self._receive("transfer", found, out, codec)
        self._compute_began = time.monotonic()
        result = reply.result
        if result is not None:
            result = replace(result, nonfinite=counts.nonfinite, blocks_skipped=counts.blocks_skipped)
        # The server's clock is another: the way there counts as long as the way back.
        pushed = began + reply.push_seconds + max(0.0, pulled - began - reply.push_seconds) / 2
        spans = spans_of(began, pushed, self._compute_began, result)
        return Transferred(result, reply.claims, reply.version, spans)

    def should_continue(self, done: int, following: int) -> Advice:
        advice: Advice = self.client.call("should_continue", done, following)[0]
        if advice is Advice.ABORT:
            self._staging_taken.clear()
        return advice

    def set_max_samples(self, most: int) -> None:
        self.client.call("set_max_samples", most)

    def set_data_set(self, data: DataSet) -> None:
        self.client.call("set_data_set", data)

    def snapshot(self, flat: Flat, state: Sequence[Flat], steps: NDArray[np.float64], timeout: float) -> int:
        version, found = self.client.call("snapshot", len(state), _bounded(timeout))
        from_frames("snapshot", found, flat, *state, steps)
        return int(version)

    def state(self, timeout: float) -> FlatState:
        layout = self.layout
        (header, ranks), found = self.client.call("state", _bounded(timeout))
        vectors = [np.empty(layout.flat_elements, np.float32) for _ in range(1 + layout.states + len(ranks))]
        from_frames("state", found, *vectors)
        residuals = vectors[1 + layout.states :]
        states = tuple(vectors[1 : 1 + layout.states])
        return FlatState(header, vectors[0], states, dict(zip(ranks, residuals, strict=True)))

    def status(self) -> Status:
        status: Status = self.client.call("status")[0]
        return status

    def members(self) -> list[Member]:
        members: list[Member] = self.client.call("members")[0]
        return members

    def ranks(self) -> list[RankCounters]:
        counters: list[RankCounters] = self.client.call("ranks")[0]
        return counters

    def costs(self) -> list[RankCost]:
        costs: list[RankCost] = self.client.call("costs")[0]
        return costs

    def set_cost_model(self, model: CostModel) -> None:
        self.client.call("set_cost_model", model)

    def hyper(self) -> list[Hyper | None]:
        constants: list[Hyper | None] = self.client.call("hyper")[0]
        return constants

    def replan(self, batches: Sequence[int], plan: int | None) -> None:
        self.client.call("replan", tuple(native.u32_array("replan", "batches", batches)), plan)

    def set_schedule(self, schedule: TurnSchedule) -> None:
        self.client.call("set_schedule", schedule)

    def wait(self, sequence: int, timeout: float) -> None:
        self.client.call("wait", sequence, _bounded(timeout))

    def journal(self, path: str | None) -> None:
        raise InvalidArgument("journal", f"{path}: the store is elsewhere, and so is its journal")

    def _receive(self, what: str, found: Frames, flat: Flat, codec: Codec) -> None:
        """Parameters, as they came back, to `flat`."""
        if codec is Codec.F32:
            from_frames(what, found, flat)
            return
        size = encoded_vector_bytes(codec, self._opened.layout)
        if self._back.size != size:
            self._back = np.empty(size, np.uint8)
        from_frames(what, found, self._back)
        decode_vector(self._back, codec, self._opened.layout, flat)

    def keep_residual(self, start: Flat | None, keep: Callable[[int, Flat], None]) -> None:
        """Begin with a residual, and give the staging buffer and residual of each push to `keep` before it is
        sent.
        """
        trained = self._opened.layout.trained_elements
        if start is not None and start.shape != (trained,):
            found = f"{list(start.shape)}; expected [{trained}]"
            raise InvalidArgument("residual", f"shape: found {found}")
        self._residual.begin_with(start)
        self._keep_residual = keep

    @staticmethod
    def _begins_residual(request: PushRequest) -> bool:
        """Whether a residual of this push is kept here."""
        how = request.encoding
        sent_here = request.samples > 0 and not request.encoded
        return sent_here and how.codec is not Codec.F32 and how.error_feedback

    def _encoded(self, request: PushRequest) -> tuple[PushHeader, tuple[NDArray[Any], ...], EncodeCounts]:
        """What is sent for a push: its header, its numbers, and what was not finite among them."""
        seconds = request.compute_seconds or time.monotonic() - self._compute_began
        if request.ranges is not None:
            return (
                self._header(request, request.scale, seconds),
                self._of_ranges(request, request.ranges),
                EncodeCounts(0, 0),
            )
        whole, counts, scale = self._values(request), EncodeCounts(0, 0), request.scale
        trained = self._opened.layout.trained_elements
        how = request.encoding
        numbers: tuple[NDArray[Any], ...] = (whole,)
        if request.encoded and request.gradient is not None:
            numbers = (request.gradient, whole[trained:])
        elif request.samples and how.codec is not Codec.F32:
            values = self._without_gaps(request)
            codes, counts = self._encode(values[:trained], how, scale, request.staging)
            numbers, scale = (codes, whole[trained:]), 1.0
        elif (
            request.samples
            and how.nonfinite == "error"
            and not np.isfinite(self._without_gaps(request)[:trained]).all()
        ):
            raise NotFinite("push", "the gradient has a value that is not finite")
        return self._header(request, scale, seconds), numbers if request.samples else (), counts

    @staticmethod
    def _header(request: PushRequest, scale: float, seconds: float) -> PushHeader:
        timeout = None if request.timeout is None else _bounded(native.timeout_seconds(request.timeout))
        how = Encoding(request.encoding.codec, nonfinite=request.encoding.nonfinite)
        return PushHeader.of(
            replace(request, scale=scale, timeout=timeout, encoding=how, compute_seconds=seconds)
        )

    def _of_ranges(self, request: PushRequest, ranges: Ranges) -> tuple[NDArray[Any], ...]:
        """The ranges of a push, and the gradient there. Raises NotFinite, InvalidArgument."""
        trained = self._opened.layout.trained_elements
        if request.encoding.codec is not Codec.F32:
            found = f"codec: found {request.encoding.codec.name} with ranges"
            raise InvalidArgument("push", f"{found}; expected F32")
        if not request.samples:
            return ()
        values = packed(self._values(request), ranges) if request.gradient is None else request.gradient
        size = int(np.minimum(ranges.sum(axis=1), trained).sum() - np.minimum(ranges[:, 0], trained).sum())
        if request.encoding.nonfinite == "error" and not np.isfinite(values[:size]).all():
            raise NotFinite("push", "the gradient has a value that is not finite")
        return ranges, values

    def _encode(
        self, values: Flat, how: Encoding, scale: float, staging: int
    ) -> tuple[NDArray[np.uint8], EncodeCounts]:
        """Codes of a gradient, with the residual if errors are fed back. Raises NotFinite."""
        if not how.error_feedback:
            return encode(values, how, scale=scale)
        old, new = self._residual.begin()
        try:
            codes = encode(values, how, scale=scale, residual=old, residual_out=new)
        except BaseException:
            self._residual.cancel()
            raise
        if self._keep_residual is not None:
            self._keep_residual(staging, new)
        return codes

    def _values(self, request: PushRequest) -> NDArray[Any]:
        """The push's fp32 numbers; of an encoded gradient only the averaged ones count."""
        if request.gradient is None or request.encoded:
            return self.staging(request.staging)
        return request.gradient

    def _without_gaps(self, request: PushRequest) -> Flat:
        """The gradient's values, zero where no parameter lies."""
        values: Flat = self._values(request)
        for a, b in self._gaps:
            if values[a:b].any():
                values = values.copy() if values is request.gradient else values
                values[a:b] = 0.0
        return values


def _bounded(timeout: float) -> float:
    return min(timeout, MAX_CALL_SECONDS)


def _gaps(tensors: Sequence[Tensor], elements: int) -> list[tuple[int, int]]:
    """Where no parameter lies: between the end of a group and that of its last chunk."""
    ends = sorted((t.offset, t.offset + t.elements) for t in tensors if t.elements)
    edges = [(0, 0), *ends, (elements, elements)]
    return [(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]]
