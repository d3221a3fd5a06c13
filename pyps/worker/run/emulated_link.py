"""Emulates a worker's links to the store: a message takes as long as pyps.solver.links says.

For a link that workers share, a file in the run's folder says which messages are on it. What the real
transfer takes comes on top; on one machine that is little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from pyps.errors import Fenced, TimedOut
from pyps.formats.records import Span
from pyps.native.transfer import ArrivalCallback, FinishTransfer, Transferred, TransferRequest
from pyps.native.values import Codec, Flat, PushRequest
from pyps.profiler.throttle import NANOSECOND, sleep_until
from pyps.remote.parts import Extents
from pyps.solver.links import FairShares, LinkSpec
from pyps.store.codec import as_codec
from pyps.store.store import Store
from pyps.worker.background import CLOSE_SECONDS, BackgroundThread

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the clock begins again with it
T = TypeVar("T")


class Direction(Enum):
    """The direction of a message."""

    TO_STORE = "up"
    FROM_STORE = "down"


class PrivateLane:
    """One direction of a link, of one worker's messages, which follow one another. Times are those of
    time.monotonic_ns().
    """

    def __init__(self, link: LinkSpec) -> None:
        self._link, self._free_at, self._began = link, 0, time.monotonic_ns()

    def carry(self, size: int, begin: int) -> int:
        """Return when a message of `size` bytes that comes at `begin` has passed; that time."""
        begin = max(begin, self._free_at)
        if not self._link.slower:
            self._free_at = begin + round(size / self._link.bytes_per_second / NANOSECOND)
        else:
            passes = self._link.passes(size, (begin - self._began) * NANOSECOND)
            self._free_at = self._began + round(passes / NANOSECOND)
        sleep_until(self._free_at)
        return self._free_at


class SharedLane:
    """One direction of a link that several processes share: their messages divide the bandwidth.

    The file at `path` has those that are under way. A worker that is killed leaves its message there, which
    passes all the same.
    """

    def __init__(self, bytes_per_second: float, path: Path) -> None:
        self._rate, self._path = bytes_per_second, path

    def carry(self, size: int, begin: int) -> int:
        import fcntl  # Windows has none, and emulates no links

        number, passes_at = 0, begin
        while True:
            with self._path.open("a+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                shares = _read(file.read())
                if not number:
                    number = shares.add(max(begin, shares.time), size, self._rate)
                shares.advance(time.monotonic_ns(), self._rate)
                until = shares.end(number, self._rate)
                file.truncate(0)
                file.write(msgspec.msgpack.encode(shares))
            if until is None:
                return passes_at
            passes_at = until  # unless others come meanwhile
            sleep_until(until)


def _read(found: bytes) -> FairShares:
    try:
        return msgspec.msgpack.decode(found, type=FairShares)
    except msgspec.DecodeError:  # empty, or a writer was killed
        return FairShares()


class EmulatedLinks:
    """The links that a worker's messages cross, one after another; none: messages take no time."""

    def __init__(self, links: tuple[LinkSpec, ...] = (), folder: Path | None = None) -> None:
        """folder: that of the run, which holds the files of shared links."""
        self._latency = round(sum(link.latency_seconds for link in links) / NANOSECOND)
        self._lanes = {one: [_lane(link, one, folder) for link in links] for one in Direction}
        self._lanes[Direction.FROM_STORE].reverse()

    def send(self, direction: Direction, size: int, at: int | None = None) -> int:
        """Return when a message that leaves `at` a time, by default now, has passed all links; when it
        arrives, a latency later, in time.monotonic_ns(). One thread at a time may send in one direction.
        """
        at = time.monotonic_ns() if at is None else at
        for wire in self._lanes[direction]:
            at = wire.carry(size, at)
        return at + self._latency

    def carry(self, direction: Direction, size: int) -> None:
        """Return when a message of `size` bytes has crossed the links."""
        sleep_until(self.send(direction, size))


def _lane(link: LinkSpec, direction: Direction, folder: Path | None) -> PrivateLane | SharedLane:
    if not link.shared or folder is None:
        return PrivateLane(link)
    boot = BOOT_ID.read_text().strip()
    path = folder / f"link-{quote(link.shared, safe='')}-{direction.value}-{boot}"
    return SharedLane(link.bytes_per_second, path)


