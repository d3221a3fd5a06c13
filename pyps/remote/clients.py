"""The clients of a server: their sessions, and how many and how large these may be.

A peer is a key by its name; without keys, the host that a connection comes from or, on a unix socket, the
process. What one peer takes leaves room for the others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from pyps.errors import Busy, InvalidArgument, LinkLost
from pyps.remote.connections import Connection
from pyps.remote.framing import FRAME_BYTES
from pyps.remote.outbox import Outbox
from pyps.remote.session import SessionThread
from pyps.remote.site import Site
from pyps.remote.verbs import Bulk
from pyps.remote.wire import MAX_IN_FLIGHT, MAX_REQUEST_BYTES, Call

MAX_SESSIONS = 256
SESSIONS_PER_PEER = 32
FORGET_SECONDS = 600.0  # how long the replies to a client that timed out are kept
MAX_TRIES = 3  # of one call that come at once, after connections that broke
MAX_ARRAYS = 1024  # of a call; each may end in a short frame


@dataclass(eq=False)
class ClientRecord:
    """What the loop knows of one client. Calls up to `taken` were begun; the client has all replies up to
    `received`, and may ask for the later ones in `replies` again. `thread` runs its calls; it has ended, or
    soon will, if the client has `timed_out`. `waiting`: bytes of numbers of the calls without a reply.
    """

    peer: str
    heard: float
    connections: list[Connection] = field(default_factory=list)  # the last ones, the newest first
    taken: int = 0
    received: int = 0
    replies: dict[int, list[Any]] = field(default_factory=dict)  # by seq
    waiting: dict[int, int] = field(default_factory=dict)  # by seq
    incoming: list[Incoming] = field(default_factory=list)  # tries of the next call, on one connection each
    thread: SessionThread | None = None
    timed_out: bool = True

    @property
    def gone(self) -> bool:
        """Whether no thread runs its calls."""
        return self.timed_out or self.thread is None or not self.thread.is_alive()

    @property
    def held_bytes(self) -> int:
        """Memory that its calls and their replies take."""
        kept = sum(len(frame) for frames in self.replies.values() for frame in frames[1:])
        coming = sum(one.call.follow for one in self.incoming)
        return coming + sum(self.waiting.values()) + kept

    @property
    def due(self) -> int:
        """The number of the next call."""
        return max(self.taken, self.received) + 1

    @property
    def progress(self) -> tuple[int, int, int]:
        """What a pong says of it: taken, left and answered."""
        small = all(len(frames) == 1 for frames in self.replies.values())
        return (
            self.taken,
            sum(one.left for one in self.incoming),
            max(self.replies, default=0) if small else 0,
        )

    def follow(self, connection: Connection) -> None:
        """Send replies to this connection, or to a newer one; of several to the newest that has not ended."""
        last = [connection, *(one for one in self.connections if one is not connection)]
        self.connections = sorted(last, key=lambda one: -one.number)[:MAX_TRIES]

    def expect(self, call: Call) -> Incoming:
        """A call that may begin once its numbers have come. After a connection broke, what it still had in it
        may come behind what the next one brings: whichever is whole first counts.
        """
        if len(self.incoming) == MAX_TRIES:
            self.incoming.pop(0).drop()
        self.incoming.append(incoming := Incoming(call, self, call.follow))
        return incoming

    def forget_incoming(self) -> None:
        """Drop what has come of calls that are not whole."""
        for one in self.incoming:
            one.drop()
        self.incoming.clear()

    def forget_received(self) -> None:
        """Drop the replies that the client has."""
        self.replies = {seq: frames for seq, frames in self.replies.items() if seq > self.received}


@dataclass(eq=False)
class Incoming:
    """A call whose numbers are coming; without a record they are dropped."""

    call: Call
    record: ClientRecord | None
    left: int
    frames: list[Any] = field(default_factory=list)

    def add(self, frame: Any) -> bool:
        """Take the next frame. Returns False if it is not what was announced."""
        size = len(frame)
        if not 0 < size <= min(self.left, FRAME_BYTES) or len(self.frames) > self._most_frames:
            return False
        self.left -= size
        if self.record is not None:
            self.frames.append(frame.buffer)
        return True

    def drop(self) -> None:
        """Keep nothing of what has come, and of what comes."""
        self.record = None
        self.frames.clear()

    @property
    def _most_frames(self) -> int:
        return self.call.follow // FRAME_BYTES + MAX_ARRAYS


class Clients:
    """All sessions. For the server's loop. memory_bytes: that all calls and replies together may take."""

    def __init__(self, site: Site, outbox: Outbox, per_peer: int, memory_bytes: int) -> None:
        self.sessions: dict[bytes, ClientRecord] = {}
        self.largest_gradient = 0  # bytes of the numbers of a push; 0 while there is no store
        self._site, self._outbox, self._per_peer = site, outbox, per_peer
        self._memory_bytes = memory_bytes
        self._threads: list[SessionThread] = []
        self._unsent: list[tuple[str, zmq.MessageTracker, int]] = []  # peer, and bytes that libzmq holds

    @property
    def threads(self) -> list[SessionThread]:
        """Those that have not ended yet, of clients that are gone too."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return self._threads

    def find(self, session: bytes, peer: str) -> ClientRecord | None:
        """The session, if it is this peer's, which was heard of now."""
        record = self.sessions.get(session)
        if record is None or record.peer != peer:
            return None
        record.heard = time.monotonic()
        return record

    def open(self, session: bytes, peer: str) -> ClientRecord:
        """A new session. Raises Busy if there are too many, LinkLost if it is another peer's."""
        if session in self.sessions:
            raise LinkLost("session", "the server does not know it")
        self._check_room(peer)
        while sum(record.peer == peer for record in self.sessions.values()) >= self._per_peer:
            quiet = [(r.heard, name) for name, r in self.sessions.items() if r.peer == peer and r.gone]
            del self.sessions[min(quiet)[1]]
        record = self.sessions[session] = ClientRecord(peer, time.monotonic())
        return record

    def thread_of(self, session: bytes, record: ClientRecord) -> SessionThread:
        """The thread of a session, started if need be. Raises Busy if there can be no further one."""
        if record.gone or record.thread is None:
            self._check_room(record.peer, record.thread)
            thread = SessionThread(session, record.peer, self._site, self._outbox, record.thread)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:
                raise Busy("session", f"the server could not start a thread: {error}") from None
            record.thread, record.timed_out = thread, False
            self._threads.append(thread)
        return record.thread

    def _check_room(self, peer: str, ending: SessionThread | None = None) -> None:
        """Raise Busy where a further thread would be one too many; the one that ends gives it its place."""
        threads = [thread for thread in self.threads if thread is not ending]
        theirs = sum(thread.peer == peer for thread in threads)
        if theirs >= self._per_peer:
            found = f"found {theirs} sessions of {peer}; expected at most {self._per_peer}"
            advice = "close some, give each host its own key, or serve with --sessions-per-client"
            raise Busy("session", f"{found}: {advice}")
        if len(threads) >= MAX_SESSIONS:
            raise Busy("session", f"found {len(threads)} sessions; expected at most {MAX_SESSIONS}")

    def check_call(self, record: ClientRecord, call: Call) -> None:
        """Raise Busy or InvalidArgument for a call that must not be taken."""
        if call.seq - record.received > MAX_IN_FLIGHT:
            text = f"found {call.seq - record.received} calls under way; expected at most {MAX_IN_FLIGHT}"
            raise Busy("session", text)
        if call.seq != record.due:
            raise InvalidArgument("session", f"seq: found {call.seq}; expected {record.due}")
        handler = self._site.handlers.get(call.verb)
        bulk = Bulk.NONE if handler is None else handler.verb.bulk
        if call.follow and bulk is Bulk.NONE:
            raise InvalidArgument(call.verb[:40], f"numbers: found {call.follow} bytes; expected none")
        whole = self._memory_bytes + MAX_REQUEST_BYTES
        most = whole if bulk is Bulk.STORE else self.largest_gradient
        if call.follow > most:
            raise InvalidArgument(call.verb[:40], f"numbers: found {call.follow} bytes; expected {most}")
        self._check_memory(record.peer, call.follow)

    def _check_memory(self, peer: str, size: int) -> None:
        """A peer may always hold one call; more, while it leaves the others their share."""
        peers = {record.peer for record in self.sessions.values()}
        share = self._memory_bytes // len(peers)
        self._unsent = [one for one in self._unsent if not one[1].done]
        held = sum(record.held_bytes for record in self.sessions.values() if record.peer == peer)
        held += sum(unsent for whose, _, unsent in self._unsent if whose == peer)
        if held and held + size > share:
            text = f"found {held + size} bytes of calls and replies of {peer}; expected at most {share}"
            raise Busy("session", text)

    def note_sent(self, peer: str, tracker: zmq.MessageTracker, size: int) -> None:
        """A reply of this size counts as held until libzmq has sent it, also if the client says it has it."""
        self._unsent.append((peer, tracker, size))

    def end(self, session: bytes) -> None:
        """End a session: its call stops waiting, its thread leaves the store."""
        record = self.sessions.pop(session)
        if record.thread is not None:
            record.thread.end()

    def expire(self) -> int:
        """Let the threads of the silent leave, and forget the long silent: how many timed out."""
        now, late = time.monotonic(), 0
        for session, record in list(self.sessions.items()):
            quiet = now - record.heard
            if not record.timed_out and quiet > self._site.client_timeout_seconds:
                if record.thread is not None:
                    record.thread.end()
                record.timed_out = True
                record.forget_incoming()
                late += 1
            elif quiet > FORGET_SECONDS:
                self.end(session)
        return late
