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
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, overload

from pyps import native
from pyps.errors import Forked, SegmentNotFound, StoreClosed, StoreError
from pyps.native import planning
from pyps.native.state import split
from pyps.native.status import Member, RankCounters, Status, get_members, get_ranks, get_status
from pyps.native.values import Flat, Hyper, Layout, PolicyNeeds, PolicyParams, RankCost, Tensor
from pyps.store.staging import StagingBuffer

T = TypeVar("T")


class StoreHandle:
    """A store that this process has open; `pyps.Store` is made of it."""

    def __init__(self, name: str, pointer: native.Pointer, *, unlinks: bool) -> None:
        self.name = name
        self.rank: int | None = None
        self._pointer: native.Pointer | None = pointer
        self._unlinks = unlinks
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._observing = threading.RLock()  # held while the mapping may change, and by each look at it
        self._staging_buffers: dict[int, StagingBuffer] = {}
        self._drawn = 0, 0  # the first sample last claimed, and the pushes rounded stochastically since
        self._views: list[weakref.ref[native.Mapping]] = []
        self.layout: Layout = self._call(native.get_layout)
        self.tensors: tuple[Tensor, ...] = tuple(
            self._call(native.get_tensor, index) for index in range(self.layout.tensors)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._pointer is None

    @property
    def undone(self) -> int:
        """Pushes that making this store has undone: of one that had lost shards, after the state given."""
        return 0

    def close(self) -> None:
        """Leave, unmap (when the last view is gone), and remove the name if this Store created it.
        Idempotent.

        In a forked child the handle is only dropped.
        """
        if os.getpid() != self._pid:
            self._pointer = None
            return
        with self._lock, self._observing:
            pointer, self._pointer = self._pointer, None
            if pointer is None:
                return
            joined = self.rank is not None
            self._retire()
            self._release(pointer, joined)

    def _release(self, pointer: native.Pointer, joined: bool) -> None:
        if self._unlinks:
            with suppress(SegmentNotFound):  # removed meanwhile; the name may be another's by now
                native.remove(pointer)
        if not any(view() for view in self._views):
            native.close(pointer)
        elif joined:
            with suppress(StoreError):
                native.leave(pointer)  # unmapped when the last view dies

    def policy_params(self) -> PolicyParams:
        """The numbers of the store's policy."""
        return self._call(native.get_policy_params)

    def policy_needs(self) -> PolicyNeeds:
        """What the store's policy asks of its workers."""
        return native.policy_needs(self.layout.policy, self.policy_params())

    def views(self, flat: Flat) -> dict[str, Flat]:
        """Views of a pulled (or any flat) vector by tensor name, each in its shape."""
        return split(flat, self.tensors)

    def status(self) -> Status:
        return self._observe(get_status)

    def members(self) -> list[Member]:
        """Every participant slot that was ever used, in slot order."""
        return [m for m in self._observe(get_members, self.layout.max_participants) if m.id]

    def ranks(self) -> list[RankCounters]:
        """What each rank has done, in rank order."""
        return self._observe(get_ranks, self.status().ranks)

    def costs(self) -> list[RankCost]:
        """What each rank's steps cost, in rank order."""
        return self._observe(planning.get_costs, self.status().ranks)

    def hyper(self) -> list[Hyper | None]:
        """The constants in force: of the last step of each group; None: no step yet, or an averaged group."""
        return self._observe(native.get_hyper, self.layout.groups)

    def wait(self, sequence: int, timeout: float | None = None) -> None:
        """Sleep until the view is later than `sequence` (see `status`); None: an hour. Raises TimedOut."""
        self._call(native.wait, sequence, native.timeout_seconds(timeout))

    def _retire(self) -> None:
        for staging in self._staging_buffers.values():
            staging.retire()
        self._staging_buffers.clear()
        self.rank = None

    @overload
    def _call(self, function: Callable[[native.Pointer], T]) -> T: ...
    @overload
    def _call(self, function: Callable[..., T], *arguments: Any) -> T: ...
    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return self._locked(self._lock, function, arguments)

    def _observe(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what only looks at the store: while another thread's call waits, too."""
        return self._locked(self._observing, function, arguments)

    def _locked(self, lock: Any, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        if os.getpid() != self._pid:  # its locks may be held for ever
            self._refuse_child(function.__name__)
        with lock:
            if self._pointer is None:
                raise StoreClosed(function.__name__.removeprefix("get_"), "the store is closed")
            return self._run(function, *arguments)

    def _alone(self) -> Any:
        """Keeps other calls out; what only looks is kept out by `_observe`."""
        if os.getpid() != self._pid:
            self._refuse_child("join or leave")
        return self._lock

    def _refuse_child(self, what: str) -> NoReturn:
        opened = f"opened by process {self._pid}, used by its child {os.getpid()}"
        raise Forked(what.removeprefix("get_"), opened)

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(self._pointer, *arguments)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"store {self.name!r}: a handle cannot be copied; open the store again")
