"""A shard at its server: an ordinary store, and the one thread that changes it.

The thread follows the first server's decisions (pyps.shards.decisions) and applies the gradients that were
sent here in the order of their tickets, so the store's version is the last ticket applied. Between two of
them it copies what clients have pinned. A server that was killed goes on where its store is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyps import native
from pyps.errors import (
    Busy,
    Fenced,
    InvalidArgument,
    LinkLost,
    LinkRefused,
    NotFinite,
    OutOfSpace,
    PypsError,
    StoreError,
    TimedOut,
    shown,
)
from pyps.native.local import LocalBackend
from pyps.native.state import StoreState
from pyps.native.values import Codec, Config, Encoding, Flat, PushRequest, Role, Tag
from pyps.remote.bounds import memory_share
from pyps.remote.framing import Frames, check_size
from pyps.remote.parts import SCALE_BLOCK, Extents
from pyps.remote.wire import PushHeader
from pyps.shards.decisions import Decisions
from pyps.shards.proofs import proof, receipt, same
from pyps.shards.staged import StagedFile, StagedGradients
from pyps.shards.verbs import LogEntry, LogKind
from pyps.store.codec import encoded_vector_bytes
from pyps.store.marks import run_and_servers, seal_of
from pyps.store.segments import staged_paths

MAX_STAGED = 16  # gradients of one client that wait for a decision
MAX_PINS = 16  # copies that one client has not fetched
KEPT_TAGS = 1024  # of copies that had to go
POLL_SECONDS = 0.25  # of the log
RETRY_SECONDS = 0.05, 1.0  # until the first server is there again
WAIT_SECONDS = 120.0  # for a decision that has been taken to come here


class LogSource(Protocol):
    """Where a log is."""

    def connect(self) -> Decisions:
        """The log. Raises Busy, LinkLost, LinkRefused or TimedOut while it is not there."""

    def stop(self) -> None:
        """End what waits for the log, in any thread, with LinkLost."""

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Pinned:
    """One version of a shard: parameters, and if asked for the optimizer's vectors and steps a chunk."""

    version: int
    flat: Flat
    states: tuple[Flat, ...] = ()
    steps: NDArray[np.float64] | None = None

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return (self.flat, *self.states) if self.steps is None else (self.flat, *self.states, self.steps)


def create_shard(name: str, config: Config, state: StoreState | None) -> None:
    """Make a shard's segment. Raises as pyps.native.create.create."""
    LocalBackend.create(name, config, state).close()
    for path in staged_paths(name):  # of an earlier run
        path.unlink(missing_ok=True)