class RoundTrips(Generic[T]):
    """Messages to the store and their answers, several under way at once. One thread begins them, one takes
    the answers, in the same order.
    """

    def __init__(self, links: EmulatedLinks, name: str) -> None:
        """name: of the thread in which the store answers."""
        self._links = links
        self._up: BackgroundThread[int] = BackgroundThread(f"{name}-up")
        self._far_end: BackgroundThread[tuple[T, int, int]] = BackgroundThread(name)
        self._down: BackgroundThread[tuple[T, int]] = BackgroundThread(f"{name}-down")

    def begin(
        self, size: int, answer: Callable[[], tuple[T, int]], before: Callable[[], object] | None = None
    ) -> Callable[[], T]:
        """Send a message of `size` bytes. When it has arrived, `answer` makes the answer and its size (0: the
        way back takes no time); what is returned waits until that is here, and raises what `answer` raised.

        before: a wait at the store, after the last answer, until the message may be sent; if it raises
        Fenced, so will `answer`.
        """
        if before is None:
            self._up.submit(partial(self._links.send, Direction.TO_STORE, size, time.monotonic_ns()))
        self._far_end.submit(partial(self._answer, answer, size, before))
        self._down.submit(self._return)
        return self._take

    def _answer(
        self, answer: Callable[[], tuple[T, int]], size: int, before: Callable[[], object] | None
    ) -> tuple[T, int, int]:
        if before is None:
            sleep_until(self._up.take())
        else:
            with suppress(Fenced):
                before()
            sleep_until(self._links.send(Direction.TO_STORE, size, time.monotonic_ns()))
        made, size = answer()
        return made, size, time.monotonic_ns()

    def _return(self) -> tuple[T, int]:
        made, size, answered = self._far_end.take()
        return made, self._links.send(Direction.FROM_STORE, size, answered) if size else answered

    def _take(self) -> T:
        made, arrives = self._down.take()
        sleep_until(arrives)
        return made

    def close(self, last: Callable[[], None], timeout: float) -> None:
        """Run `last` at the store's end after what is under way, and wait so long for it."""
        for thread in (self._up, self._far_end, self._down):
            with suppress(TimedOut):
                thread.close(last if thread is self._far_end else lambda: None, timeout)


class FarStore(Store):
    """A store whose transfers and pulls cross emulated links."""

    def __init__(self, store: Store, links: EmulatedLinks) -> None:
        """store: just opened; it is this one's from now on."""
        super().__init__(store.name, store.backend)
        self.has_link = True
        self._links = links
        self._trips: RoundTrips[Transferred] | None = None
        self._spare: list[Flat] = []  # for what travels back

    def begin_transfer(self, request: TransferRequest[PushRequest]) -> FinishTransfer:
        """Send a transfer as a Store does; several may be under way on the links."""
        if self._trips is None:
            self._trips = RoundTrips(self._links, f"pyps-transfer-{self.rank}-store")
        push, here = request.push, super().begin_transfer
        params = self._spare.pop() if self._spare else np.empty(self.layout.flat_elements, np.float32)
        left, waits = time.monotonic(), list[Span]()

        def await_turn() -> None:
            began = time.monotonic()
            self.await_turn()
            waits.append(("wait", began, time.monotonic()))

        def answer() -> tuple[Transferred, int]:
            there: Span = ("push", waits[-1][2] if waits else left, time.monotonic())
            done = here(request)(params)
            size = 0 if done.version is None else self._bytes(request.codec)
            return msgspec.structs.replace(done, spans=(*waits, there, *done.spans)), size

        size = self._bytes(push.encoding.codec) if push.samples else 0
        turns = self.policy_needs().uses_turns and push.samples > 0
        return partial(self._arrive, self._trips.begin(size, answer, await_turn if turns else None), params)

    def _arrive(
        self, receive: Callable[[], Transferred], params: Flat, out: Flat, _: ArrivalCallback | None = None
    ) -> Transferred:
        try:
            done = receive()
            if done.version is None:
                return done
            np.copyto(out, params)
        finally:
            self._spare.append(params)
        back: Span = ("pull", done.spans[-1][2], time.monotonic())
        return msgspec.structs.replace(done, spans=(*done.spans, back))

    def pull(
        self,
        out: Flat | None = None,
        *,
        strict: bool = False,
        ranges: Any = None,
        codec: Codec | str = Codec.F32,
    ) -> tuple[Flat, int]:
        """Pull as a Store does; a strict pull, and one of parts, takes no time on the links."""
        found = super().pull(out, strict=strict, ranges=ranges, codec=codec)
        if not strict and ranges is None:
            self._links.carry(Direction.FROM_STORE, self._bytes(as_codec(codec)))
        return found

    def _bytes(self, codec: Codec) -> int:
        return Extents.of(self.tensors, self.layout).size(codec)

    def close(self) -> None:
        """Leave the store, after what travels over the links."""
        if self._trips is None or os.getpid() != self._pid:
            super().close()
        else:
            self._trips.close(super().close, CLOSE_SECONDS)
