"""The server of a store: one socket, one loop, and one thread for each remote client.

The loop never waits for a call and never works on what a client sent: a new call goes to the client's session
thread, a repeated call gets its reply again, and a malformed message is counted and dropped. What one client
can take of the server is bounded (pyps.remote.bounds).
"""

from __future__ import annotations

import contextlib
import math
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from pyps.errors import InputError, LinkLost, StoreError
from pyps.native.local import LocalBackend
from pyps.native.values import Layout
from pyps.profiler.host_memory import disable_malloc_trim, trim_malloc
from pyps.remote.address import (
    CLIENT_TIMEOUT_SECONDS,
    Address,
    check_store_name,
    endpoint_parts,
    is_loopback,
    needs_ipv6,
)
from pyps.remote.admission import Admission
from pyps.remote.bounds import MAX_SESSIONS, QUEUED_MESSAGES, SESSIONS_PER_PEER, ServerBounds
from pyps.remote.clients import FORGET_SECONDS, ClientRecord, Clients
from pyps.remote.connections import Connection, Connections
from pyps.remote.framing import FRAME_BYTES
from pyps.remote.handlers import HANDLERS
from pyps.remote.incoming import Incoming
from pyps.remote.keys import KeyFolder
from pyps.remote.local import SocketFolder
from pyps.remote.outbox import Outbox
from pyps.remote.session import SessionReply
from pyps.remote.site import Home, Site, wing
from pyps.remote.verbs import Handlers
from pyps.remote.wire import (
    MAX_HEADER_BYTES,
    Bye,
    Call,
    Malformed,
    Pong,
    check_byte_order,
    decode_request,
    encode,
    failure,
)

HANDSHAKE_SECONDS = 5.0
SEAL_BYTES = 256  # at least what encryption adds to a frame
UNSENT_MESSAGES = 32  # to one connection
BATCH = 64  # messages received between two looks at the rest
LOOK_SECONDS = 0.05
TRIM_SECONDS = 30.0  # what a burst has left goes so soon; the pages of a gradient are new as seldom
SIGNAL_SECONDS = 0.5  # in which a handler runs at the latest
WAKE = None  # in the outbox, in place of a reply
DOMAIN = "pyps"  # of the admitted keys


@dataclass
class Counters:
    """Counts of a server. faults: of its own."""

    calls: int = 0
    repeated: int = 0
    refused: int = 0
    timed_out: int = 0
    cut_off: int = 0
    faults: int = 0