class ShardStore:
    """The shard of this name, open in this server."""

    def __init__(self, name: str, index: int, source: LogSource) -> None:
        self.name, self.index = name, index
        self._source = source
        self._applier = LocalBackend.open(name)
        try:
            self._applier.join(Role.WORKER, 0)
            self._applier.reap()
            self.layout, self.tensors = self._applier.layout, self._applier.tensors
            self.extents = Extents.of(self.tensors, self.layout)
            self.policy_params = self._applier.policy_params
            self._watcher = LocalBackend.open(name)  # pulls what is there, without looking ahead
            self._watcher.join(Role.OBSERVER, -1)
            marked = run_and_servers(self.tensors)
            if marked is None:
                raise InvalidArgument("shard", f"store {name!r}: found one that is not a shard")
            self._staged = StagedGradients(name, 4 * self.layout.flat_elements)
        except BaseException:
            self._applier.close()
            raise
        self.run, self.servers = marked
        self.seal = seal_of(self.tensors)
        self.version = self._applier.status().version
        self._changed = threading.Condition()  # guards what follows, and the staged gradients
        self._filling: dict[int, int] = {}  # by client: gradients that are being written
        self._pins: dict[Tag, Pinned] = {}
        self._gone: deque[Tag] = deque(maxlen=KEPT_TAGS)  # pins whose copies were too much
        self.most_pinned = memory_share()  # bytes
        self._log = self._index = 0  # the log that was read last, and how far
        self._live: dict[int, tuple[bytes, ...]] = {}  # the log's clients, and the newest that it has had
        self._newest = 0
        self.fault: PypsError | None = None  # for clients: their calls fail, and none may open the shard
        self._closed = False
        self._said = ""  # why there is no log, as last reported
        self._thread = threading.Thread(target=self._follow, name="pyps-shard", daemon=True)
        self._thread.start()

    def close(self, remove: bool) -> None:
        """Stop; remove: the segment too. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._source.stop()
        self._thread.join()
        self._source.close()
        self._staged.close(remove)
        self._watcher.close()
        if remove:
            with suppress(StoreError):
                self._applier.remove()
        self._applier.close()

    def stage(self, session: bytes, tag: Tag, header: PushHeader, numbers: Frames) -> bytes:
        """Keep a gradient until it is decided on; a receipt of it. session: the caller's.

        Raises InvalidArgument, NotFinite, OutOfSpace, TimedOut, and Fenced for a client that has left the
        first server: nothing says when its gradient can go.
        """
        self._check_header(header)
        codec, extents = header.encoding.codec, self.extents
        check_size("push", numbers, extents.size(codec))
        size = encoded_vector_bytes(codec, self.layout)
        with self._place_of(session, tag[0]) as file:
            file.fill(tag, header, size, lambda out: extents.fill("push", numbers, (out,), codec=codec))
            try:
                self._check_finite(header, file.numbers)
            except NotFinite:
                file.clear()
                raise
        return receipt(self.seal, self.index, tag)

    @contextmanager
    def _place_of(self, session: bytes, client: int) -> Iterator[StagedFile]:
        deadline = time.monotonic() + WAIT_SECONDS
        with self._changed:
            self._wait("push", deadline, lambda: self._may_stage(session, client))
            file = self._staged.free()
            self._filling[client] = self._filling.get(client, 0) + 1
        try:
            yield file
        finally:
            with self._changed:
                self._filling[client] -= 1
                if not self._filling[client]:
                    del self._filling[client]
                if client not in self._live:
                    file.clear()
                self._staged.give_back(file)
                self._changed.notify_all()
        with self._changed:
            self._is_there("push", session, client)

    def _may_stage(self, session: bytes, client: int) -> bool:
        return self._is_there("push", session, client) and self._held_by(client) < MAX_STAGED

    def _is_there(self, what: str, session: bytes, client: int) -> bool:
        """Return whether the log has this client yet. Raises Fenced once it has left, and InvalidArgument
        where the session is not this client's.
        """
        known = self._live.get(client)
        if known is None and client <= self._newest:
            raise Fenced(what, "this client has left the first server")
        if known is not None and not same(known[self.index], proof(session)):
            raise InvalidArgument(what, "tag: found another client's number; expected the session's own")
        return known is not None

    def _held_by(self, client: int) -> int:
        return self._filling.get(client, 0) + sum(tag[0] == client for tag in self._staged.tags())

    def _check_header(self, header: PushHeader) -> None:
        groups = self.layout.groups
        if len(header.hyper) != groups or not header.samples or header.ranges is not None:
            found = f"{len(header.hyper)} hyper, {header.samples} samples"
            expected = f"{groups}, some samples, and no ranges"
            raise InvalidArgument("push", f"found {found}; expected {expected}")
        constants = [getattr(hyper, field.name) for hyper in header.hyper for field in fields(hyper)]
        with np.errstate(over="ignore"):  # the core's are of 32 bits
            finite = np.isfinite(np.hstack([header.scale, *constants]).astype(np.float32)).all()
        if any(hyper.clip_norm for hyper in header.hyper) or not finite:
            raise InvalidArgument("push", "found clip_norm, or a number beyond fp32; expected neither")
        if header.encoding != Encoding(header.encoding.codec, nonfinite=header.encoding.nonfinite):
            raise InvalidArgument("push", f"found {header.encoding}; expected a codec and nonfinite alone")

    def _check_finite(self, header: PushHeader, numbers: NDArray[np.uint8]) -> None:
        """Raise NotFinite now, where the push can still be refused everywhere."""
        codec, averaged = header.encoding.codec, 4 * self.layout.averaged_elements
        trained, refuses = numbers[: numbers.size - averaged], header.encoding.nonfinite == "error"
        finite = [np.isfinite(numbers[numbers.size - averaged :].view(np.float32))] if refuses else []
        if codec in SCALE_BLOCK:
            scales = -(-self.layout.trained_elements // SCALE_BLOCK[codec])
            finite.append(np.isfinite(trained[trained.size - 4 * scales :].view(np.float32)))
        elif codec is Codec.F32 and refuses:
            finite.append(np.isfinite(trained.view(np.float32)))
        elif codec is Codec.F16:
            finite.append(np.isfinite(trained.view(np.float16)))
        elif codec is Codec.BF16:
            finite.append(trained.view(np.uint16) & 0x7F80 != 0x7F80)
        if not all(array.all() for array in finite):
            raise NotFinite("push", "the gradient has a value that is not finite")

    def pinned(self, session: bytes, tag: Tag, timeout: float) -> Pinned:
        """Return what was kept for a client's pin, once. session: the caller's. Raises TimedOut, Fenced,
        InvalidArgument.
        """

        def kept() -> bool:
            there = self._is_there("pull", session, tag[0])
            if tag in self._gone:
                found = f"found {MAX_PINS} newer ones of this client, or {self.most_pinned >> 20} MiB of all"
                raise StoreError("pull", f"shard {self.name}: the copy for it has gone unfetched: {found}")
            return there and tag in self._pins

        with self._changed:
            self._wait("pull", time.monotonic() + timeout, kept)
            return self._pins.pop(tag)

    def _wait(self, what: str, deadline: float, done: Callable[[], bool]) -> None:
        while not self.fault and not self._closed and not done():
            if (left := deadline - time.monotonic()) <= 0.0:
                late = f"shard {self.name}: version {self.version}, and nothing more was decided"
                raise TimedOut(what, f"{late}; is the first server there?")
            native.interrupt.check_waits()
            self._changed.wait(min(left, 0.25))
        if self.fault is not None:
            raise StoreError(what, f"shard {self.name}: {self.fault}")
        if self._closed:
            raise LinkLost(what, "the server is ending")

    def _follow(self) -> None:
        """Read the log and do what it says, until the end. A fault of the shard ends it for its clients."""
        wait = RETRY_SECONDS[0]
        while not self._closed:
            try:
                self._read(self._source.connect())
            except (Busy, LinkLost, LinkRefused, OutOfSpace, TimedOut) as error:
                self._say_once(error)
            except PypsError as error:
                self._fail(error)
                return
            except Exception as error:
                self._fail(StoreError("shard", f"{type(error).__name__}: {error}"))
                return
            with self._changed:
                if not self._closed:
                    self._changed.wait(wait)
            wait = min(2 * wait, RETRY_SECONDS[1])

    def _say_once(self, error: PypsError) -> None:
        if str(error) != self._said and not self._closed:
            self._said = str(error)
            print(shown(f"pyps serve: {self.name}: it tries again: {error}"), file=sys.stderr)

    def _fail(self, error: PypsError) -> None:
        with self._changed:
            if not self._closed:
                print(shown(f"pyps serve: {self.name}: {error}"), file=sys.stderr)
            self.fault = error
            self._changed.notify_all()
        self._source.close()  # the first server sees that this shard is lost

    def _read(self, log: Decisions) -> None:
        at = log.follow(self.seal, self.index, self.version)
        with self._changed:
            self._index = max(at.index, self._index) if at.log == self._log else at.index
            self._log, self._live, self._newest = at.log, at.live, at.newest
            self._pins = {tag: kept for tag, kept in self._pins.items() if tag[0] in self._live}
            doomed = [tag for tag in self._staged.tags() if tag[0] not in self._live]
            self._changed.notify_all()
        while not self._closed:
            if self._index >= at.end and doomed:
                self._drop(doomed.__contains__)
                doomed = []
            for entry in log.entries(self._index, POLL_SECONDS):
                self._do(entry)
                self._index += 1

    def _do(self, entry: LogEntry) -> None:
        if entry.kind is LogKind.APPLY:
            self._apply(entry)
        elif entry.kind is LogKind.DROP:
            self._drop(lambda tag: tag == entry.tag)
        elif entry.kind is LogKind.ENTER:
            self._enter(entry.tag[0], entry.proofs)
        elif entry.kind is LogKind.END:
            self._end(entry.tag[0])
        elif entry.tag[0] in self._live:
            self._pin(entry)

    def _enter(self, client: int, known: tuple[bytes, ...]) -> None:
        with self._changed:
            if client > self._newest:  # else it was there when the log was opened, or has left before
                self._newest = client
                self._live[client] = known
                self._changed.notify_all()

    def _end(self, client: int) -> None:
        with self._changed:
            self._live.pop(client, None)
            self._pins = {tag: kept for tag, kept in self._pins.items() if tag[0] != client}
        self._drop(lambda tag: tag[0] == client)

    def _pin(self, entry: LogEntry) -> None:
        """Copy the store, or take the copy of this version for another pin."""
        whole_state = entry.kind is LogKind.PIN_ALL
        with self._changed:
            kept = [p for p in self._pins.values() if p.version == self.version]
        pinned = next((p for p in kept if not whole_state or p.steps is not None), None)
        pinned = pinned or self._copy(whole_state)
        with self._changed:
            own = [tag for tag in self._pins if tag[0] == entry.tag[0]]
            for tag in own[: max(0, len(own) + 1 - MAX_PINS)]:
                del self._pins[tag]
                self._gone.append(tag)
            self._pins[entry.tag] = pinned
            self._bound_pins()
            self._changed.notify_all()

    def _bound_pins(self) -> None:
        """Drop copies that are too much together: the oldest of the client that has most."""
        size = sum(
            array.nbytes for p in {id(p): p for p in self._pins.values()}.values() for array in p.arrays
        )
        while size > self.most_pinned and len(self._pins) > 1:
            held = Counter(tag[0] for tag in self._pins)
            self._gone.append(most := max(self._pins, key=lambda tag: held[tag[0]]))
            gone = self._pins.pop(most)
            if gone not in self._pins.values():
                size -= sum(array.nbytes for array in gone.arrays)

    def _drop(self, which: Callable[[Tag], bool]) -> None:
        with self._changed:
            for tag in self._staged.tags():
                if which(tag) and (file := self._staged.find(tag)) is not None:
                    file.clear()
            self._changed.notify_all()

    def _apply(self, entry: LogEntry) -> None:
        """The next ticket; one that the store has already is skipped."""
        ticket = entry.ticket
        if ticket is None or ticket.version <= self.version:
            return
        with self._changed:
            file = self._staged.find(entry.tag)
        if file is None or file.header is None or ticket.version != self.version + 1:
            known = (
                "its gradient is not here"
                if ticket.version == self.version + 1
                else "those before it are not"
            )
            raise StoreError(
                "shard", f"version {ticket.version} cannot be applied after {self.version}: {known}"
            )
        try:
            self._applier.start(native.STORE_TIMEOUT)
            result = self._applier.push(self._request(file.header, file.numbers, entry))
        except OutOfSpace:
            self._applier.rejoin()  # gives back what was begun, for the next try
            raise
        if result.version != ticket.version:
            raise StoreError("shard", f"version {ticket.version} became {result.version} here")
        self.version = result.version
        with self._changed:
            file.clear()
            self._changed.notify_all()

    def _request(self, header: PushHeader, numbers: NDArray[np.uint8], entry: LogEntry) -> PushRequest:
        staging, codec = self._applier.stage(native.STORE_TIMEOUT), header.encoding.codec
        gradient: NDArray[Any] = numbers.view(np.float32) if codec is Codec.F32 else numbers
        averaged = self.layout.averaged_elements
        if codec is not Codec.F32 and averaged:
            flat = self._applier.staging(staging)
            flat[self.layout.trained_elements :] = numbers[-4 * averaged :].view(np.float32)
            gradient = numbers[: -4 * averaged]
        trained = self.layout.trained_elements  # that stage() has looked at, all of it
        looked = np.array([[0, trained]], np.uint64) if trained and codec is not Codec.F32 else None
        return PushRequest(
            staging,
            1,
            header.hyper,
            header.scale,
            encoding=header.encoding,
            gradient=gradient,
            encoded=codec is not Codec.F32,
            position=header.position,
            tag=entry.tag,
            given=entry.ticket,
            looked=looked,
        )

    def _copy(self, whole_state: bool) -> Pinned:
        """The store as it is: no other thread changes it."""
        layout = self.layout
        flat = np.empty(layout.flat_elements, np.float32)
        if not whole_state:
            version, pinned = self._watcher.pull(flat), Pinned(self.version, flat)
        else:
            states = tuple(np.empty(layout.flat_elements, np.float32) for _ in range(layout.states))
            steps = np.empty(layout.chunks, np.float64)
            version = self._watcher.snapshot(flat, states, steps, native.STORE_TIMEOUT)
            pinned = Pinned(self.version, flat, states, steps)
        if version != self.version:
            raise StoreError("shard", f"found version {version} in the store; expected {self.version}")
        return pinned
