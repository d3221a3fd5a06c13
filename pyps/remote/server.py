"""The server of a store: one socket, one loop, and one thread for each remote client.

The loop never waits for a call. A new call goes to the client's session thread, a repeated call gets its
reply again, and a malformed message is counted and dropped. After `client_timeout_seconds` without a message
a client loses its thread; its last replies are kept in case it returns.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pyps import native
from pyps.errors import Busy, InputError, InvalidArgument, LinkLost, SegmentNotFound, StoreError, StoreFull
from pyps.remote.address import Address, endpoint_parts, is_loopback
from pyps.remote.framing import Frames
from pyps.remote.handlers import Site
from pyps.remote.keys import ServerKeys
from pyps.remote.session import SessionThread
from pyps.remote.wire import (
    MAX_HEADER_BYTES,
    MAX_IN_FLIGHT,
    Bye,
    Call,
    Malformed,
    Pong,
    check_byte_order,
    decode_request,
    encode,
    failure,
)

CLIENT_TIMEOUT_SECONDS = 10.0
MAX_SESSIONS = 256
FORGET_SECONDS = 600.0  # how long the replies to a client that timed out are kept
SEAL_BYTES = 256  # at least what encryption adds to a frame
TICK_MS = 250
OUTLET = "inproc://replies"
STOP = b"stop"
DOMAIN = "pyps"  # of the admitted keys


@dataclass
class Counters:
    """Counts of a server; `bytes_in` and `bytes_out` are headers and numbers."""

    calls: int = 0
    repeated: int = 0
    refused: int = 0
    timed_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass
class ClientRecord:
    """What the loop knows of one client. Calls up to `taken` were begun; the client has all replies up to
    `received`, and may ask for the later ones in `replies` again. `thread` runs its calls; it has ended, or
    soon will, if the client has `timed_out`.
    """

    heard: float
    identity: bytes = b""
    taken: int = 0
    received: int = 0
    replies: dict[int, list[Any]] = field(default_factory=dict)  # by seq
    thread: SessionThread | None = None
    timed_out: bool = True


class Server:
    """Serves the store of that name, there already or made by the first client, until close().

    bind: tcp://host:port, port * for any free one. keys: of the admitted clients; without keys only
    the loopback of this machine is served, unless `insecure`. client_timeout_seconds: a client not heard
    of for so long is dead.

    Raises InputError for a wrong or taken address, or one that leaves this machine in the clear.
    """

    def __init__(
        self,
        store: str,
        bind: str = "tcp://127.0.0.1:*",
        *,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        client_timeout_seconds: float = CLIENT_TIMEOUT_SECONDS,
    ) -> None:
        check_byte_order()
        host, _ = endpoint_parts(bind)
        if keys is None and not insecure and not is_loopback(host):
            expected = "keys (`--keys DIR`), or that it is to be insecure (`--insecure`)"
            raise InputError("serve", "bind", f"{bind}, which leaves this machine, without keys", expected)
        if not 0.0 < client_timeout_seconds <= FORGET_SECONDS:
            expected = f"more than 0, at most {FORGET_SECONDS:g} s"
            raise InputError("serve", "client_timeout", f"{client_timeout_seconds} s", expected)
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", store):
            raise InputError("serve", "store", repr(store), "1 to 200 letters, digits, '.', '_' or '-'")
        self.counters = Counters()
        self.store = store
        self._sessions: dict[bytes, ClientRecord] = {}
        self._threads: list[SessionThread] = []
        self._site = Site(store, secrets.token_bytes(8), client_timeout_seconds, self._note_created)
        self._created = self._closed = False
        self._context: zmq.Context[Any] = zmq.Context(io_threads=2)
        self._guard: ThreadAuthenticator | None = None
        try:
            self._router = self._bind(bind, keys)
        except BaseException:
            self._end()
            raise
        self._outlet = self._context.socket(zmq.PULL)
        self._outlet.bind(OUTLET)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pyps-server", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where clients find the store: tcp://host:port/name, with the host that was bound."""
        host, port = endpoint_parts(self._endpoint)
        return str(Address(host, port or 0, self.store))

    def wait(self) -> None:
        """Until the server ends, which it does by close() from another thread, or by a fault of its own.

        Not by joining the thread: what a signal handler raises there makes Python take the thread for ended.
        """
        self._ended.wait()

    def close(self, timeout: float = 5.0) -> None:
        """Stop answering; the session threads leave the store, for which they have `timeout` seconds.

        Those that wait there for others leave when their wait ends. A store that was made through the link
        is removed. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        with self._context.socket(zmq.PUSH) as stop:
            stop.connect(OUTLET)
            stop.send(STOP)
        self._thread.join()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._created:
            with contextlib.suppress(SegmentNotFound):
                native.unlink(self.store, force=True)
        self._router.close(linger=200)
        self._outlet.close()
        self._end()

    def _end(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        if not any(thread.is_alive() for thread in self._threads):
            self._context.destroy(linger=0)  # else its sockets end with their threads

    def _bind(self, bind: str, keys: ServerKeys | None) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        router.maxmsgsize = MAX_HEADER_BYTES + SEAL_BYTES  # of a frame; those of arrays are smaller
        router.rcvhwm = 16
        router.ipv6 = ":" in endpoint_parts(bind)[0]
        if keys is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback(DOMAIN, _Admission(keys.clients))
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = keys.public.encode(), keys.secret.encode()
            router.zap_domain = DOMAIN.encode()
        try:
            router.bind(bind)
        except zmq.ZMQError as error:
            raise InputError(
                "serve", "bind", f"{bind}: {error}", "an address of this machine that is free"
            ) from None
        self._endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        return router

    def _note_created(self) -> None:
        self._created = True

    def _serve(self) -> None:
        try:
            self._answer()
        finally:
            self._ended.set()

    def _answer(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._outlet, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(TICK_MS))
            if self._outlet in ready:
                name, *rest = self._outlet.recv_multipart(copy=False)
                if name.bytes == STOP:
                    break
                self._finish(name.bytes, int.from_bytes(rest[0].bytes, "little"), rest[1:])
            if self._router in ready:
                self._receive(self._router.recv_multipart(copy=False))
            self._expire_clients()
        for thread in self._threads:
            thread.work.put(None)

    def _receive(self, frames: list[Any]) -> None:
        identity, *parts = frames
        self.counters.bytes_in += sum(len(part) for part in parts)
        message = decode_request(parts[0].buffer) if parts else Malformed("no frame")
        if isinstance(message, Malformed):
            self.counters.refused += 1
            return
        session = self._sessions.get(message.session)
        if session is not None:
            session.heard = time.monotonic()
        if isinstance(message, Call):
            self._take(identity.bytes, session, message, [part.buffer for part in parts[1:]])
        elif isinstance(message, Bye):
            if session is not None and session.thread is not None:
                session.thread.work.put(None)
            self._sessions.pop(message.session, None)
        else:
            self._send(identity.bytes, [encode(Pong(self._site.server))])

    def _take(self, identity: bytes, session: ClientRecord | None, call: Call, numbers: Frames) -> None:
        """Give a new call to the session thread, answer a repeated one again, refuse any other."""
        if session is None:
            if call.seq != 1:
                self._refuse(identity, call, LinkLost("session", "the server does not know it"))
                return
            if not self._has_room():
                self._refuse(identity, call, StoreFull("session", f"found {MAX_SESSIONS} clients"))
                return
            session = self._sessions[call.session] = ClientRecord(time.monotonic())
        session.identity = identity
        session.received = max(session.received, call.received)
        due = max(session.taken, session.received) + 1
        if session.received < call.seq <= session.taken:
            self.counters.repeated += 1
            if call.seq in session.replies:
                self._send(identity, session.replies[call.seq])
        elif call.seq - session.received > MAX_IN_FLIGHT:
            text = f"found {call.seq - session.received} calls under way; expected at most {MAX_IN_FLIGHT}"
            self._refuse(identity, call, Busy("session", text))
        elif call.seq != due:
            text = f"seq: found {call.seq}; expected {due}"
            self._refuse(identity, call, InvalidArgument("session", text))
        else:
            session.taken = call.seq
            session.replies = {seq: r for seq, r in session.replies.items() if seq > session.received}
            self.counters.calls += 1
            self._thread_of(call.session, session).work.put((call, numbers))

    def _refuse(self, identity: bytes, call: Call, why: StoreError) -> None:
        self.counters.refused += 1
        self._send(identity, [failure(call.seq, why)])

    def _thread_of(self, name: bytes, session: ClientRecord) -> SessionThread:
        if session.timed_out or session.thread is None:
            session.thread = SessionThread(self._context, OUTLET, name, self._site, session.thread)
            session.timed_out = False
            session.thread.start()
            self._threads = [d for d in self._threads if d.is_alive()] + [session.thread]
        return session.thread

    def _finish(self, name: bytes, seq: int, frames: list[Any]) -> None:
        session = self._sessions.get(name)
        if session is not None:
            session.replies[seq] = frames
            self._send(session.identity, frames)

    def _send(self, identity: bytes, frames: list[Any]) -> None:
        self.counters.bytes_out += sum(len(frame) for frame in frames)
        with contextlib.suppress(zmq.Again):  # the client is gone; it asks again if it returns
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)

    def _expire_clients(self) -> None:
        now = time.monotonic()
        for name, session in list(self._sessions.items()):
            quiet = now - session.heard
            if (
                session.thread is not None
                and not session.timed_out
                and quiet > self._site.client_timeout_seconds
            ):
                session.thread.work.put(None)
                session.timed_out = True
                self.counters.timed_out += 1
            elif quiet > FORGET_SECONDS:
                del self._sessions[name]

    def _has_room(self) -> bool:
        """Whether there is room for a client; the one that timed out first is forgotten if need be."""
        if len(self._sessions) < MAX_SESSIONS:
            return True
        timed_out = [(s.heard, name) for name, s in self._sessions.items() if s.timed_out]
        if timed_out:
            del self._sessions[min(timed_out)[1]]
        return bool(timed_out)


class _Admission:
    """Tells the authenticator to admit the clients with these public keys."""

    def __init__(self, clients: tuple[str, ...]) -> None:
        self._clients = {client.encode() for client in clients}

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._clients