class Server:
    """Serves the store of that name, there already or made by the first client, until close().

    bind: tcp://host:port, port * for any free one; None: a unix socket that only this user's processes reach,
    or with keys any port of the loopback. keys: the folder of the server's keys (pyps.remote.keys), made if
    missing; what `pyps keys` changes there counts at once. insecure: listen on TCP without keys.
    client_timeout_seconds: a client not heard of for so long is dead. sessions_per_client: that one key, or
    without keys one host or process, may have. home: the address of the first of several servers of a model,
    of which this is another, or a function that gives it (LinkLost: not now); None: this is the first, or the
    only one.

    Raises InputError for a wrong or taken address, wrong keys, or TCP without keys unless `insecure`.
    """

    def __init__(
        self,
        store: str,
        bind: str | None = None,
        *,
        keys: str | Path | None = None,
        insecure: bool = False,
        client_timeout_seconds: float = CLIENT_TIMEOUT_SECONDS,
        sessions_per_client: int = SESSIONS_PER_PEER,
        home: Home | None = None,
    ) -> None:
        check_byte_order()
        disable_malloc_trim()  # the frames of one gradient are the next one's memory
        check_store_name("serve", store)
        _check_options(bind, keys, insecure, client_timeout_seconds, sessions_per_client)
        self.counters = Counters()
        self.store = store
        several = wing()
        self._shards = several.host(store, home, self._note_opened)
        self._keys: KeyFolder | None = None
        self._site = Site(
            store,
            secrets.token_bytes(8),
            client_timeout_seconds,
            self._note_created,
            self._note_opened,
            self._shards,
            ServerBounds(sessions_per_client),
            None if bind is None and keys is None else {},  # processes of one user may do all that it can
            Handlers({**HANDLERS, **several.handlers}),
            self._ranks_of,
        )
        self._closed = self._stopping = False
        self._held: LocalBackend | None = None
        self._made: LocalBackend | None = None  # the store, if it was made through the link
        self._created = False
        self._hold()
        self._outbox = Outbox()
        self._clients = Clients(self._site, self._outbox)
        self._context: zmq.Context[Any] = zmq.Context(io_threads=2)
        self._admission: Admission | None = None
        self._folder: SocketFolder | None = None
        try:
            self._router = self._bind(bind, keys)
        except BaseException:
            self._end()
            raise
        self._ended = threading.Event()
        self._trim_at = time.monotonic() + TRIM_SECONDS
        self._go_on()
        self._thread = threading.Thread(target=self._serve, name="pyps-server", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where clients find the store: ipc:///folder/name, or tcp://host:port/name with the host that was
        bound.
        """
        if self._folder is not None:
            return str(Address(self.store, path=str(self._folder.path)))
        host, port = endpoint_parts(self._endpoint)
        return str(Address(self.store, host, port or 0, insecure=self._keys is None))

    @property
    def sessions(self) -> int:
        """Clients that are there."""
        return len(self._clients.sessions)

    def wait(self) -> None:
        """Until the server ends, which it does by close() from another thread, or by a fault of its own.

        Not by joining the thread: what a signal handler raises there makes Python take the thread for ended.
        In slices: a signal that comes just before a wait for a lock does not end that wait.
        """
        while not self._ended.wait(SIGNAL_SECONDS):
            pass

    def close(self, timeout: float = 5.0) -> None:
        """Stop answering; the session threads leave the store, for which they have `timeout` seconds.

        A store that was made through the link is removed, unless the server ended by a fault: then it stays
        for another server to go on with. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        in_order = self._thread.is_alive()
        self._stopping = True
        self._outbox.put(WAKE)
        self._thread.join()
        deadline = time.monotonic() + timeout
        for thread in self._clients.threads:
            thread.end()
        for thread in self._clients.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._shards.close(self._created and in_order)
        self._held = None
        if self._made is not None and in_order:
            self._made.remove()
        self._connections.close()
        self._router.close(linger=200)
        self._end()

    def _end(self) -> None:
        if self._admission is not None:
            self._admission.close()
        self._context.destroy(linger=200)
        if self._folder is not None:  # only now: libzmq removes the socket's file when it ends
            self._folder.close()
        if not self._clients.threads:
            self._outbox.close()

    def _bind(self, bind: str | None, keys: str | Path | None) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        router.maxmsgsize = max(MAX_HEADER_BYTES, FRAME_BYTES) + SEAL_BYTES
        router.rcvhwm, router.sndhwm = QUEUED_MESSAGES, UNSENT_MESSAGES
        router.router_mandatory = 1  # say which connections have ended
        router.copy_threshold = 0  # else a reply's last, small frame would count as sent before the others
        router.handshake_ivl = int(1000 * HANDSHAKE_SECONDS)
        if keys is not None:
            self._keys = KeyFolder.open(keys)
            self._admission = Admission(self._context, self._keys, self._site.bounds.connections)
            router.curve_server = True
            pair = self._keys.keys
            router.curve_publickey, router.curve_secretkey = pair.public.encode(), pair.secret.encode()
            router.zap_domain = DOMAIN.encode()
        self._connections = Connections(router, self._site.bounds.connections)
        if bind is None and keys is None:
            self._folder = SocketFolder(self.store)
            self._folder.bind(router)
        else:
            _bind_tcp(router, bind or "tcp://127.0.0.1:*")
        self._endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._keys is not None:
            self._keys.save()  # new ones, only now that they are of use
        return router

    def _go_on(self) -> None:
        """With the shard that an earlier server has left. Raises StoreError."""
        try:
            self._shards.open_existing()
        except BaseException:
            self._shards.close(remove=False)
            self._connections.close()
            self._router.close(linger=0)
            self._end()
            raise

    def _note_created(self, made: LocalBackend | None) -> None:
        self._created, self._made = True, made or self._made

    def _hold(self) -> None:
        """Keep the store open, so that `pyps shm gc` spares it while there is no client."""
        with contextlib.suppress(StoreError):
            self._held = LocalBackend.open(self.store)

    def _note_opened(self, layout: Layout) -> None:
        self._hold()
        size = 5 * layout.flat_elements  # with its ranges, which the core bounds
        self._clients.largest_gradient = max(self._clients.largest_gradient, size)

    def _serve(self) -> None:
        try:
            self._answer()
        finally:
            self._ended.set()

    def _answer(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._outbox, zmq.POLLIN)
        poller.register(self._connections.events, zmq.POLLIN)
        if self._admission is not None:
            poller.register(self._admission.questions, zmq.POLLIN)
        look_at, drained = time.monotonic(), False
        while not self._stopping:
            poller.poll(max(0, math.ceil(1000 * (look_at - time.monotonic()))))
            for reply in self._outbox.take():
                if reply is not WAKE:
                    self._guarded(self._finish, reply)
            drained = self._receive_some() or drained
            self._guarded(self._connections.trim)
            if self._admission is not None:
                self._guarded(self._admission.answer)
            if time.monotonic() >= look_at:
                self._guarded(self._look, drained)
                drained = False
                look_at = time.monotonic() + LOOK_SECONDS

    def _guarded(self, act: Any, *arguments: Any) -> None:
        """Run a part of the loop; a fault in it is reported, and the others are served on."""
        try:
            act(*arguments)
        except Exception:
            self.counters.faults += 1
            traceback.print_exc(file=sys.stderr)

    def _look(self, drained: bool) -> None:
        """Do what is to be done from time to time."""
        if time.monotonic() >= self._trim_at:
            trim_malloc()
            self._trim_at = time.monotonic() + TRIM_SECONDS
        self._site.bounds.answers.sweep()
        self._connections.look(drained)
        if self._admission is not None:
            self._admission.count_anew()
        self.counters.cut_off = self._connections.cut_off
        self.counters.timed_out += self._clients.expire()
        if self._keys is not None and self._keys.reload():
            admitted = {f"key {name!r}" for name in self._keys.names}
            for session, record in list(self._clients.sessions.items()):
                if record.peer not in admitted:
                    self._clients.end(session)
            self._connections.cut_all_but(admitted)

    def _receive_some(self) -> bool:
        """Take the next messages: whether these were all."""
        for _ in range(BATCH):
            try:
                identity = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            frame = self._router.recv(copy=False)
            self._guarded(self._receive, identity, frame)
        return False

    def _receive(self, identity: Any, frame: Any) -> None:
        connection = self._connections.find(frame, identity.bytes)
        if connection is None or frame.more:
            self._refuse_parts(connection, frame)
            return
        if connection.incoming is not None:  # if its key is revoked, the connection is cut
            self._add(connection, connection.incoming, frame)
            return
        peer = self._peer(frame) or ""
        if not peer:
            self._connections.cut(connection.accepted)  # its key was revoked: a new handshake will say so
        else:
            self._connections.assign(connection, peer)
            self._take(connection, peer, decode_request(frame.buffer))

    def _refuse_parts(self, connection: Connection | None, frame: Any) -> None:
        """No message of the link has several parts. Nothing else can be received before the last one."""
        if connection is not None:
            self._connections.cut(connection.accepted)
        self.counters.refused += 1
        while frame.more:
            frame = self._router.recv(copy=False)

    def _peer(self, frame: Any) -> str | None:
        """Who a message comes from; None: a key that is not admitted any more."""
        if self._keys is None:
            return f"the peer {frame.get('Peer-Address')}"
        name = self._keys.name_of(frame.get("User-Id"))
        return None if name is None else f"key {name!r}"

    def _ranks_of(self, peer: str) -> tuple[int, ...] | None:
        """The ranks that a peer's key is bound to; None: it is bound to none."""
        return None if self._keys is None else self._keys.ranks_of(peer.removeprefix("key ").strip("'"))

    def _take(self, connection: Connection, peer: str, message: Call | Bye | Any) -> None:
        if isinstance(message, Malformed):
            self.counters.refused += 1
            return
        record = self._clients.find(message.session, peer)
        if isinstance(message, Call):
            self._take_call(connection, peer, record, message)
        elif isinstance(message, Bye):
            if record is not None:
                self._clients.end(message.session)
        else:
            if record is not None:
                record.note_received(message.received)
            progress = (0, 0, 0) if record is None else record.progress
            self._send([connection], [encode(Pong(self._site.server, *progress))])

    def _take_call(self, connection: Connection, peer: str, record: ClientRecord | None, call: Call) -> None:
        """Begin a new call, answer a repeated one again, refuse others; their numbers are dropped."""
        drop = Incoming(call, call.follow)
        connection.incoming = drop if call.follow else None
        try:
            if record is None:
                if call.seq != 1:
                    raise LinkLost("session", "the server does not know it")
                record = self._clients.open(call.session, peer)
            record.follow(connection)
            record.received = max(record.received, call.received)
            if record.received < call.seq <= record.taken:
                self.counters.repeated += 1
                if call.seq in record.replies:
                    self._reply(record, record.replies[call.seq])
                return
            self._clients.check_call(record, call)
            self._clients.thread_of(call.session, record)
        except StoreError as error:
            self.counters.refused += 1
            self._send([connection], [failure(call.seq, error)])
            return
        incoming = record.expect(call, partial(self._begin, record))
        if call.follow:
            connection.incoming = incoming
        else:
            self._begin(record, incoming)

    def _add(self, connection: Connection, incoming: Incoming, frame: Any) -> None:
        """Numbers of a call that came before."""
        if not incoming.add(frame):
            self.counters.refused += 1
            self._connections.cut(connection.accepted)
            return
        if not incoming.left:
            connection.incoming = None
            if incoming.begin is not None:
                incoming.begin(incoming)

    def _begin(self, record: ClientRecord, incoming: Incoming) -> None:
        """Hand a whole call to its session's thread."""
        call, frames = incoming.call, list(incoming.frames)
        record.forget_incoming()
        if call.seq != record.due:
            return
        try:
            thread = self._clients.thread_of(call.session, record)
        except StoreError as error:
            self.counters.refused += 1
            self._send(record.connections, [failure(call.seq, error)])
            return
        record.taken = call.seq
        record.waiting[call.seq] = call.follow
        record.forget_received()
        self.counters.calls += 1
        thread.do(call, frames)

    def _finish(self, reply: SessionReply) -> None:
        record = self._clients.sessions.get(reply.session)
        if record is None:
            reply.room.drop()
            return
        record.waiting.pop(reply.seq, None)
        record.replies[reply.seq] = reply
        self._reply(record, reply)

    def _reply(self, record: ClientRecord, reply: SessionReply) -> None:
        tracker = self._send(record.connections, reply.frames)
        if tracker is not None:
            reply.room.trackers.append(tracker)

    def _send(self, connections: Sequence[Connection], frames: list[Any]) -> zmq.MessageTracker | None:
        """Send to the first of these that has not ended, without waiting. What is returned for a reply with
        numbers tells when libzmq has sent it.
        """
        track = len(frames) > 1
        for one in connections:
            try:
                return self._router.send_multipart(
                    [one.identity, *frames], zmq.NOBLOCK, copy=False, track=track
                )
            except zmq.Again:
                break  # it does not read; it asks again if it wants
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        return None  # the client is gone; it asks again if it returns


def _check_options(
    bind: str | None, keys: object, insecure: bool, client_timeout_seconds: float, sessions_per_client: int
) -> None:
    if bind is not None:
        host, _ = endpoint_parts(bind)
        if keys is None and not insecure:
            near = ", which any user of this machine reaches," if is_loopback(host) else ""
            expected = "keys (`--keys DIR`), or that it is to be insecure (`--insecure`)"
            raise InputError("serve", "bind", f"{bind}{near} without keys", expected)
    elif insecure:
        raise InputError("serve", "insecure", "no address", "one to listen on (`--bind tcp://host:port`)")
    if keys is not None and insecure:
        raise InputError("serve", "insecure", "keys too", "either of them")
    if not 0.0 < client_timeout_seconds <= FORGET_SECONDS:
        expected = f"more than 0, at most {FORGET_SECONDS:g} s"
        raise InputError("serve", "client_timeout", f"{client_timeout_seconds} s", expected)
    if not 1 <= sessions_per_client <= MAX_SESSIONS:
        raise InputError("serve", "sessions_per_client", str(sessions_per_client), f"1 to {MAX_SESSIONS}")


def _bind_tcp(router: zmq.Socket[bytes], bind: str) -> None:
    router.ipv6 = needs_ipv6(endpoint_parts(bind)[0])
    try:
        router.bind(bind)
    except zmq.ZMQError as error:
        expected = "an address of this machine that is free"
        raise InputError("serve", "bind", f"{bind}: {error}", expected) from None
