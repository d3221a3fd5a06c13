"""Define what the first server of several tells the others: which pushes became which versions, in one order.

The head (pyps.shards.cut) decides; every shard applies this log in its order, so all have the same
versions, and a PIN comes between the same two versions everywhere. A ticket's tag names the gradient, which
each shard has been sent before. What has a ticket is read from the head itself, so that a server that was
killed after the decision finds it again; all else in the log ends with the sessions that it is about.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from pyps.errors import InvalidArgument, StoreClosed, TimedOut
from pyps.native.local import LocalBackend
from pyps.native.values import NO_TAG, Role, Tag
from pyps.shards.proofs import proofs, same
from pyps.shards.verbs import Following, LogEntry, LogKind
from pyps.store.marks import run_and_servers, seal_of, sealed

KEPT_ENTRIES = 1 << 14
FEW_ENTRIES = 256  # in one answer
CLIENT_BITS = 32
PULL_TRIES = 1000


class Decisions(Protocol):
    """A log, here or at the first server."""

    def follow(self, seal: bytes, index: int, version: int) -> Following:
        """Where shard `index` reads on from a version.

        Raises InvalidArgument for another model's seal, or a version that the log does not reach back to.
        """

    def entries(self, index: int, timeout: float) -> list[LogEntry]:
        """Return those from an index on, in order; none if there are none within the timeout. Raises TimedOut
        where the log does not reach back so far: follow it again.
        """


class DecisionLog:
    """The log of the head of this name, kept by its server. Any thread may call it."""

    def __init__(self, store: str) -> None:
        self._head = LocalBackend.open(store)
        self._head.join(Role.OBSERVER, -1)
        self._head.reap()  # what an earlier server's sessions had admitted is now whole
        layout = self._head.layout
        marked = run_and_servers(self._head.tensors)
        if marked is None:
            self._head.close()
            raise InvalidArgument("decisions", f"store {store!r}: found one that is on a single server")
        self.run, self.servers = marked
        self.tensors = self._head.tensors
        self._sealed = seal_of(self.tensors)
        members = self._head.members()
        # A segment's ids of members are never used again, so no client of an earlier server has one of these
        # numbers. A segment of another run may have the same ids: shards are asked by their run.
        self._next_client = (1 + max(member.id for member in members)) << CLIENT_BITS
        self._id = secrets.randbits(62)
        self._changed = threading.Condition()
        self._closed = False
        self._entries: deque[LogEntry] = deque()
        self._base = 0  # index of the first
        self._live: dict[int, tuple[bytes, ...]] = {}  # the clients, with their proofs
        self._ticketed: dict[int, int] = {}  # by client: its last push that has a ticket
        self.version = self._head.status().version
        self._first = self.version + 1  # the first version whose ticket is known
        self._find_tickets(layout.max_participants * layout.staging_buffers)

    def _find_tickets(self, kept: int) -> None:
        """Find those before this log began: the last ones."""
        found: list[LogEntry] = []
        for version in range(self.version, max(0, self.version - kept), -1):
            try:
                ticket = self._head.ticket(version)
            except InvalidArgument:
                break
            found.append(LogEntry(LogKind.APPLY, ticket.tag, ticket))
            self._first = version
        self._entries.extend(reversed(found))

    def remove(self) -> None:
        """Remove the head's segment, and no other that has its name by now."""
        self._head.remove()

    def close(self) -> None:
        """Answer those that wait, and leave the head. Idempotent."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._head.close()
                self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def knows(self, seal: bytes) -> bool:
        """Return whether this is the model's seal."""
        return same(sealed(seal), self._sealed)

    def enter(self, session: bytes) -> int:
        """A new number for the client of this session."""
        with self._changed:
            client, self._next_client = self._next_client, self._next_client + 1
            self._live[client] = known = proofs(session, self.servers)
            self._add(LogEntry(LogKind.ENTER, (client, 0), proofs=known))
            return client

    def end(self, client: int) -> None:
        """None of this client's pushes will be admitted any more."""
        with self._changed:
            if client in self._live and not self._closed:
                self._log_tickets()
                del self._live[client]
                self._ticketed.pop(client, None)
                self._add(LogEntry(LogKind.END, (client, 0)))

    def settle(self, tag: Tag) -> None:
        """A push has been decided: log its ticket, or that it has none and its gradient is not needed."""
        with self._changed:
            self._check_open()
            self._log_tickets()
            if self._ticketed.get(tag[0]) != tag[1]:
                self._add(LogEntry(LogKind.DROP, tag))

    def pin(self, tag: Tag, kind: LogKind, pull: Callable[[], int]) -> int:
        """Have every shard keep a copy of the present version, for the client to fetch; that version.

        pull: what tells the head that its caller pulls, and gives the version that it has pulled.
        """
        with self._changed:
            self._check_open()
            self._log_tickets()
            version, tries = pull(), 0
            while version < self.version and tries < PULL_TRIES:  # an admitted push is not yet in its chunks
                time.sleep(1e-4)
                version, tries = pull(), tries + 1
            self._log_tickets(version)
            self._add(LogEntry(kind, tag))
            return self.version

    def follow(self, seal: bytes, index: int, version: int) -> Following:
        """See Decisions."""
        with self._changed:
            self._check_open()
            if not self.knows(seal) or not index < self.servers:
                found = f"found another model's seal, or index {index}; expected a shard of {self.run:016x}"
                raise InvalidArgument("follow", found)
            self._log_tickets()
            if not self._first - 1 <= version <= self.version:
                known = f"expected {self._first - 1} to {self.version}: start again from a checkpoint"
                raise InvalidArgument("follow", f"version: found {version}; {known}")
            first = self._base
            for k, entry in enumerate(self._entries, self._base):
                if entry.ticket is not None and entry.ticket.version <= version:
                    first = k + 1
            end, newest = self._base + len(self._entries), self._next_client - 1
            return Following(first, end, dict(self._live), self._id, newest)

    def entries(self, index: int, timeout: float) -> list[LogEntry]:
        """See Decisions."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._closed and index >= self._base + len(self._entries):
                if (left := deadline - time.monotonic()) <= 0.0:
                    return []
                self._changed.wait(left)
            self._check_open()
            if index < self._base:
                raise TimedOut("entries", f"index: found {index}; expected at least {self._base}")
            first = index - self._base
            return [self._entries[k] for k in range(first, min(first + FEW_ENTRIES, len(self._entries)))]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("decisions", "the server is ending")

    def _log_tickets(self, version: int | None = None) -> None:
        """Log those up to a version; None: the head's."""
        last = self._head.status().version if version is None else version
        while self.version < last:
            ticket = self._head.ticket(self.version + 1)
            if ticket.tag != NO_TAG:
                self._ticketed[ticket.tag[0]] = ticket.tag[1]
            self.version += 1
            self._add(LogEntry(LogKind.APPLY, ticket.tag, ticket))

    def _add(self, entry: LogEntry) -> None:
        self._entries.append(entry)
        while len(self._entries) > KEPT_ENTRIES:
            gone, self._base = self._entries.popleft(), self._base + 1
            if gone.ticket is not None:
                self._first = gone.ticket.version + 1
        self._changed.notify_all()
