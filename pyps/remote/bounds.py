"""Define what one peer may take of a server: every bound, and what peers have taken of it.

A peer is a key by its name; without keys, the host that a connection comes from or, on a unix socket, the
process. What one peer takes leaves room for the others.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from pyps.errors import Busy, OutOfSpace
from pyps.native.interrupt import check_waits
from pyps.native.local import LocalBackend
from pyps.native.status import MemberState
from pyps.profiler.host_memory import cpu_free_bytes
from pyps.store.segments import folder

MAX_CONNECTIONS = 1024
CONNECTIONS_A_SESSION = 4  # its calls' and its pings', and as many that broke and are not known to have
SILENT_SHARE = 0.25  # of all connections, for those whose handshake is under way
QUEUED_MESSAGES = 2  # of one connection, then its link waits; with 1 libzmq 4.3.5 lets no key in
HELD_BYTES = 1 << 20  # of one connection: the queued ones and one that is coming, each a frame, are less
ALL_HELD_BYTES = 64 << 20  # of one peer's connections; of all together, while the queues are empty
MAX_SESSIONS = 256
SESSIONS_PER_PEER = 32
MEMORY_SHARE = 0.25  # of the free memory, for each of: calls, answers, copies for pulls over several servers
NEW_WORKERS_SHARE = 0.5  # of the segment's room that planned ranks leave, for one peer's new workers
LOOK_SECONDS = 0.25  # between two looks whether the session has ended


def memory_share() -> int:
    """Bytes that one kind of thing may take of this machine's memory."""
    return int(MEMORY_SHARE * cpu_free_bytes())


class Bound:
    """At most `most` of one thing, and `each` of it for one peer. Thread-safe.

    each None: an equal share for all peers that are there. taken: what each has, where that is counted.
    """

    def __init__(self, most: int, each: int | None = None) -> None:
        self.most, self.each, self.peers = most, each, 1
        self.taken: Counter[str] = Counter()
        self._changed = threading.Condition()

    @property
    def share(self) -> int:
        """Return what one peer may have."""
        return self.most // max(1, self.peers) if self.each is None else self.each

    def add(self, peer: str, more: int) -> bool:
        """Count what a peer takes, or gives back. Returns whether it has no more than its share."""
        with self._changed:
            self.taken[peer] += more
            if not self.taken[peer]:
                del self.taken[peer]
            self._changed.notify_all()
            return self.taken[peer] <= self.share


class Answers(Bound):
    """The bytes of answers, counted before a call is done: until its client has it and libzmq has sent it.

    A call whose answer has no room waits, which harms its own peer alone, and goes on when that reads what it
    has asked for; each may always have one, however large. Arrays are used again, as memory that is new from
    the kernel costs time.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._unsent: list[AnswerRoom] = []  # that nothing but libzmq needs
        self._idle: list[NDArray[Any]] = []  # to be used again, the longest idle first

    def room(self, peer: str, size: int) -> AnswerRoom:
        """Wait until there is room for an answer. Raises WaitInterrupted when the session ends."""
        with self._changed:
            while size and self.taken[peer] and self.taken[peer] + size > self.share:
                check_waits()
                self._changed.wait(LOOK_SECONDS)
            self.taken[peer] += size
        return AnswerRoom(self, peer, size)

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
        while self._idle and sum(a.nbytes for a in self._idle) + self.taken.total() + size > self.most:
            del self._idle[0]

    def drop(self, room: AnswerRoom) -> None:
        """No client asks for this answer any more."""
        if not all(tracker.done for tracker in room.trackers):
            self._unsent.append(room)
            return
        arrays, room.arrays = room.arrays, []
        room.settle(0)
        with self._changed:
            self._idle += arrays
            self._shrink(0)

    def sweep(self) -> None:
        """Free what libzmq has sent since. For the thread that drops."""
        waiting, self._unsent = self._unsent, []
        for room in waiting:
            self.drop(room)


class AnswerRoom:
    """One answer's part of a server's memory: its arrays, and what says that libzmq has sent it."""

    def __init__(self, answers: Answers, peer: str, size: int) -> None:
        self.peer, self.size = peer, size
        self.arrays: list[NDArray[Any]] = []
        self.trackers: list[zmq.MessageTracker] = []
        self._answers = answers

    def take(self, kind: type[np.generic], count: int) -> NDArray[Any]:
        """An array of the answer, contents undefined."""
        self.arrays.append(array := self._answers.take(kind, count))
        return array

    def settle(self, size: int) -> None:
        """The answer is there, and as large as this; its arrays may hold more than is sent of them."""
        size = max(size, sum(array.nbytes for array in self.arrays))
        more, self.size = size - self.size, size
        self._answers.add(self.peer, more)

    def drop(self) -> None:
        """The answer is not needed any more."""
        self._answers.drop(self)


class ServerBounds:
    """The bounds of one server, by its process's limits of descriptors and memory."""

    def __init__(self, sessions_per_peer: int) -> None:
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        most, memory = min(MAX_CONNECTIONS, free // 2), memory_share()  # sessions open the other half
        self.connections = Bound(most, min(CONNECTIONS_A_SESSION * sessions_per_peer, max(2, most // 4)))
        self.sessions = Bound(MAX_SESSIONS, sessions_per_peer)
        self.calls, self.answers = Bound(memory), Answers(memory)  # bytes
        self.new_workers: dict[bytes, str] = {}  # peers, by the sessions that are workers beyond the plan

    def note_peers(self, count: int) -> None:
        """So many peers have sessions."""
        self.calls.peers = self.answers.peers = count

    def check_session(self, peer: str, taken: Counter[str]) -> None:
        """Raise Busy where one more session would be too many; taken: those of each peer."""
        text = f"found {taken[peer]} sessions of {peer}; expected at most {self.sessions.share}"
        if taken[peer] >= self.sessions.share:
            advice = "close some, give each host its own key, or serve with --sessions-per-client"
            raise Busy("session", f"{text}: {advice}")
        if taken.total() >= self.sessions.most:
            raise Busy("session", f"found {taken.total()} sessions; expected at most {self.sessions.most}")

    def check_call(self, peer: str, held: int, size: int) -> None:
        """Raise Busy where a call's bytes would be more than its peer's share; it may always hold one."""
        if held and held + size > self.calls.share:
            text = f"found {held + size} bytes of calls of {peer}; expected at most {self.calls.share}"
            raise Busy("session", text)

    def check_new_worker(self, store: LocalBackend, peer: str) -> None:
        """Raise OutOfSpace unless one more new worker of this peer leaves planned ranks and others theirs.

        A worker gets its memory when it first stages, so those that are there count as if they had none yet.
        """
        size = 4 * store.layout.flat_elements * store.layout.staging_buffers
        found = os.statvfs(folder())
        held, free = list(self.new_workers.values()), found.f_bavail * found.f_frsize
        alive = MemberState.ACTIVE, MemberState.FENCED
        present = {m.rank for m in store.members() if m.state in alive and m.rank is not None}
        absent = len(set(range(store.layout.ranks)) - present)
        left, mine = free - size * absent, held.count(peer)
        if left < size * (len(held) + 1) or (mine and size * (mine + 1) > NEW_WORKERS_SHARE * left):
            text = f"{free >> 20} MiB are free; {absent} planned ranks and {len(held)} new workers may need"
            need = f"{size >> 20} MiB each ({mine} of {peer}); enlarge it or set PYPS_SHM_DIR"
            raise OutOfSpace("join", f"no room for one more new worker: {text} {need}")
