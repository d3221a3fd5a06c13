"""The run's store as its launcher sees it: opened once it is there, and again where its servers were lost.

A store over several servers may be away: a server was killed and starts again, or its shards are made anew
from a checkpoint. Then the workers are started again too, and the launcher waits for all of them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyps.errors import LinkLost, NotReady, SegmentNotFound, StoreFull
from pyps.remote.address import is_sharded
from pyps.run.spec import RunSpec
from pyps.store.activity import StoreActivity, look
from pyps.store.store import Store
from pyps.worker.run.settings import check_agreed


class RunStore:
    """before_joining: called with the store's state when it has been opened; joining may take a dead worker's
    slot.
    """

    def __init__(self, spec: RunSpec, before_joining: Callable[[StoreActivity], None]) -> None:
        self._spec, self._before_joining = spec, before_joining
        self.store: Store | None = None
        self.was_open = False

    def open(self) -> Store | None:
        """The store, opened if it is there. Raises LinkLost."""
        if self.store is None:
            try:
                self.store = self._open()
            except LinkLost:
                if self._spec.where is None:
                    raise
        return self.store

    def _open(self) -> Store | None:
        try:
            store = self._spec.open_store()
        except (SegmentNotFound, NotReady):
            return None
        check_agreed(store, self._spec.settings(self._spec.ranks[0]))
        if self._spec.journal is not None:
            store.journal(self._spec.journal)
        self._before_joining(look(store))
        with contextlib.suppress(StoreFull):  # every slot is a worker's: status() works without joining
            store.join(role="observer")
        self.was_open = True
        return store

    @contextmanager
    def may_be_lost(self, deadline: float = math.inf) -> Iterator[None]:
        """Calls of a store that can be away, until the deadline: it is opened again when it is back."""
        try:
            yield
        except LinkLost:
            if not is_sharded(self._spec.store) or time.monotonic() > deadline:
                raise
            self.close()

    def close(self) -> None:
        """Idempotent."""
        store, self.store = self.store, None
        if store is not None:
            store.close()
