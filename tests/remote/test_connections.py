"""Messages of a connection that has ended, received when the next one has its descriptor: no call is lost."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from remote_tools import RawClient, RawConnection, eventually

from pyps.remote import connections
from pyps.remote.address import parse_address
from pyps.remote.bounds import Bound
from pyps.remote.client import Client
from pyps.remote.framing import FRAME_BYTES
from pyps.remote.server import Server
from pyps.remote.verbs import HELLO, STATUS
from pyps.remote.wire import PROTOCOL, Answer, Call, Failure, Ping, decode_reply, encode, encode_raw
from pyps.store import Store

SESSION = bytes(range(16))
TRIES = 20  # another thread may take the descriptor first


@pytest.fixture
def server(shm: Path) -> Iterator[Server]:
    with (
        Store.create("model", {"w": np.zeros(3000)}, batches=[4, 4], policy="asp:scaling=none"),
        Server("model", "tcp://127.0.0.1:*", insecure=True) as one,
    ):
        yield one


@contextmanager
def busy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that receives nothing meanwhile; what arrives waits."""
    go_on, receive = threading.Event(), server._receive_some
    held = threading.Event()

    def receive_later() -> bool:
        held.set()
        go_on.wait()
        return receive()

    monkeypatch.setattr(server, "_receive_some", receive_later)
    try:
        assert held.wait(30)
        yield
    finally:
        go_on.set()


def sockets() -> set[int]:
    """Descriptors of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def followed(address: str, late: list[bytes], messages: list[bytes]) -> RawConnection:
    """A connection that has the descriptor of an earlier one, which brought `late` and ended. It brings the
    messages; all have arrived and wait.
    """
    for _ in range(TRIES):
        before = sockets()
        with RawConnection(address) as old:
            (theirs,) = sockets() - before - {old.end.fileno()}
            for message in late:
                old.part(message, more=False)
        eventually(partial(ended, theirs))
        new = RawConnection(address)
        if theirs in sockets():
            for message in messages:
                new.part(message, more=False)
            eventually(partial(arrived, theirs, sum(map(len, messages))))
            return new
        new.end.close()
    raise AssertionError("the descriptor was never given again")


def arrived(descriptor: int, size: int) -> bool:
    accepted = connections.Accepted(descriptor, connections._cookie(descriptor))
    return connections._read(accepted) >= size


def ended(descriptor: int) -> bool:
    return descriptor not in sockets()


def test_late_messages_do_not_disturb_the_numbers_of_another_call(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with busy(server, monkeypatch):
        arguments = encode_raw((PROTOCOL, "model", FRAME_BYTES))
        call = encode(Call(SESSION, 1, "create", arguments, 0, FRAME_BYTES))
        new = followed(server.address, [encode(Ping(bytes(16)))] * 2, [call, bytes(FRAME_BYTES)])
    with new:
        assert isinstance(decode_reply(new.receive()), Failure)  # there is a store already
    assert server.counters.calls == 1


def test_a_late_call_does_not_take_the_replies(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    call = encode(Call(SESSION, 1, "hello", encode_raw((PROTOCOL, "model"))))
    with busy(server, monkeypatch):
        new = followed(server.address, [call] * 2, [call])
    with new:
        assert isinstance(decode_reply(new.receive()), Answer)
    assert server.counters.calls == 1


def test_a_connection_that_is_announced_after_its_first_message(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq attaches a connection before it says so."""
    follow, calls = server._connections._follow, iter([None])

    def follow_later() -> None:
        if next(calls, follow) is follow:
            follow()

    call = encode(Call(SESSION, 1, "create", encode_raw((PROTOCOL, "model", 100)), 0, 100))
    with busy(server, monkeypatch):
        before = sockets()
        new = RawConnection(server.address)
        (theirs,) = sockets() - before - {new.end.fileno()}
        monkeypatch.setattr(server._connections, "_follow", follow_later)
        for message in (call, bytes(100)):
            new.part(message, more=False)
        eventually(partial(arrived, theirs, len(call) + 100))
    with new:
        assert isinstance(decode_reply(new.receive()), Failure)
    (known,) = server._connections._known.values()
    assert known.accepted.number


def test_an_identity_of_the_peers_own_choice_is_refused(server: Server) -> None:
    endpoint = parse_address(server.address).endpoint
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.routing_id = 0, b"mine"
        socket.connect(endpoint)
        socket.send(encode(Ping(bytes(16))))
        eventually(lambda: server.counters.refused == 1)
        assert not socket.poll(0)
    with RawClient(server.address) as client:
        assert isinstance(client.ask("hello", PROTOCOL, "model"), Answer)


def test_what_is_known_of_ended_connections_goes(server: Server) -> None:
    for _ in range(3):
        with RawClient(server.address) as client:
            client.ask("hello", PROTOCOL, "model")
    eventually(lambda: not server._connections._known)


def test_the_reply_to_a_call_that_a_signal_ended_is_not_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be as large as a model."""

    def interrupted(_: Client) -> None:
        raise KeyboardInterrupt

    client = Client(parse_address(server.address))
    try:
        client.call(HELLO(PROTOCOL, "model"))
        with monkeypatch.context() as patch:
            patch.setattr(Client, "_sleep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.call(STATUS())
        assert client.call(STATUS()).version == 0
        assert not client._replies
    finally:
        client.close()


class Flood:
    """In place of what libzmq tells of a socket: peers come faster than anyone could follow."""

    def __init__(self) -> None:
        self.told = 1000

    def get_monitor_socket(self, _events: int) -> Flood:
        return self

    def getsockopt(self, _option: int) -> int:
        return zmq.POLLIN

    def recv_multipart(self, *_flags: int) -> list[bytes]:
        self.told += 1
        return [struct.pack("=Hi", zmq.EVENT_ACCEPTED, self.told), b""]


def test_a_flood_of_connections_does_not_hold_the_loop_up() -> None:
    """It looks at some, cuts those that are too many, and goes on."""
    flood: Any = Flood()
    followed = connections.Connections(flood, Bound(100, 10))
    for _ in range(3):
        followed.trim()
    assert len(followed) == 100
    assert flood.told < 5000
