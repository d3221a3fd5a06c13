"""Emulates a worker's link to the store: a message occupies the link while its bytes pass, and arrives a
latency later.

Links are full duplex: pushes and pulls do not share bandwidth. In each direction one message follows the
other, also those of other workers where a link is shared: a file in the run's folder says from when on it is
free. Latencies overlap. What the real transfer takes comes on top; on one machine that is little.
"""

from __future__ import annotations

import fcntl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from pyps.errors import TimedOut
from pyps.profiler.throttle import NANOSECOND, sleep_until
from pyps.worker.background import BackgroundThread

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the clock begins again with it
TIME = struct.Struct("<q")
T = TypeVar("T")


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A link: seconds of an empty message, bytes a second each way; `shared` names one that several workers
    use.
    """

    latency_seconds: float
    bytes_per_second: float
    shared: str = ""


class Way(Enum):
    """The direction of a message."""

    TO_STORE = "up"
    FROM_STORE = "down"


class OneWay:
    """One direction of a link. Times are those of time.monotonic_ns()."""

    def __init__(self, path: Path | None = None) -> None:
        """path: of the file that says when a shared one is free."""
        self._path = path
        self._free_at = 0
        self._lock = threading.Lock()

    def occupy(self, begin: int, duration: int) -> int:
        """When a message that is here at `begin` has passed: it waits for those that came before."""
        with self._lock:
            if self._path is None:
                self._free_at = max(begin, self._free_at) + duration
                return self._free_at
            with self._path.open("a+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                found = file.read(TIME.size)
                free_at = TIME.unpack(found)[0] if len(found) == TIME.size else 0
                free_at = max(begin, free_at) + duration
                file.truncate(0)
                file.write(TIME.pack(free_at))
                return free_at


class EmulatedLinks:
    """The links that a worker's messages cross, one after another; none: messages take no time."""

    def __init__(self, links: tuple[LinkSpec, ...] = (), folder: Path | None = None) -> None:
        """folder: that of the run, which holds the files of shared links."""
        self._links = {way: [(link, _one_way(link, way, folder)) for link in links] for way in Way}
        self._links[Way.FROM_STORE].reverse()

    @property
    def emulated(self) -> bool:
        return bool(self._links[Way.TO_STORE])

    def send(self, way: Way, size: int) -> int:
        """When a message of `size` bytes that leaves now arrives, in time.monotonic_ns()."""
        at = time.monotonic_ns()
        for link, wire in self._links[way]:
            at = wire.occupy(at, round(size / link.bytes_per_second / NANOSECOND))
            at += round(link.latency_seconds / NANOSECOND)
        return at

    def carry(self, way: Way, size: int) -> None:
        """Return when a message of `size` bytes has crossed the links."""
        sleep_until(self.send(way, size))


def _one_way(link: LinkSpec, way: Way, folder: Path | None) -> OneWay:
    if not link.shared or folder is None:
        return OneWay()
    boot = BOOT_ID.read_text().strip()
    return OneWay(folder / f"link-{link.shared.replace('/', '_')}-{way.value}-{boot}")


class RoundTrips(Generic[T]):
    """Messages to the store and their answers, several under way at once. One thread begins them, one takes
    the answers, in the same order.
    """

    def __init__(self, links: EmulatedLinks, name: str) -> None:
        """name: of the thread in which the store answers."""
        self._links = links
        self._far_end: BackgroundThread[tuple[T, int]] = BackgroundThread(name)

    def begin(self, size: int, answer: Callable[[], tuple[T, int]]) -> Callable[[], T]:
        """Send a message of `size` bytes. When it has arrived, `answer` makes the answer, and its size; what
        is returned waits until that is here. It raises what `answer` raised.
        """
        self._far_end.submit(partial(self._answer, self._links.send(Way.TO_STORE, size), answer))
        return self._take

    def _answer(self, arrives: int, answer: Callable[[], tuple[T, int]]) -> tuple[T, int]:
        sleep_until(arrives)
        made, size = answer()
        return made, self._links.send(Way.FROM_STORE, size)

    def _take(self) -> T:
        made, arrives = self._far_end.take()
        sleep_until(arrives)
        return made

    def close(self, last: Callable[[], None], timeout: float) -> None:
        """Run `last` at the store's end after what is under way, and wait so long for it."""
        with suppress(TimedOut):
            self._far_end.close(last, timeout)
