"""The connections of a server: whose each is, and how those that hold its memory or its descriptors are cut.

libzmq keeps the parts of a message until the last one has come, however many they are, and shows them to its
user only then. So every message of the link has one part, a frame at most. What libzmq has read of a
connection since its last whole message is known from the kernel's counts: above a bound it is cut, and the
parts go.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import socket
import struct
import termios
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq

from pyps.remote import bounds
from pyps.remote.incoming import Incoming

SO_COOKIE = 57  # <asm-generic/socket.h>: a number that no other socket of this machine ever has
ROUTER_MADE = b"\0"  # how identities begin that the router gave
MOST_EVENTS = 256  # that are taken at once
BYTES_RECEIVED = 128  # tcpi_bytes_received in struct tcp_info, <linux/tcp.h>


@dataclass(eq=False)
class Accepted:
    """A socket of libzmq's that was accepted. `spoke`: a whole message came on it. number: 0: it is not known
    to be open; its end has been seen, or not yet its beginning.
    """

    descriptor: int
    cookie: bytes
    peer: str = ""  # whose it is, once it has spoken
    number: int = field(default_factory=itertools.count(1).__next__)  # later ones have higher numbers
    spoke: bool = False
    delivered: bool = False  # since the last look
    mark: int = 0  # bytes that had come at the last look that followed a whole message
    ended_looks: int = -1  # since it ended; below 0: it has not


@dataclass(eq=False)
class Connection:
    """Hold what came of one connection. Its messages may still wait to be received when its socket ended and
    the next one has its descriptor, so it is known by the identity that the router gave it. `peer`: whose it
    is. `incoming`: the call whose numbers come.
    """

    identity: bytes
    accepted: Accepted
    peer: str = ""
    incoming: Incoming | None = None

    @property
    def number(self) -> int:
        return self.accepted.number


class Connections:
    """Follows the connections of a bound socket by its events. For the thread that receives from it.

    bound: of more than a peer may have, the oldest are cut. Those that have not spoken yet, whose peer is not
    known, have a share of their own.
    """

    def __init__(self, router: zmq.Socket[bytes], bound: bounds.Bound) -> None:
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        for name in ("AUTH", "PROTOCOL", "NO_DETAIL"):
            events |= getattr(zmq, f"EVENT_HANDSHAKE_FAILED_{name}")
        self._router, self.events = router, router.get_monitor_socket(events)
        self._open: dict[int, Accepted] = {}  # by descriptor
        self._known: dict[bytes, Connection] = {}  # by identity, until all of their messages were received
        self._early: dict[int, list[Connection]] = {}  # by descriptor: known before libzmq has said so
        self._bound = bound
        self.cut_off = 0  # how many were cut

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self._router.disable_monitor()
        self.events.close(linger=0)

    def find(self, frame: Any, identity: bytes) -> Connection | None:
        """The connection that a received frame came on. It has brought a whole message.

        None: the peer speaks a protocol of ZeroMQ that is too old to say, or chose its identity itself, which
        another may have had.
        """
        one = self._known.get(identity)
        if one is not None and one.accepted.number:
            one.accepted.delivered = True
            return one
        is_known = self._follow()
        try:
            descriptor = frame.get(zmq.SRCFD)
        except zmq.ZMQError:
            return None
        if not identity.startswith(ROUTER_MADE):
            return None
        socket = self._open.get(descriptor) if is_known else None
        if socket is not None:
            socket.spoke = socket.delivered = True
        if one is None:
            unknown = Accepted(descriptor, b"", number=0, ended_looks=0)
            one = self._known[identity] = Connection(identity, socket or unknown)
            if socket is None:
                self._early.setdefault(descriptor, []).append(one)
        return one

    def look(self, drained: bool) -> None:
        """Cut the connections that hold too much, and silent ones of too many.

        drained: since the last look there was a time without any message to be received.
        """
        if drained:
            self._forget_ended()
        self._follow()
        held: list[tuple[int, Accepted]] = []
        by_peer = Counter[str]()
        for one in self._open.values():
            came = _read(one)
            if one.delivered:
                one.mark, one.delivered = came, False
            held.append((came - one.mark, one))
            by_peer[one.peer] += came - one.mark
        for size, one in sorted(held, key=lambda pair: -pair[0]):
            together = by_peer.total() if drained else by_peer[one.peer]
            if size > bounds.HELD_BYTES or together > bounds.ALL_HELD_BYTES:
                self.cut(one)
                by_peer[one.peer] -= size
        self.trim()

    def assign(self, one: Connection, peer: str) -> None:
        """A message says whose the connection is; of too many of that peer's the oldest is cut."""
        one.peer = peer
        if one.accepted.peer != peer:
            self._count(one.accepted, peer)

    def _count(self, accepted: Accepted, peer: str) -> None:
        theirs = [other for other in self._open.values() if other.peer == peer and other is not accepted]
        for other in theirs[: max(0, 1 + len(theirs) - self._bound.share)]:
            self.cut(other)
        accepted.peer = peer

    def trim(self) -> None:
        """Cut, of too many connections, the oldest that are silent, while these have more than their share,
        and then those of the peers that have the most.
        """
        self._follow()
        while len(self) > self._bound.most:
            silent = [one for one in self._open.values() if not one.spoke]
            count = Counter(one.peer for one in self._open.values() if one.spoke)
            if len(silent) > self._bound.most * bounds.SILENT_SHARE or not count:
                self.cut(silent[0])
                continue
            most = max(count, key=count.__getitem__)
            self.cut(next(one for one in self._open.values() if one.spoke and one.peer == most))

    def _forget_ended(self) -> None:
        """Forget those of which no message can come: they had ended before the last moment without any."""
        self._known = {name: one for name, one in self._known.items() if one.accepted.ended_looks <= 0}
        self._early = {at: [o for o in ones if o.identity in self._known] for at, ones in self._early.items()}
        for ended in {one.accepted for one in self._known.values() if one.accepted.ended_looks == 0}:
            ended.ended_looks = 1

    def cut_all_but(self, peers: set[str]) -> None:
        """Cut the connections of peers that may not come any more."""
        for one in list(self._known.values()):
            if one.peer and one.peer not in peers:
                self.cut(one.accepted)

    def cut(self, one: Accepted) -> None:
        """End a connection; what it holds is freed. One that has ended stays so."""
        if one.ended_looks >= 0:
            return
        self._end(one)
        self.cut_off += 1
        with contextlib.suppress(OSError), _borrowed(one.descriptor) as end:
            if _cookie_of(end) == one.cookie:  # else it has ended, and its descriptor is another's
                if end.family != socket.AF_UNIX:  # reset: else a peer with a full buffer hears of it late
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)

    def _follow(self) -> bool:
        """Take what libzmq says, but not for ever while peers come faster: whether that was all."""
        with contextlib.suppress(zmq.Again):
            for _ in range(MOST_EVENTS):
                kind, descriptor = struct.unpack("=Hi", self.events.recv_multipart(zmq.NOBLOCK)[0])
                if kind in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED) and descriptor in self._open:
                    self._end(self._open[descriptor])
                if kind == zmq.EVENT_ACCEPTED:
                    self._begin(Accepted(descriptor, _cookie(descriptor)))
            return False
        return True

    def _begin(self, accepted: Accepted) -> None:
        """libzmq says that it has accepted a connection, maybe after the first messages of it."""
        self._open[accepted.descriptor] = accepted
        for one in self._early.pop(accepted.descriptor, []):
            one.accepted, accepted.spoke, accepted.delivered = accepted, True, True
            if one.peer:
                self._count(accepted, one.peer)

    def _end(self, one: Accepted) -> None:
        one.ended_looks = 0
        if self._open.get(one.descriptor) is one:
            del self._open[one.descriptor]


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket of libzmq's, left open. Raises OSError if it is none any more."""
    end = socket.socket(fileno=descriptor)
    try:
        yield end
    finally:
        end.detach()


def _cookie_of(end: socket.socket) -> bytes:
    return end.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8)


def _cookie(descriptor: int) -> bytes:
    with contextlib.suppress(OSError), _borrowed(descriptor) as end:
        return _cookie_of(end)
    return b""


def _read(one: Accepted) -> int:
    """Bytes that libzmq has read of it. Not of a unix socket, whose peers are processes of this user."""
    with contextlib.suppress(OSError, struct.error), _borrowed(one.descriptor) as end:
        if end.family != socket.AF_UNIX and _cookie_of(end) == one.cookie:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
            waiting = fcntl.ioctl(end, termios.FIONREAD, bytes(4))
            return int(struct.unpack_from("Q", info, BYTES_RECEIVED)[0] - struct.unpack("i", waiting)[0])
    return one.mark
