"""Emulates a worker's link to the store: each message takes its latency, and its bytes over the bandwidth.

Workers that share a link use it one after another, through a lock on a file of the run's folder. What the
real transfer takes comes on top; on one machine that is little.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pyps.profiler.throttle import NANOSECOND, sleep_until


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A link: seconds of an empty message, bytes a second; `shared` names one that several workers use."""

    latency_seconds: float
    bytes_per_second: float
    shared: str = ""


class EmulatedLinks:
    """The links that a worker's messages cross, one after another; none: messages take no time."""

    def __init__(self, links: tuple[LinkSpec, ...] = (), folder: Path | None = None) -> None:
        """folder: that of the run, which holds the locks of shared links."""
        self._links, self._folder = links, folder

    @property
    def emulated(self) -> bool:
        return bool(self._links)

    def carry(self, size: int) -> None:
        """Return when a message of so many bytes has crossed the links."""
        for link in self._links:
            with self._alone(link.shared):
                seconds = link.latency_seconds + size / link.bytes_per_second
                sleep_until(time.monotonic_ns() + round(seconds / NANOSECOND))

    @contextmanager
    def _alone(self, shared: str) -> Iterator[None]:
        if not shared or self._folder is None:
            yield
            return
        path = self._folder / f"link-{shared.replace('/', '_')}.lock"
        with path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
