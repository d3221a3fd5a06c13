"""The client's end of the link: calls done in order, each exactly once, none waiting for ever.

A call may be sent while earlier ones are under way. Those without a reply are sent again when the connection
breaks; the server does each once, however often it arrives. Pings travel on a separate connection, where no
large frame delays them; without a pong for as long as the server waits for its clients, the link is lost.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from pyps.errors import InputError, InvalidArgument, LinkLost, LinkRefused, StoreError
from pyps.native.values import Traffic
from pyps.remote.address import Address, needs_ipv6
from pyps.remote.framing import Frames, to_frames
from pyps.remote.keys import read_client_keys
from pyps.remote.local import check_socket
from pyps.remote.verbs import Asked, LinkVerb
from pyps.remote.wire import (
    MAX_HEADER_BYTES,
    SESSION_BYTES,
    Answer,
    Bye,
    Call,
    Failure,
    Ping,
    Pong,
    check_byte_order,
    decode_reply,
    encode,
    encode_raw,
    raised,
)

R = TypeVar("R")
CONNECT_SECONDS = 10.0  # for the first sign of a server
PINGS_PER_TIMEOUT = 8
SLICE_MS = 200  # how often a waiting call looks whether the server still lives
GOODBYE_SECONDS = 1.0
DEAD_LINK_MS = 8000  # sent and not acknowledged for so long: the kernel gives the connection up
MAX_RESENDS = 30  # without a reply, at growing intervals
MAX_BACKOFF_SECONDS = 2.0
STALLED_PONGS = 3 * PINGS_PER_TIMEOUT  # without progress: what is not there by then will not come
STOP = "inproc://stop"
WATCHED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not admit this key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it speaks another protocol, or only one side has keys",
}


@dataclass(frozen=True, slots=True)
class Posted(Generic[R]):
    """A call that was sent."""

    verb: LinkVerb[Any, R]
    seq: int


class Client:
    """A session with one server. Threads may share it: one of those that wait receives for all.

    Every call raises LinkLost once the server is gone, LinkRefused if it does not let this client in.
    """

    def __init__(self, address: Address, session: bytes | None = None) -> None:
        """session: its secret name; None: a new one."""
        check_byte_order()
        self.address = address
        self.traffic = Traffic()
        self._keys = read_client_keys(address.keys) if address.keys else None
        if address.path:
            check_socket(address.path)
        self.session, self._seq = session or secrets.token_bytes(SESSION_BYTES), 0
        self._changed = threading.Condition()  # guards what follows, and the sockets
        self._unanswered: dict[int, list[Any]] = {}  # seq -> what was sent, in order
        self._replies: dict[int, tuple[Answer | Failure, list[Any]]] = {}  # that no thread has taken yet
        self._untaken: set[int] = set()  # calls whose reply none will take: an error ended the wait
        self._breaks = 0  # of the connection, since the last reply
        self._refused = False  # the socket did not take a call
        self._receiving = False  # a thread sleeps until something comes
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes that thread
        self._context: zmq.Context[Any] = zmq.Context()
        self._heartbeat = Heartbeat(self._context, self._dial, lambda: Ping(self.session, self._received))
        try:
            self._socket = self._dial(monitored=True)
        except InputError:
            self._context.destroy(linger=0)
            raise
        self._heartbeat.start()

    def call(self, asked: Asked[R]) -> R:
        """The call's value. Raises what the call raised over there."""
        return self.exchange(asked)[0]

    def exchange(self, asked: Asked[R], numbers: Iterable[NDArray[Any]] = ()) -> tuple[R, Frames]:
        """The same for a call with numbers: its value, and those that came back."""
        return self.take(self.post(asked, numbers))

    def post(self, asked: Asked[R], numbers: Iterable[NDArray[Any]] = ()) -> Posted[R]:
        """Send a call without waiting for its reply; for `take`. `numbers` may not change until then."""
        frames = to_frames(numbers)
        with self._changed:
            received = self._received
            follow = sum(len(frame) for frame in frames)
            arguments = encode_raw(asked.arguments)
            seq = self._seq + 1
            call = Call(self.session, seq, asked.verb.name, arguments, received, follow)
            if self._broken():
                self._reconnect()
            header = encode(call)
            if len(header) > MAX_HEADER_BYTES:
                found = f"{len(header)} bytes; expected at most {MAX_HEADER_BYTES}: fewer parameter groups"
                raise InvalidArgument(asked.verb.name, f"header: found {found}")
            self._unanswered[seq] = [header, *frames]
            self._seq = seq  # a ping never takes it for answered
            self._heartbeat.expect_progress()
            self._send(self._unanswered[self._seq])
            if self._receiving:  # what it waits on may have been used up
                os.eventfd_write(self._bell, 1)
            return Posted(asked.verb, self._seq)

    @property
    def _received(self) -> int:
        """All replies up to this one have come."""
        last = self._seq
        return min(list(self._unanswered), default=last + 1) - 1

    def take(self, posted: Posted[R]) -> tuple[R, Frames]:
        """Wait for the reply to a posted call: as `exchange`. Once for each."""
        reply, frames = self._wait(posted.seq)
        if isinstance(reply, Failure):
            raise raised(reply)
        try:
            return posted.verb.value.decode(reply.value), [frame.buffer for frame in frames]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(posted.verb.name, f"the server's answer is not understood: {error}") from None

    def set_server(self, server: bytes, client_timeout_seconds: float) -> None:
        """Set the server's identity and client timeout; the interval of pings follows from it."""
        self._heartbeat.follow(server, client_timeout_seconds)

    def give_up(self, why: str) -> None:
        """End every wait, in any thread, with LinkLost. Close it then."""
        self._heartbeat.give_up(why)

    def close(self) -> None:
        """End the session; the server's thread for it leaves the store. Idempotent."""
        if self._context.closed:
            return
        with self._changed:
            if not self._heartbeat.trouble():
                with contextlib.suppress(zmq.Again):
                    self._socket.send(encode(Bye(self.session)), zmq.NOBLOCK)
                self._hang_up(GOODBYE_SECONDS)
            else:
                self._hang_up(0.0)
        self._heartbeat.stop()
        self._context.term()
        os.close(self._bell)

    def _dial(self, monitored: bool = False) -> zmq.Socket[bytes]:
        """A socket on its way to the server."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.linger = socket.sndhwm = 0  # nothing is sent after the end; no bound on what waits to be sent
        socket.ipv6 = needs_ipv6(self.address.host)
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 1000
        socket.tcp_maxrt = DEAD_LINK_MS
        socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, 5
        socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 2, 3
        if (keys := self._keys) is not None:
            socket.curve_serverkey = keys.server.encode()
            socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        if monitored:
            self._monitor = socket.get_monitor_socket(WATCHED)
        try:
            socket.connect(self.address.endpoint)
        except zmq.ZMQError as error:
            raise InputError("address", "", f"{self.address.endpoint}: {error}", "tcp://host:port") from None
        return socket

    def _hang_up(self, linger_seconds: float) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_seconds * 1000))

    def _wait(self, seq: int) -> tuple[Answer | Failure, list[Any]]:
        """The reply to a call. One waiting thread sleeps at the sockets, the others until it wakes."""
        with self._changed:
            try:
                while seq not in self._replies:
                    if self._receiving:
                        self._changed.wait(SLICE_MS / 1000)
                        continue
                    self._receive()
                    if seq in self._replies:
                        break
                    self._check()
                    self._sleep()
            except BaseException:
                self._untaken.add(seq)
                self._replies.pop(seq, None)
                raise
            return self._replies.pop(seq)

    def _sleep(self) -> None:
        """Until a socket has something to say or the bell rings; others may post meanwhile."""
        poll = select.poll()
        for descriptor in (self._socket.fileno(), self._monitor.fileno(), self._bell):
            poll.register(descriptor, select.POLLIN)
        self._receiving = True
        self._changed.release()
        try:
            poll.poll(SLICE_MS)
        finally:
            self._changed.acquire()
            self._receiving = False
            self._changed.notify_all()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _receive(self) -> None:
        """Take what has come, to the last: only then does a socket's descriptor tell of more."""
        with contextlib.suppress(zmq.Again):
            while True:
                header, *rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                self.traffic.received += len(header) + sum(len(part) for part in rest)
                reply = decode_reply(header.buffer)
                if isinstance(reply, Answer | Failure) and reply.seq in self._unanswered:
                    del self._unanswered[reply.seq]
                    if reply.seq not in self._untaken:
                        self._replies[reply.seq] = (reply, rest)
                    self._breaks = 0
                    self._changed.notify_all()
        if self._broken() or self._heartbeat.stalled(self._unanswered):
            self._breaks += 1
            self._reconnect()

    def _reconnect(self) -> None:
        """Connect again and send again what has no reply yet."""
        self._hang_up(0.0)
        if self._breaks > 1:
            time.sleep(min(MAX_BACKOFF_SECONDS, 0.05 * 2**self._breaks))
        self._socket = self._dial(monitored=True)
        self._heartbeat.expect_progress()
        for frames in self._unanswered.values():
            self._send(frames)
            self.traffic.resent += 1

    def _send(self, frames: list[Any]) -> None:
        # Never wait here: libzmq gives up a connection whose handshake failed, and takes nothing more for it.
        try:
            for frame in frames:
                self._socket.send(frame, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._refused = True
        else:
            self.traffic.sent += sum(memoryview(frame).nbytes for frame in frames)

    def _broken(self) -> bool:
        """Tell whether the connection ended since the last look. Raises LinkRefused if it was on purpose."""
        ended, self._refused = self._refused, False
        while self._monitor.poll(0):
            event = zmq.Event(recv_monitor_message(self._monitor)["event"])
            if event in REFUSALS:
                raise LinkRefused(str(self.address), REFUSALS[event])
            ended = True
        return ended

    def _check(self) -> None:
        trouble = self._heartbeat.trouble()
        if self._breaks > MAX_RESENDS:
            trouble = f"the connection broke {self._breaks} times during one call"
        if trouble:
            raise LinkLost(str(self.address), trouble)


class Heartbeat(threading.Thread):
    """Pings the server and counts the pings that it does not answer.

    It counts pings, not time: a process that was stopped for an hour has missed none.
    """

    def __init__(
        self, context: zmq.Context[Any], dial: Callable[[], zmq.Socket[bytes]], ping: Callable[[], Ping]
    ) -> None:
        super().__init__(name="pyps-heartbeat", daemon=True)
        self._context, self._dial, self._ping = context, dial, ping
        self._interval, self._max_missed = CONNECT_SECONDS / PINGS_PER_TIMEOUT / 4, PINGS_PER_TIMEOUT * 4
        self._missed = 0
        self._progress = Pong(b"")
        self._unchanged = 0  # pongs since there was progress
        self._server: bytes | None = None
        self._trouble = ""
        self._bell = context.socket(zmq.PAIR)
        self._bell.bind(STOP)

    def trouble(self) -> str:
        """Why the link is lost; empty while it is not."""
        if self._missed >= self._max_missed and not self._trouble:
            seconds = self._interval * self._missed
            what = "nothing more" if self._server else "nothing"
            self._trouble = f"{what} was heard of a server there for {seconds:.1f} s"
        return self._trouble

    def give_up(self, why: str) -> None:
        """Take the link for lost."""
        self._trouble = self._trouble or why

    def follow(self, server: bytes, client_timeout_seconds: float) -> None:
        """Ping as often as the server's client timeout asks for."""
        self._server = self._server or server
        self._interval, self._max_missed = client_timeout_seconds / PINGS_PER_TIMEOUT, PINGS_PER_TIMEOUT

    def expect_progress(self) -> None:
        """Calls are sent from now on."""
        self._unchanged = 0

    def stalled(self, unanswered: Iterable[int]) -> bool:
        """Return whether one of these calls, or its small reply, got lost: pongs come, but nothing else."""
        if self._unchanged < STALLED_PONGS:
            return False
        return any(seq > self._progress.taken or seq <= self._progress.answered for seq in unanswered)

    def stop(self) -> None:
        self._bell.send(b"")
        self.join()
        self._bell.close()

    def run(self) -> None:
        with self._context.socket(zmq.PAIR) as bell, self._dial() as socket:
            bell.connect(STOP)
            while True:
                with contextlib.suppress(zmq.Again):
                    socket.send(encode(self._ping()), zmq.NOBLOCK)
                if bell.poll(self._interval * 1000):
                    return
                self._missed = 0 if self._received_pong(socket) else self._missed + 1

    def _received_pong(self, socket: zmq.Socket[bytes]) -> bool:
        """Return whether a pong has come."""
        received = False
        while socket.poll(0):
            pong = decode_reply(socket.recv_multipart()[0])
            if isinstance(pong, Pong):
                received = True
                self._unchanged = self._unchanged + 1 if pong == self._progress else 0
                self._progress = pong
                if self._server is not None and pong.server != self._server:
                    self._trouble = "the server was restarted; whether it took the last push is not known"
        return received
