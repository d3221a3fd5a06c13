"""The clients of a server: their sessions, the calls of these, and the replies to them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pyps.errors import Busy, InvalidArgument, LinkLost
from pyps.remote.connections import Connection
from pyps.remote.incoming import Incoming
from pyps.remote.outbox import Outbox
from pyps.remote.session import SessionReply, SessionThread
from pyps.remote.site import Site
from pyps.remote.verbs import Bulk
from pyps.remote.wire import MAX_IN_FLIGHT, MAX_REQUEST_BYTES, Call

FORGET_SECONDS = 600.0  # how long the replies to a client that timed out are kept
MAX_TRIES = 3  # of one call that come at once, after connections that broke


@dataclass(eq=False)
class ClientRecord:
    """Hold what the loop knows of a client. Calls up to `taken` were begun; the client has all replies up to
    `received`, and may ask for the later ones in `replies` again. `thread` runs its calls; it has ended, or
    soon will, if the client has `timed_out`. `waiting`: bytes of numbers of the calls without a reply.
    """

    peer: str
    heard: float
    connections: list[Connection] = field(default_factory=list)  # the last ones, the newest first
    taken: int = 0
    received: int = 0
    replies: dict[int, SessionReply] = field(default_factory=dict)  # by seq
    waiting: dict[int, int] = field(default_factory=dict)  # by seq
    incoming: list[Incoming] = field(default_factory=list)  # tries of the next call, on one connection each
    thread: SessionThread | None = None
    timed_out: bool = True

    @property
    def gone(self) -> bool:
        """Return whether no thread runs its calls."""
        return self.timed_out or self.thread is None or not self.thread.is_alive()

    @property
    def held_bytes(self) -> int:
        """Memory that the numbers of its calls take."""
        return sum(one.call.follow for one in self.incoming) + sum(self.waiting.values())

    @property
    def due(self) -> int:
        """The number of the next call."""
        return max(self.taken, self.received) + 1

    @property
    def progress(self) -> tuple[int, int, int]:
        """Return what a pong says of it: taken, left and answered."""
        small = all(len(reply.frames) == 1 for reply in self.replies.values())
        return (
            self.taken,
            sum(one.left for one in self.incoming),
            max(self.replies, default=0) if small else 0,
        )

    def follow(self, connection: Connection) -> None:
        """Send replies to this connection, or to a newer one; of several to the newest that has not ended."""
        last = [connection, *(one for one in self.connections if one is not connection)]
        self.connections = sorted(last, key=lambda one: -one.number)[:MAX_TRIES]

    def expect(self, call: Call, begin: Callable[[Incoming], None]) -> Incoming:
        """A call that may begin once its numbers have come. After a connection broke, what it still had in it
        may come behind what the next one brings: whichever is whole first counts.
        """
        if len(self.incoming) == MAX_TRIES:
            self.incoming.pop(0).drop()
        self.incoming.append(incoming := Incoming(call, call.follow, begin))
        return incoming

    def forget_incoming(self) -> None:
        """Drop what has come of calls that are not whole."""
        for one in self.incoming:
            one.drop()
        self.incoming.clear()

    def note_received(self, received: int) -> None:
        """A ping says which replies have come."""
        self.received = max(self.received, min(received, self.taken))
        self.forget_received()

    def forget_received(self) -> None:
        """Drop the replies that the client has."""
        for seq in [seq for seq in self.replies if seq <= self.received]:
            self.replies.pop(seq).room.drop()

    def end(self) -> None:
        """Its call stops waiting, its thread leaves the store, and its replies go."""
        if self.thread is not None:
            self.thread.end()
        for reply in self.replies.values():
            reply.room.drop()
        self.replies.clear()


class Clients:
    """All sessions. For the server's loop."""

    def __init__(self, site: Site, outbox: Outbox) -> None:
        self.sessions: dict[bytes, ClientRecord] = {}
        self.largest_gradient = 0  # bytes of the numbers of a push; 0 while there is no store
        self._site, self._outbox, self._bounds = site, outbox, site.bounds
        self._threads: list[SessionThread] = []

    @property
    def threads(self) -> list[SessionThread]:
        """Return those that have not ended yet, of clients that are gone too."""
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
        while sum(record.peer == peer for record in self.sessions.values()) >= self._bounds.sessions.share:
            quiet = [(r.heard, name) for name, r in self.sessions.items() if r.peer == peer and r.gone]
            self.end(min(quiet)[1])
        record = self.sessions[session] = ClientRecord(peer, time.monotonic())
        self._note_peers()
        return record

    def _note_peers(self) -> None:
        self._bounds.note_peers(len({one.peer for one in self.sessions.values()}))

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
        threads = Counter(thread.peer for thread in self.threads if thread is not ending)
        self._bounds.check_session(peer, threads)

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
        whole = self._bounds.calls.most + MAX_REQUEST_BYTES
        most = whole if bulk is Bulk.STORE else self.largest_gradient
        if call.follow > most:
            raise InvalidArgument(call.verb[:40], f"numbers: found {call.follow} bytes; expected {most}")
        held = sum(one.held_bytes for one in self.sessions.values() if one.peer == record.peer)
        self._bounds.check_call(record.peer, held, call.follow)

    def end(self, session: bytes) -> None:
        """End a session: its call stops waiting, its thread leaves the store."""
        self.sessions.pop(session).end()
        self._note_peers()

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
