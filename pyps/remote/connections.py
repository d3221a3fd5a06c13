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
import resource
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

if TYPE_CHECKING:
    from pyps.remote.clients import Incoming

HELD_BYTES = 1 << 20  # of one connection, without a whole message: an honest one holds less than a frame
ALL_HELD_BYTES = 64 << 20  # of all connections together
BUSY_FACTOR = 16  # for both, while whole messages queue up behind a busy loop
MAX_CONNECTIONS = 1024
SO_COOKIE = 57  # <asm-generic/socket.h>: a number that no other socket of this machine ever has
BYTES_RECEIVED = 128  # tcpi_bytes_received in struct tcp_info, <linux/tcp.h>


@dataclass(eq=False)
class Connection:
    """One accepted connection. `peer`: whose it is, once it `spoke` (a whole message came). `incoming`: the
    call whose numbers come.
    """

    descriptor: int
    cookie: bytes
    number: int = field(default_factory=itertools.count(1).__next__)  # later ones have higher numbers
    identity: bytes = b""
    peer: str = ""
    spoke: bool = False
    delivered: bool = False  # since the last look
    mark: int = 0  # bytes that had come at the last look that followed a whole message
    incoming: Incoming | None = None


class Connections:
    """Follows the connections of a bound socket by its events. For the thread that receives from it."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        for name in ("AUTH", "PROTOCOL", "NO_DETAIL"):
            events |= getattr(zmq, f"EVENT_HANDSHAKE_FAILED_{name}")
        self._router, self._events = router, router.get_monitor_socket(events)
        self._open: dict[int, Connection] = {}
        self.most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.cut_off = 0  # how many were cut

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self._router.disable_monitor()
        self._events.close(linger=0)

    def find(self, frame: Any, identity: bytes) -> Connection | None:
        """The connection that a received frame came on. It has brought a whole message.

        None: the peer speaks a protocol of ZeroMQ that is too old to say.
        """
        self._follow()  # what happened to its descriptor before came before it
        try:
            descriptor = frame.get(zmq.SRCFD)
        except zmq.ZMQError:
            return None
        one = self._open.get(descriptor)
        if one is None or (one.spoke and one.identity != identity):
            one = self._open[descriptor] = Connection(descriptor, _cookie(descriptor))
        one.identity, one.spoke, one.delivered = identity, True, True
        return one

    def look(self, drained: bool) -> None:
        """Cut the connections that hold too much, and the oldest silent ones of too many.

        drained: since the last look there was a time without any message to be received.
        """
        factor = 1 if drained else BUSY_FACTOR
        self._follow()
        held: list[tuple[int, Connection]] = []
        for one in self._open.values():
            came = _read(one)
            if one.delivered:
                one.mark, one.delivered = came, False
            held.append((came - one.mark, one))
        total = sum(size for size, _ in held)
        for size, one in sorted(held, key=lambda pair: -pair[0]):
            if size > factor * HELD_BYTES or total > factor * ALL_HELD_BYTES:
                self.cut(one)
                total -= size
        for one in [one for one in self._open.values() if not one.spoke][: max(0, len(self) - self.most)]:
            self.cut(one)

    def cut_all_but(self, peers: set[str]) -> None:
        """Cut the connections of peers that may not come any more."""
        for one in list(self._open.values()):
            if one.peer and one.peer not in peers:
                self.cut(one)

    def cut(self, one: Connection) -> None:
        """End a connection; what it holds is freed."""
        if self._open.get(one.descriptor) is one:
            del self._open[one.descriptor]
        self.cut_off += 1
        with contextlib.suppress(OSError), _borrowed(one.descriptor) as end:
            if _cookie_of(end) == one.cookie:  # else it has ended, and its descriptor is another's
                if (
                    end.family != socket.AF_UNIX
                ):  # reset, or a peer with a full buffer hears of it a minute later
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)

    def _follow(self) -> None:
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._events)
            descriptor = event["value"]
            assert isinstance(descriptor, int)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[descriptor] = Connection(descriptor, _cookie(descriptor))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.pop(descriptor, None)


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


def _read(one: Connection) -> int:
    """Bytes that libzmq has read of it. Not of a unix socket, whose peers are processes of this user."""
    with contextlib.suppress(OSError, struct.error), _borrowed(one.descriptor) as end:
        if end.family != socket.AF_UNIX and _cookie_of(end) == one.cookie:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
            waiting = fcntl.ioctl(end, termios.FIONREAD, bytes(4))
            return int(struct.unpack_from("Q", info, BYTES_RECEIVED)[0] - struct.unpack("i", waiting)[0])
    return one.mark
