"""pyps.native's functions on a store, over a link: the same names, arguments and results.

Staging buffers are this process's own memory. What is encoded is encoded here, and what the code does not
carry (error feedback) is kept here too, for this process's next gradient: another process that inherits the
rank begins without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.native.values import (
    Advice,
    Claim,
    Codec,
    Config,
    Flat,
    Layout,
    Member,
    PolicyParams,
    PushRequest,
    PushResult,
    RankCounters,
    Role,
    Status,
    Tensor,
)
from pyps.remote.address import Address, parse_address
from pyps.remote.client import Client
from pyps.remote.framing import Pieces, fill
from pyps.remote.wire import MAX_CALL_SECONDS, PROTOCOL, Gradient, Recipe, Welcome
from pyps.store.codec import decode, encode, encoded_bytes


class _Nothing:
    pass


UNMAPPED: weakref.ref[Any] = weakref.ref(_Nothing())  # dead: no view needs a segment to stay mapped


class Calls:
    """An open remote store. Not thread-safe: pyps.Store makes one call at a time."""

    def __init__(self, address: str, config: Config | None = None) -> None:
        """config: of a store to create there; None: to open the one that is there."""
        self.address: Address = parse_address(address)
        self.client = Client(self.address)
        try:
            self._welcome = self._open() if config is None else self._create(config)
        except BaseException:
            self.client.close()
            raise
        self.client.know(self._welcome.server, self._welcome.silence_seconds)
        self._gaps = _gaps(self._welcome.tensors, self._welcome.layout.flat_elements)
        self._staging_buffers: dict[int, Flat] = {}
        self._codes: NDArray[np.uint8] | None = None
        self._back = np.empty(0, np.uint8)
        self._residual: Flat | None = None
        self._rest: Flat | None = None  # the next residual, while a push is under way
        self._next_staging = 0

    def _open(self) -> Welcome:
        welcome: Welcome = self.client.call("hello", PROTOCOL, self.address.store)[0]
        return welcome

    def _create(self, config: Config) -> Welcome:
        options = {field: getattr(config, field) for field in Recipe.__struct_fields__}
        values = np.concatenate([np.ravel(a) for a in config.initial] or [np.empty(0, np.float32)])
        create = ("create", PROTOCOL, self.address.store, Recipe(**options))
        welcome: Welcome = self.client.call(*create, numbers=values)[0]
        return welcome

    def close(self) -> None:
        """Leave and hang up."""
        self.client.close()

    def get_layout(self) -> Layout:
        return self._welcome.layout

    def get_tensor(self, index: int) -> Tensor:
        return self._welcome.tensors[index]

    def join(self, role: Role, rank: int) -> int:
        return int(self.client.call("join", role, rank)[0])

    def leave(self) -> None:
        self.client.call("leave")

    def rejoin(self) -> None:
        self.client.call("rejoin")

    def reap(self) -> int:
        return int(self.client.call("reap")[0])

    def start(self, timeout: float) -> Claim:
        claim: Claim = self.client.call("start", _bounded(timeout))[0]
        return claim

    def start_ahead(self) -> Claim:
        claim: Claim = self.client.call("start_ahead")[0]
        return claim

    def pull(self, flat: Flat) -> int:
        if self.address.pull is Codec.F32:
            version, found = self.client.call("pull")
        else:
            version, found = self.client.call("pull_encoded", self.address.pull)
        self._receive("pull", found, flat)
        return int(version)

    def pull_encoded(self, codec: Codec, out: NDArray[np.uint8]) -> int:
        version, found = self.client.call("pull_encoded", codec)
        fill("pull", found, out)
        return int(version)

    def stage(self, timeout: float) -> int:
        """The next area in turn: none is still read when a call has returned."""
        staging, self._next_staging = (
            self._next_staging,
            (self._next_staging + 1) % self._welcome.layout.staging_buffers,
        )
        return staging

    def staging(self, staging: int, elements: int) -> tuple[Flat, weakref.ref[Any]]:
        flat = self._staging_buffers.get(staging)
        if flat is None:
            flat = self._staging_buffers[staging] = np.zeros(elements, np.float32)
        view = flat[:]  # a later holder of the staging buffer gets one that may be written again
        return view, UNMAPPED

    def staging_codes(self, staging: int, size: int) -> tuple[NDArray[np.uint8], weakref.ref[Any]]:
        self._codes = np.empty(size, np.uint8)
        return self._codes, UNMAPPED

    def push(self, push: PushRequest) -> PushResult:
        gradient, numbers, counts = self._gradient(push)
        result: PushResult = self.client.call("push", gradient, numbers=numbers)[0]
        self._admitted()
        return replace(result, nonfinite=counts[0], blocks_skipped=counts[1])

    def exchange(self, push: PushRequest, flat: Flat) -> tuple[PushResult, int]:
        gradient, numbers, counts = self._gradient(push)
        back = self.address.pull
        (result, version), found = self.client.call("exchange", gradient, back, numbers=numbers)
        self._admitted()
        self._receive("exchange", found, flat)
        return replace(result, nonfinite=counts[0], blocks_skipped=counts[1]), int(version)

    def should_continue(self, done: int, following: int) -> Advice:
        advice: Advice = self.client.call("should_continue", done, following)[0]
        return advice

    def set_max_samples(self, most: int) -> None:
        self.client.call("set_max_samples", most)

    def get_policy_params(self) -> PolicyParams:
        rules: PolicyParams = self.client.call("get_rules")[0]
        return rules

    def snapshot(self, flat: Flat, state: Sequence[Flat], steps: NDArray[np.uint64], timeout: float) -> int:
        version, found = self.client.call("snapshot", len(state), _bounded(timeout))
        fill("snapshot", found, flat, *state, steps)
        return int(version)

    def get_status(self) -> Status:
        status: Status = self.client.call("get_status")[0]
        return status

    def get_members(self, capacity: int) -> list[Member]:
        members: list[Member] = self.client.call("get_members")[0]
        return members[:capacity]

    def get_ranks(self, ranks: int) -> list[RankCounters]:
        counters: list[RankCounters] = self.client.call("get_ranks")[0]
        return counters[:ranks]

    def replan(self, batches: Sequence[int]) -> None:
        self.client.call("replan", tuple(int(b) for b in batches))

    def wait(self, sequence: int, timeout: float) -> None:
        self.client.call("wait", sequence, _bounded(timeout))

    def _receive(self, what: str, found: Pieces, flat: Flat) -> None:
        """Parameters, as they came back, to `flat`."""
        if self.address.pull is Codec.F32:
            fill(what, found, flat)
            return
        size = encoded_bytes(self.address.pull, flat.size)
        if self._back.size != size:
            self._back = np.empty(size, np.uint8)
        fill(what, found, self._back)
        decode(self._back, self.address.pull, flat.size, flat)

    def _gradient(self, push: PushRequest) -> tuple[Gradient, NDArray[Any] | None, tuple[int, int]]:
        """What is sent for a push: its constants, its numbers, and what was not finite among them."""
        how, scale, counts = push.encoding, push.scale, (0, 0)
        numbers: NDArray[Any] | None = None
        self._rest = None
        if push.samples == 0:
            pass  # the gradient is not looked at
        elif push.encoded:
            numbers = self._codes
        elif how.codec is Codec.F32:
            numbers = self._values(push)
        else:
            values = self._values(push)
            for a, b in self._gaps:
                if values[a:b].any():
                    values = values.copy() if values is push.gradient else values
                    values[a:b] = 0.0
            self._rest = np.empty_like(values) if how.error_feedback else None
            numbers, found = encode(
                values, how, scale=scale, residual=self._residual if how.error_feedback else None,
                residual_out=self._rest,
            )  # fmt: skip
            scale, counts = 1.0, (found.nonfinite, found.blocks_skipped)
        timeout = _bounded(push.timeout)
        gradient = Gradient(push.samples, push.hyper, scale, timeout, how.codec, push.grad_norm_squared)
        return gradient, numbers, counts

    def _values(self, push: PushRequest) -> Flat:
        return self._staging_buffers[push.staging] if push.gradient is None else push.gradient

    def _admitted(self) -> None:
        """The push was taken: what its code did not carry goes with the next one."""
        if self._rest is not None:
            self._residual, self._rest = self._rest, None


def _bounded(timeout: float) -> float:
    return min(timeout, MAX_CALL_SECONDS)


def _gaps(tensors: Sequence[Tensor], elements: int) -> list[tuple[int, int]]:
    """Where no parameter lies: between the end of a group and that of its last chunk."""
    ends = sorted((t.offset, t.offset + t.elements) for t in tensors if t.elements)
    edges = [(0, 0), *ends, (elements, elements)]
    return [(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]]
