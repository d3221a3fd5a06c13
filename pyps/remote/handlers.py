"""Handlers of a remote worker's calls (pyps.remote.wire), each session on its own handle of the store.

A worker that was silent for too long has left the store: its next call raises Fenced, and it may rejoin. An
observer that was silent goes on unchanged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

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
    TimedOut,
)
from pyps.formats.mode import MAX_DEPTH
from pyps.formats.turns import TurnSchedule
from pyps.native.local import LocalBackend
from pyps.native.ranges import Packer, elements
from pyps.native.values import (
    Advice,
    Claim,
    Codec,
    Config,
    CostModel,
    DataSet,
    Encoding,
    Flat,
    Layout,
    PushRequest,
    Role,
)
from pyps.remote.creation import created_arrays
from pyps.remote.framing import Frames, Reply, ReplyBuffers, check_size, from_frames
from pyps.remote.parts import packed, sent_ranges
from pyps.remote.shard_handlers import VERBS_OF_SHARDS, WITHOUT_HEAD, ShardCalls
from pyps.remote.site import Site
from pyps.remote.wire import (
    PROTOCOL,
    VERBS,
    WITH_NUMBERS,
    OpenReply,
    PushHeader,
    TransferHeader,
    TransferReply,
)
from pyps.step.transfer import Ask, Transfers, Verb
from pyps.store.codec import decode_vector, encoded_bytes, encoded_vector_bytes

KEPT_VERSIONS = MAX_DEPTH + 1  # pulled ones, at most: a pipeline computes on earlier ones
WITHOUT_STORE = ("hello", "create", "rejoin", "leave", *WITHOUT_HEAD)


@dataclass(frozen=True)
class Place:
    """What a client was in the store before its session left; `role` is None if it had not joined."""

    role: Role | None = None
    rank: int = -1


class Handlers:
    """One participant of the store. Public methods other than `do` and `close` are the verbs of the link.

    Not thread-safe. `numbers` are the frames that came with a call.
    """

    def __init__(self, site: Site, past: Place | None) -> None:
        self.place = past
        self._site = site
        self._late = past is not None and past.role is not None and past.role is not Role.OBSERVER
        self._backend: LocalBackend | None = None
        self._staging: int | None = None  # handed out and not pushed
        self.replies = ReplyBuffers()
        self._transfers = Transfers()
        self._in_round = False  # its push timed out while the round was open
        self._pulled: dict[int, Flat] = {}  # by version, the last ones at the end
        self._shards = ShardCalls(site, lambda: self._store)

    def do(self, verb: str, arguments: msgspec.Raw, numbers: Frames) -> Reply:
        """One call. Raises StoreError as pyps.native does, or msgspec's errors for wrong arguments."""
        if verb not in VERBS:
            raise InvalidArgument("call", f"verb: found {verb[:40]!r}; expected one of {', '.join(VERBS)}")
        values = VERBS[verb].arguments.decode(arguments)
        if self._late and verb not in ("rejoin", "leave"):
            raise self.late(verb)
        self._shards.head.check()
        if verb not in WITHOUT_STORE and self._backend is None:
            self._return()
        handler: Callable[..., Reply] = getattr(self._shards if verb in VERBS_OF_SHARDS else self, verb)
        return handler(*values, numbers) if verb in WITH_NUMBERS else handler(*values)

    def late(self, verb: str) -> StoreError:
        """The error of a call that a silent client's end interrupted: a worker has to rejoin."""
        silence = f"nothing was heard of this client for {self._site.client_timeout_seconds:g} s"
        if self.place is not None and self.place.role in (Role.WORKER, Role.NEW_WORKER):
            return Fenced(verb, f"{silence}: its samples went back")
        return TimedOut(verb, silence)

    def close(self) -> None:
        """Leave the store; the place is remembered. Idempotent."""
        self._shards.head.forget()
        backend, self._backend = self._backend, None
        self._staging, self._in_round = None, False
        if backend is not None:
            backend.close()
        self._shards.head.close()

    @property
    def _store(self) -> LocalBackend:
        if self._backend is None:
            raise InvalidArgument("call", "found no store open; expected `hello` first")
        return self._backend

    @property
    def layout(self) -> Layout:
        return self._store.layout

    def _return(self) -> None:
        """After the session left: open the store again, and give an observer its place."""
        if self.place is None:
            raise InvalidArgument("call", "found no store open; expected `hello` first")
        self._backend = LocalBackend.open(self._site.store)
        if self.place.role is Role.OBSERVER:
            self._backend.join(Role.OBSERVER, -1)

    def _check_caller(self, protocol: int, name: str) -> None:
        if protocol != PROTOCOL:
            raise InvalidArgument("hello", f"protocol: found {protocol}; expected {PROTOCOL}")
        if name != self._site.store:
            raise SegmentNotFound("hello", f"store: found {name[:80]!r}; this server's is another")
        if self._backend is not None:
            raise InvalidArgument("hello", "found a second one; expected one for each session")

    def hello(self, protocol: int, name: str) -> Reply:
        self._check_caller(protocol, name)
        self._backend = LocalBackend.open(name)
        self.place = Place()
        return self._opened()

    def create(self, protocol: int, name: str, request_bytes: int, numbers: Frames) -> Reply:
        self._check_caller(protocol, name)
        request, initial, state = created_arrays(request_bytes, numbers)
        options = {f.name: getattr(request, f.name) for f in fields(Config) if f.name != "initial"}
        self._backend = LocalBackend.create(name, Config(initial=initial, **options), state)
        self.place = Place()
        self._site.created()
        self._site.shards.open_log()
        self._shards.head.created()
        return self._opened()

    def _opened(self) -> Reply:
        self._site.opened(self.layout)
        site, store = self._site, self._store
        return OpenReply(
            site.server, site.client_timeout_seconds, store.layout, store.tensors, store.policy_params
        ), ()

    def join(self, role: Role, rank: int) -> Reply:
        """Join, waiting for a rank whose worker has died until its silence was noticed."""
        deadline = time.monotonic() + 1.5 * self._site.client_timeout_seconds
        while True:
            sequence = self._store.status().sequence
            try:
                got = self._store.join(role, rank)
                break
            except Busy:
                if (left := deadline - time.monotonic()) <= 0.0:
                    raise
                with contextlib.suppress(TimedOut):
                    self._store.wait(sequence, left)
        self.place, self._staging, self._in_round = Place(role, got), None, False
        return got, ()

    def leave(self) -> Reply:
        self._shards.head.forget()
        if self._backend is not None:
            self._backend.leave()
        self.place, self._late, self._staging = Place(), False, None
        return None, ()

    def rejoin(self) -> Reply:
        if not self._late:
            self._store.rejoin()
        elif self.place is not None and self.place.role is not None:
            backend = LocalBackend.open(self._site.store)
            try:
                backend.join(self.place.role, self.place.rank)
            except BaseException:
                backend.close()
                raise
            self._backend, self._late = backend, False
        self._staging, self._in_round = None, False
        self._transfers.begin_again()
        self._shards.head.forget()
        return None, ()

    def reap(self) -> Reply:
        return self._store.reap(), ()

    def start(self, timeout: float) -> Reply:
        self._transfers.begin_again()
        self._shards.head.start()
        claim: Claim = self._store.start(timeout)
        return claim, ()

    def start_ahead(self) -> Reply:
        claim: Claim = self._store.start_ahead()
        return claim, ()

    def pull(self, count: int | None = None, numbers: Frames = ()) -> Reply:
        """count: of the ranges; None: all parameters."""
        if count is not None:
            return self._pull_ranges(count, numbers)
        check_size("pull", numbers, 0)
        flat = self.replies.take(np.float32, self.layout.flat_elements)
        version = self._store.pull(flat)
        self._keep_pulled(version, flat)
        return version, (flat,)

    def _pull_ranges(self, count: int, numbers: Frames) -> Reply:
        parts, rest = sent_ranges("pull", count, numbers, self.layout.flat_elements)
        check_size("pull", rest, 0)
        out = self.replies.take(np.float32, elements("pull", parts, self.layout.flat_elements))
        return self._store.pull(out, parts), (out,)

    def read(self, count: int, timeout: float, numbers: Frames) -> Reply:
        parts, rest = sent_ranges("read", count, numbers, self.layout.flat_elements)
        check_size("read", rest, 0)
        out = self.replies.take(np.float32, elements("read", parts, self.layout.flat_elements))
        return self._store.read(Packer(parts, out), parts, timeout), (out,)

    def pull_encoded(self, codec: Codec) -> Reply:
        data = self.replies.take(np.uint8, encoded_vector_bytes(codec, self.layout))
        version = self._store.pull_encoded(codec, data)
        if self._needs_base_params:
            self._keep_pulled(version, decode_vector(data, codec, self.layout))
        return version, (data,)

    @cached_property
    def _needs_base_params(self) -> bool:
        return native.policy_needs(self.layout.policy, self._store.policy_params).needs_base_params

    def _keep_pulled(self, version: int, flat: Flat) -> None:
        """Where the policy needs base parameters, they need not travel back with their gradient."""
        if self._needs_base_params:
            self._pulled.pop(version, None)
            self._pulled[version] = flat.copy()
            while len(self._pulled) > KEPT_VERSIONS:
                del self._pulled[next(iter(self._pulled))]

    def _base_params(self, version: int | None) -> Flat | None:
        """The parameters of a version that this worker has pulled; None: of the last one."""
        if not self._pulled:
            return None
        wanted = next(reversed(self._pulled)) if version is None else version
        if (found := self._pulled.get(wanted)) is None:
            kept = ", ".join(map(str, self._pulled))
            raise InvalidArgument("push", f"base_version: found {version}; expected one pulled last: {kept}")
        self._pulled = {v: flat for v, flat in self._pulled.items() if v >= wanted}  # later pushes' bases
        return found

    def push(self, header: PushHeader, numbers: Frames) -> Reply:
        result = self._pushed(header, numbers, lambda request: self._store.push(request))
        return result, ()

    def exchange(self, header: PushHeader, back: Codec, numbers: Frames) -> Reply:
        if back is not Codec.F32:
            (result, _), (version, frames) = self.push(header, numbers), self.pull_encoded(back)
            return (result, version), frames
        flat = self.replies.take(np.float32, self.layout.flat_elements)
        both = self._pushed(header, numbers, lambda request: self._store.exchange(request, flat))
        self._keep_pulled(both[1], flat)
        return both, (flat,)

    def transfer(self, header: TransferHeader, numbers: Frames) -> Reply:
        """Push, claim ahead and pull, as pyps.step.transfer has it."""

        def limit() -> None:
            if header.max_samples is not None:
                self._store.set_max_samples(header.max_samples)

        def exchange() -> tuple[Any, Reply | None]:
            if header.codec is not Codec.F32:
                return self.push(header.push, numbers)[0], None
            (result, version), frames = self.exchange(header.push, header.codec, numbers)
            return result, (version, frames)

        done = self._transfers.run(
            Ask(header.exchange, header.claims),
            {
                Verb.LIMIT: limit,
                Verb.PUSH: lambda: self.push(header.push, numbers)[0],
                Verb.EXCHANGE: exchange,
                Verb.CLAIM: lambda: claim if (claim := self._store.start_ahead()).count else None,
                Verb.PULL: lambda: self._pull_as(header.codec),
            },
        )
        version, frames = done.pulled or (None, ())
        return TransferReply(done.result, done.claims, version, done.push_seconds), frames

    def _pull_as(self, codec: Codec) -> Reply:
        return self.pull() if codec is Codec.F32 else self.pull_encoded(codec)

    def _pushed(self, header: PushHeader, numbers: Frames, send: Callable[[PushRequest], Any]) -> Any:
        """Copy the gradient to a staging buffer and push it.

        The next call resumes a push that timed out in an open round: its gradient is already staged.
        """
        if self._site.shards.has_log:
            raise InvalidArgument(
                "push", "found a model over several servers; expected its parts and a commit"
            )
        if len(header.hyper) != self.layout.groups:
            found = f"hyper: found {len(header.hyper)}; expected {self.layout.groups}, one for each group"
            raise InvalidArgument("push", found)
        if self._staging is None:
            self._staging = self._store.stage(native.timeout_seconds(header.timeout))
        codec = header.encoding.codec if header.samples else Codec.F32
        fields = {name: getattr(header, name) for name in header.__struct_fields__}
        fields |= {"encoding": Encoding(codec, nonfinite=header.encoding.nonfinite), "ranges": None}
        fields["base_params"] = self._base_params(header.base_version) if header.samples else None
        if header.samples and header.ranges is not None:
            fields |= self._of_ranges(header.ranges, codec, fields["base_params"], numbers)
        elif header.samples and not self._in_round:
            self._fill(self._staging, codec, numbers)
        request = PushRequest(self._staging, **fields, encoded=codec is not Codec.F32)
        try:
            result = send(request)
        except TimedOut:
            self._in_round = True
            raise
        except (Fenced, PushRejected):
            self._staging, self._in_round = None, False
            raise
        self._staging, self._in_round = None, False
        return result

    def _of_ranges(self, count: int, codec: Codec, base: Flat | None, numbers: Frames) -> dict[str, Any]:
        """The fields of a push whose gradient is of ranges."""
        if codec is not Codec.F32:
            raise InvalidArgument("push", f"codec: found {codec.name} with ranges; expected F32")
        parts, rest = sent_ranges("push", count, numbers, self.layout.flat_elements)
        gradient = np.empty(elements("push", parts, self.layout.flat_elements), np.float32)
        from_frames("push", rest, gradient)
        return {
            "ranges": parts,
            "gradient": gradient,
            "base_params": None if base is None else packed(base, parts),
        }

    def _fill(self, staging: int, codec: Codec, numbers: Frames) -> None:
        flat = self._store.staging(staging)
        if codec is Codec.F32:
            from_frames("push", numbers, flat)
        else:
            trained = self.layout.trained_elements
            codes = self._store.staging_codes(staging, encoded_bytes(codec, trained))
            from_frames("push", numbers, codes, flat[trained:])

    def should_continue(self, done: int, following: int) -> Reply:
        advice = self._store.should_continue(done, following)
        if advice is Advice.ABORT:  # the store has taken its staging buffers back
            self._staging, self._in_round = None, False
            self._shards.head.abandon()
        return advice, ()

    def set_max_samples(self, most: int) -> Reply:
        self._store.set_max_samples(most)
        return None, ()

    def set_data_set(self, data: DataSet) -> Reply:
        self._store.set_data_set(data)
        return None, ()

    def snapshot(self, states: int, timeout: float) -> Reply:
        layout = self.layout
        if states not in (0, layout.states):
            raise InvalidArgument("snapshot", f"states: found {states}; expected 0 or {layout.states}")
        vectors = [np.empty(layout.flat_elements, np.float32) for _ in range(1 + states)]
        steps = np.empty(layout.chunks, np.float64)
        version = self._store.snapshot(vectors[0], vectors[1:], steps, timeout)
        self._keep_pulled(version, vectors[0])
        return version, (*vectors, steps)

    def state(self, timeout: float) -> Reply:
        found = self._store.state(timeout)
        ranks = tuple(found.residuals)
        return (found.header, ranks), (found.parameters, *found.vectors, *found.residuals.values())

    def status(self) -> Reply:
        return self._store.status(), ()

    def members(self) -> Reply:
        return self._store.members(), ()

    def ranks(self) -> Reply:
        return self._store.ranks(), ()

    def costs(self) -> Reply:
        return self._store.costs(), ()

    def set_cost_model(self, model: CostModel) -> Reply:
        self._store.set_cost_model(model)
        return None, ()

    def hyper(self) -> Reply:
        return self._store.hyper(), ()

    def replan(self, batches: tuple[int, ...], plan: int | None) -> Reply:
        self._store.replan(batches, plan)
        return None, ()

    def set_schedule(self, schedule: TurnSchedule) -> Reply:
        self._store.set_schedule(schedule)
        return None, ()

    def wait(self, sequence: int, timeout: float) -> Reply:
        self._store.wait(sequence, timeout)
        return None, ()
