"""From the session threads to the server's loop: a queue whose descriptor a poll can wait on."""

from __future__ import annotations

import contextlib
import os
import queue
from typing import Any


class Outbox:
    """Items of any thread for the one that polls it. It needs one descriptor, however many threads put."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Readable while there are items."""
        return self._bell

    def put(self, item: Any) -> None:
        self._items.put(item)
        with contextlib.suppress(BlockingIOError):  # a full counter wakes the reader just as well
            os.eventfd_write(self._bell, 1)

    def take(self) -> list[Any]:
        """All items that are there."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._items.get_nowait())
        return found

    def close(self) -> None:
        os.close(self._bell)
