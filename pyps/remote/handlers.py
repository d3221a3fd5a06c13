"""What is done for a remote worker: the calls of pyps.remote.wire, on a handle of the store of its own.

A worker that was silent for so long that its deputy left is told that it is fenced, and may rejoin; one that
only looked goes on as if nothing had been.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyps import native
from pyps.errors import Busy, Fenced, InvalidArgument, PushRejected, SegmentNotFound, TimedOut
from pyps.native.values import (
    Advice,
    Claim,
    Codec,
    Config,
    Encoding,
    Flat,
    Layout,
    Member,
    PushRequest,
    RankCounters,
    Role,
    Status,
    Tensor,
)
from pyps.remote.framing import Pieces, check_size, fill
from pyps.remote.wire import PROTOCOL, VERBS, Gradient, Recipe, Welcome
from pyps.store.codec import decode, encoded_bytes
from pyps.store.policies import DCASGD

Numbers = NDArray[Any]
Reply = tuple[Any, tuple[Numbers, ...]]  # a value, and what follows the header
WITHOUT_STORE = ("hello", "create", "rejoin", "leave")


@dataclass(frozen=True)
class Site:
    """What every deputy of a server knows of it."""

    store: str
    server: bytes
    silence_seconds: float
    created: Callable[[], None]  # called once the store has been made through the link


@dataclass(frozen=True)
class Place:
    """What a client was in the store before its deputy left; `role` is None if it had not joined."""

    role: Role | None = None
    rank: int = -1


class Acts:
    """One participant of the store; public methods but `do` and `close` are the verbs of pyps.remote.wire.

    Not thread-safe. `numbers` are the pieces of what came with a call.
    """

    def __init__(self, site: Site, past: Place | None) -> None:
        self.place = past
        self._site = site
        self._late = past is not None and past.role is Role.WORKER
        self._pointer: native.Pointer | None = None
        self._layout: Layout | None = None
        self._staging: int | None = None  # handed out and not pushed
        self._reply: Numbers = np.empty(0)
        self._in_round = False  # its push timed out while the round was open
        self._pulled: Flat | None = None  # what DC-ASGD's next gradient was computed on

    def do(self, verb: str, arguments: msgspec.Raw, numbers: Pieces) -> Reply:
        """One call. Raises StoreError as pyps.native does, or msgspec's errors for wrong arguments."""
        if verb not in VERBS:
            raise InvalidArgument("call", f"verb: found {verb[:40]!r}; expected one of {', '.join(VERBS)}")
        values = VERBS[verb].arguments.decode(arguments)
        if self._late and verb not in ("rejoin", "leave"):
            silence = f"nothing was heard of this worker for {self._site.silence_seconds:g} s"
            raise Fenced(verb, f"{silence}: its samples went back")
        if verb not in WITHOUT_STORE and self._pointer is None:
            self._return()
        act: Callable[..., Reply] = getattr(self, verb)
        return act(*values, numbers) if verb in ("push", "exchange", "create") else act(*values)

    def close(self) -> None:
        """Leave the store; the place is remembered. Idempotent."""
        pointer, self._pointer = self._pointer, None
        self._staging, self._in_round = None, False
        if pointer is not None:
            native.close(pointer)

    @property
    def _store(self) -> native.Pointer:
        if self._pointer is None:
            raise InvalidArgument("call", "found no store open; expected `hello` first")
        return self._pointer

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            self._layout = native.get_layout(self._store)
        return self._layout

    def _return(self) -> None:
        """After its deputy left: the store again, and an observer's place."""
        if self.place is None:
            raise InvalidArgument("call", "found no store open; expected `hello` first")
        self._pointer = native.open_segment(self._site.store)
        if self.place.role is Role.OBSERVER:
            native.join(self._pointer, Role.OBSERVER, -1)

    def _check_caller(self, protocol: int, name: str) -> None:
        if protocol != PROTOCOL:
            raise InvalidArgument("hello", f"protocol: found {protocol}; expected {PROTOCOL}")
        if name != self._site.store:
            raise SegmentNotFound("hello", f"store: found {name[:80]!r}; this server's is another")
        if self._pointer is not None:
            raise InvalidArgument("hello", "found a second one; expected one for each session")

    def hello(self, protocol: int, name: str) -> Reply:
        self._check_caller(protocol, name)
        self._pointer = native.open_segment(name)
        self.place = Place()
        return self._welcome()

    def create(self, protocol: int, name: str, recipe: Recipe, numbers: Pieces) -> Reply:
        self._check_caller(protocol, name)
        sizes = [int(np.prod(tensor.shape, dtype=object)) for tensor in recipe.tensors]
        check_size("create", numbers, 4 * sum(sizes))  # before there is memory for it
        parts = tuple(np.empty(size, np.float32) for size in sizes)
        fill("create", numbers, *parts)
        options = {field: getattr(recipe, field) for field in recipe.__struct_fields__}
        self._pointer = native.create(name, Config(initial=parts, **options))
        self.place = Place()
        self._site.created()
        return self._welcome()

    def _welcome(self) -> Reply:
        tensors: list[Tensor] = [native.get_tensor(self._store, k) for k in range(self.layout.tensors)]
        site = self._site
        return Welcome(site.server, site.silence_seconds, self.layout, tuple(tensors)), ()

    def join(self, role: Role, rank: int) -> Reply:
        """A rank whose worker has died is free only once its silence was noticed: so long one waits."""
        deadline = time.monotonic() + 1.5 * self._site.silence_seconds
        while True:
            sequence = native.get_status(self._store).sequence
            try:
                got = native.join(self._store, role, rank)
                break
            except Busy:
                if (left := deadline - time.monotonic()) <= 0.0:
                    raise
                with contextlib.suppress(TimedOut):
                    native.wait(self._store, sequence, left)
        self.place, self._staging, self._in_round = Place(role, got), None, False
        return got, ()

    def leave(self) -> Reply:
        if self._pointer is not None:
            native.leave(self._pointer)
        self.place, self._late, self._staging = Place(), False, None
        return None, ()

    def rejoin(self) -> Reply:
        if not self._late:
            native.rejoin(self._store)
        elif self.place is not None and self.place.role is not None:
            pointer = native.open_segment(self._site.store)
            try:
                native.join(pointer, self.place.role, self.place.rank)
            except BaseException:
                native.close(pointer)
                raise
            self._pointer, self._late = pointer, False
        self._staging, self._in_round = None, False
        return None, ()

    def reap(self) -> Reply:
        return native.reap(self._store), ()

    def start(self, timeout: float) -> Reply:
        claim: Claim = native.start(self._store, timeout)
        return claim, ()

    def start_ahead(self) -> Reply:
        claim: Claim = native.start_ahead(self._store)
        return claim, ()

    def _room(self, kind: type[np.generic], size: int) -> Numbers:
        """Memory for a reply's numbers, used again: whoever calls anew has read the reply before."""
        if self._reply.dtype != kind or self._reply.size != size:
            self._reply = np.empty(size, kind)
        return self._reply

    def pull(self) -> Reply:
        flat = self._room(np.float32, self.layout.flat_elements)
        version = native.pull(self._store, flat)
        self._remember(flat)
        return version, (flat,)

    def _remember(self, flat: Flat) -> None:
        """The worker's copy need not travel back with its gradient."""
        if self.layout.policy == DCASGD.number:
            self._pulled = flat.copy()

    def pull_encoded(self, codec: Codec) -> Reply:
        data = self._room(np.uint8, encoded_bytes(codec, self.layout.flat_elements))
        version = native.pull_encoded(self._store, codec, data)
        if self.layout.policy == DCASGD.number:
            self._remember(decode(data, codec, self.layout.flat_elements))
        return version, (data,)

    def push(self, gradient: Gradient, numbers: Pieces) -> Reply:
        result = self._pushed(gradient, numbers, lambda push: native.push(self._store, push))
        return result, ()

    def exchange(self, gradient: Gradient, back: Codec, numbers: Pieces) -> Reply:
        if back is not Codec.F32:
            result = self._pushed(gradient, numbers, lambda push: native.push(self._store, push))
            version, frames = self.pull_encoded(back)
            return (result, version), frames
        flat = self._room(np.float32, self.layout.flat_elements)
        both = self._pushed(gradient, numbers, lambda push: native.exchange(self._store, push, flat))
        self._remember(flat)
        return both, (flat,)

    def _pushed(self, g: Gradient, numbers: Pieces, act: Callable[[PushRequest], Any]) -> Any:
        """Bring the gradient to a staging buffer and push it.

        A push whose round did not close in time is resumed by the next call: its gradient stands already.
        """
        if len(g.hyper) != self.layout.groups:
            found = f"hyper: found {len(g.hyper)}; expected {self.layout.groups}, one for each group"
            raise InvalidArgument("push", found)
        if self._staging is None:
            self._staging = native.stage(self._store, g.timeout)
        encoded = g.codec is not Codec.F32 and g.samples > 0
        if g.samples and not self._in_round:
            self._fill(self._staging, g.codec, numbers)
        how = Encoding(g.codec if encoded else Codec.F32)
        more = (self._pulled, g.grad_norm_squared)
        push = PushRequest(self._staging, g.samples, g.hyper, g.scale, g.timeout, how, None, encoded, *more)
        try:
            result = act(push)
        except TimedOut:
            self._in_round = True
            raise
        except (Fenced, PushRejected):
            self._staging, self._in_round = None, False
            raise
        self._staging, self._in_round = None, False
        return result

    def _fill(self, staging: int, codec: Codec, numbers: Pieces) -> None:
        elements = self.layout.flat_elements
        if codec is Codec.F32:
            flat, _ = native.staging(self._store, staging, elements)
            fill("push", numbers, flat)
        else:
            size = encoded_bytes(codec, elements)
            codes, _ = native.staging_codes(self._store, staging, size)
            fill("push", numbers, codes)

    def should_continue(self, done: int, following: int) -> Reply:
        advice = native.should_continue(self._store, done, following)
        if advice is Advice.ABORT:  # the store has taken its staging buffers back
            self._staging, self._in_round = None, False
        return advice, ()

    def set_max_samples(self, most: int) -> Reply:
        native.set_max_samples(self._store, most)
        return None, ()

    def get_policy_params(self) -> Reply:
        return native.get_policy_params(self._store), ()

    def snapshot(self, states: int, timeout: float) -> Reply:
        layout = self.layout
        if states not in (0, layout.states):
            raise InvalidArgument("snapshot", f"states: found {states}; expected 0 or {layout.states}")
        vectors = [np.empty(layout.flat_elements, np.float32) for _ in range(1 + states)]
        steps = np.empty(layout.chunks, np.uint64)
        version = native.snapshot(self._store, vectors[0], vectors[1:], steps, timeout)
        return version, (*vectors, steps)

    def get_status(self) -> Reply:
        status: Status = native.get_status(self._store)
        return status, ()

    def get_members(self) -> Reply:
        members: list[Member] = native.get_members(self._store, self.layout.max_participants)
        return members, ()

    def get_ranks(self) -> Reply:
        ranks: list[RankCounters] = native.get_ranks(self._store, self.layout.ranks)
        return ranks, ()

    def replan(self, batches: tuple[int, ...]) -> Reply:
        native.replan(self._store, batches)
        return None, ()

    def wait(self, sequence: int, timeout: float) -> Reply:
        native.wait(self._store, sequence, timeout)
        return None, ()
