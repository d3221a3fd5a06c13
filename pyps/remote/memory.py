"""What answers take of a server's memory: counted before a call is done, by the key that it comes from.

An answer counts until its client has it and libzmq has sent it. A call whose answer has no room waits, which
harms its own key alone, and goes on when that reads what it has asked for. Arrays are used again, as memory
that is new from the kernel costs time.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from pyps.native.interrupt import check_waits
from pyps.profiler.host_memory import cpu_free_bytes

MEMORY_SHARE = (
    0.25  # of the free memory, for each of: calls, their answers, copies for pulls over several servers
)
LOOK_SECONDS = 0.25  # between two looks whether the session has ended


def memory_share() -> int:
    """Bytes that one kind of thing may take of this machine's memory."""
    return int(MEMORY_SHARE * cpu_free_bytes())


class AnswerMemory:
    """`total` bytes for the answers to all peers' calls, of which each may have the same share.

    Thread-safe. A peer may always have one answer, however large.
    """

    def __init__(self, total: int) -> None:
        self.total, self.peers = total, 1
        self._changed = threading.Condition()
        self._held: Counter[str] = Counter()  # bytes, by peer
        self._kept: Counter[str] = Counter()  # between calls
        self._unsent: list[AnswerRoom] = []  # that nothing but libzmq needs
        self._idle: list[NDArray[Any]] = []  # to be used again, the longest idle first

    def held(self, peer: str) -> int:
        """Bytes that this peer's answers have."""
        return self._held[peer]

    def room(self, peer: str, size: int) -> AnswerRoom:
        """Wait until there is room for an answer. Raises WaitInterrupted when the session ends."""
        with self._changed:
            while size and self._held[peer] and self._held[peer] + size > self.total // max(1, self.peers):
                check_waits()
                self._changed.wait(LOOK_SECONDS)
            self._held[peer] += size
        return AnswerRoom(self, peer, size)

    def keep(self, peer: str, more: int) -> bool:
        """Count what a session keeps between calls. Returns whether its peer is within its share."""
        with self._changed:
            self._kept[peer] += more
            return self._kept[peer] <= self.total // max(1, self.peers)

    def resize(self, room: AnswerRoom, size: int) -> None:
        """What is known of an answer's size now."""
        with self._changed:
            self._held[room.peer] += size - room.size
            if not self._held[room.peer]:
                del self._held[room.peer]
            room.size = size
            self._changed.notify_all()

    def take(self, kind: type[np.generic], count: int) -> NDArray[Any]:
        """An array for an answer that has room, contents undefined."""
        with self._changed:
            for index, array in enumerate(self._idle):
                if array.dtype == kind and array.size == count:
                    return self._idle.pop(index)
            self._shrink(np.dtype(kind).itemsize * count)
        return np.empty(count, kind)

    def _shrink(self, size: int) -> None:
        """Let go of idle arrays where there is not so much room left."""
        while self._idle and self._used() + size > self.total:
            del self._idle[0]

    def _used(self) -> int:
        return sum(self._held.values()) + sum(array.nbytes for array in self._idle)

    def drop(self, room: AnswerRoom) -> None:
        """No client asks for this answer any more."""
        if all(tracker.done for tracker in room.trackers):
            self._free(room)
        else:
            self._unsent.append(room)

    def sweep(self) -> None:
        """Free what libzmq has sent since. For the thread that drops."""
        waiting, self._unsent = self._unsent, []
        for room in waiting:
            self.drop(room)

    def _free(self, room: AnswerRoom) -> None:
        arrays, room.arrays = room.arrays, []
        self.resize(room, 0)
        with self._changed:
            self._idle += arrays
            self._shrink(0)


class AnswerRoom:
    """One answer's part of a server's memory: its arrays, and what says that libzmq has sent it."""

    def __init__(self, memory: AnswerMemory, peer: str, size: int) -> None:
        self.peer, self.size = peer, size
        self.arrays: list[NDArray[Any]] = []
        self.trackers: list[zmq.MessageTracker] = []
        self._memory = memory

    def take(self, kind: type[np.generic], count: int) -> NDArray[Any]:
        """An array of the answer, contents undefined."""
        self.arrays.append(array := self._memory.take(kind, count))
        return array

    def settle(self, size: int) -> None:
        """The answer is there, and as large as this."""
        self._memory.resize(self, size)

    def drop(self) -> None:
        """The answer is not needed any more."""
        self._memory.drop(self)
