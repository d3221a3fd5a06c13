"""An open store: how long it lives, which calls may run at once, and what only looks at it.

Lifetime of views. A staging buffer is seen through NumPy arrays (and torch tensors over them) that keep the
segment mapped: close() while some are alive leaves the store at once and unmaps when the last of them dies.
After leave() or close() the buffer is no longer this worker's: what such a view still writes stays in this
process.

Threads share a Store safely: its calls run one after another, but for status, members, ranks and hyper, which
wait for no other. What a signal's handler raises ends a wait. A forked child opens the store itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self

from pyps import native
from pyps.errors import (
    FalseLook,
    Fenced,
    Forked,
    InvalidArgument,
    NotFinite,
    OutOfSpace,
    PushRejected,
    StoreClosed,
)
from pyps.native.decisions import PolicyNeeds, PolicyParams
from pyps.native.state import split
from pyps.native.status import Member, PushCounts, Status
from pyps.native.values import Flat, Hyper, PushRequest, RankCost, Traffic
from pyps.store.backend import Backend
from pyps.store.staging import StagingBuffer, check_request

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads small numbers over all bits


class Turns:
    """`with turns as backend`: one thread at a time has the backend, in the process that opened it."""

    __slots__ = ("_backend", "_lock", "_pid", "name")

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self._backend: Backend | None = backend
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> Backend:
        """Raises StoreClosed, Forked."""
        if os.getpid() != self._pid:  # the lock may be held for ever
            opened = f"opened by process {self._pid}, used by its child {os.getpid()}"
            raise Forked(f"store {self.name!r}", opened)
        self._lock.acquire()
        if self._backend is None:
            self._lock.release()
            raise StoreClosed(f"store {self.name!r}", "it is closed")
        return self._backend

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @property
    def ended(self) -> bool:
        return self._backend is None

    def end(self) -> None:
        """There is no backend any more. In a turn, or in a forked child."""
        self._backend = None


class StoreHandle:
    """A store that this process has open; `pyps.Store` is made of it."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self.rank: int | None = None
        self.layout, self.tensors, self._params = backend.layout, backend.tensors, backend.policy_params
        self._needs = backend.policy_needs
        self.servers, self.undone = backend.servers, backend.undone
        self.has_link = backend.servers > 0  # that transfers cross, a real or an emulated one
        self._calls = Turns(name, backend)
        self._looks = Turns(name, backend)  # held while the mapping may change, and by each look at it
        self._pid = os.getpid()
        self._staging_buffers: dict[int, StagingBuffer] = {}
        self._drawn = 0, 0  # the first sample last claimed, and the pushes rounded stochastically since
        self._unnamed: int | None = None  # the staging buffer of a push that named none, and did not end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._calls.ended

    def close(self) -> None:
        """Leave, unmap (when the last view is gone), and remove the name if this Store created it.
        Idempotent.

        In a forked child the handle is only dropped.
        """
        if self.closed:
            return
        if os.getpid() != self._pid:
            self._calls.end()
            self._looks.end()
            return
        with self._calls as backend, self._looks:
            self._calls.end()
            self._looks.end()
            self._retire()
            backend.close()

    @property
    def backend(self) -> Backend:
        """Return what this store is made of, for tools; a call of it takes no turn."""
        with self._looks as backend:
            return backend

    @property
    def traffic(self) -> Traffic:
        """Return what went over links so far; zeros for a store on this machine."""
        with self._looks as backend:
            return backend.traffic

    def policy_params(self) -> PolicyParams:
        """The numbers of the store's policy."""
        return self._params

    def policy_needs(self) -> PolicyNeeds:
        """Return what the store's policy asks of its workers."""
        return self._needs

    def _checked(self, request: PushRequest) -> PushRequest:
        """The request as the core takes it: checked against its sizes, with noise for this push alone.

        The noise belongs to the samples: a store that goes on from a state draws what the first would have.
        """
        check_request(request, self.layout)
        how = request.encoding
        if how.rounding != "stochastic":
            return request
        with self._calls:
            first, drawn = self._drawn = self._drawn[0], self._drawn[1] + 1
            mixed = (((how.seed * GOLDEN + (self.rank or 0)) * GOLDEN + first) * GOLDEN + drawn) * GOLDEN
        return replace(request, encoding=replace(how, seed=mixed % 2**64))

    @contextmanager
    def _any_buffer(self, timeout: float) -> Iterator[int]:
        """A staging buffer for a push that names none. It is the next such push's too if this one did not
        end, but timed out, say: then the core goes on with it.
        """
        with self._calls as backend:
            if self._unnamed is None:
                self._unnamed = backend.stage(timeout)
            try:
                yield self._unnamed
            except (InvalidArgument, NotFinite, OutOfSpace):
                self._give_back(backend)
                raise
            except (Fenced, PushRejected, FalseLook):
                self._unnamed = None
                raise
            self._unnamed = None

    def _give_back(self, backend: Backend) -> None:
        """A push that named no staging buffer, and did not end, is given up."""
        if self._unnamed is not None:
            with suppress(InvalidArgument):  # it waits in a round, or has been given up already
                backend.unstage(self._unnamed)
            self._unnamed = None

    def views(self, flat: Flat) -> dict[str, Flat]:
        """Views of a pulled (or any flat) vector by tensor name, each in its shape."""
        return split(flat, self.tensors)

    def status(self) -> Status:
        with self._looks as backend:
            return backend.status()

    def members(self) -> list[Member]:
        """Every participant slot that was ever used, in slot order."""
        with self._looks as backend:
            return backend.members()

    def ranks(self) -> list[PushCounts]:
        """Return what each rank has done, in rank order."""
        with self._looks as backend:
            return backend.ranks()

    def costs(self) -> list[RankCost]:
        """Return what each rank's steps cost, in rank order."""
        with self._looks as backend:
            return backend.costs()

    def hyper(self) -> list[Hyper | None]:
        """The constants in force: of the last step of each group; None: no step yet, or an averaged group."""
        with self._looks as backend:
            return backend.hyper()

    def wait(self, sequence: int, timeout: float | None = None) -> None:
        """Sleep until the view is later than `sequence` (see `status`); None: an hour. Raises TimedOut."""
        with self._calls as backend:
            backend.wait(sequence, native.timeout_seconds(timeout))

    def _retire(self) -> None:
        for staging in self._staging_buffers.values():
            staging.retire()
        self._staging_buffers.clear()
        self.rank = self._unnamed = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"store {self.name!r}: a handle cannot be copied; open the store again")
