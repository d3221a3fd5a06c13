"""Test what one client can take of a server's memory and descriptors: the server is a process of its own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from remote_tools import RawClient, process

from pyps.native.values import Codec, Role
from pyps.remote import open_store
from pyps.remote.address import parse_address
from pyps.remote.wire import PROTOCOL, Answer, Failure, Ping, encode
from pyps.store import Store

BOUND = 32 << 20
SIZE = 250_000
SESSIONS = CALLS = 16
SERVER = """
import resource, sys
bound, descriptors = map(int, sys.argv[1:])
if descriptors:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
from pyps.remote import bounds, server
bounds.cpu_free_bytes = lambda: 4 * bound
with server.Server("model", "tcp://0.0.0.0:*", insecure=True) as one:
    print(one.address.replace("0.0.0.0", "127.0.0.1"), flush=True)
    sys.stdin.read()
"""


@contextmanager
def serving(bound: int = BOUND, descriptors: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with (
        Store.create("model", {"w": np.zeros(SIZE)}, batches=[4], policy="asp", optimizer="adam"),
        process(SERVER, str(bound), str(descriptors)) as server,
    ):
        assert server.stdout is not None
        yield server.stdout.readline().strip(), server


def own_bytes(server: subprocess.Popen[str]) -> int:
    """Memory of a process that no other shares."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


@contextmanager
def greedy(address: str) -> Iterator[list[RawClient]]:
    """Sessions of one host that have opened the store, and read little."""
    with ExitStack() as stack:
        clients = []
        for _ in range(SESSIONS):
            client = stack.enter_context(RawClient(address))
            endpoint = parse_address(address).endpoint
            client.socket.disconnect(endpoint)
            client.socket.rcvhwm = 1
            client.socket.connect(endpoint)
            assert isinstance(client.ask("hello", PROTOCOL, "model"), Answer)
            assert isinstance(client.ask("join", Role.OBSERVER, -1), Answer)
            clients.append(client)
        yield clients


@pytest.mark.promise("the bytes of calls and answers, counted before they are made")
@pytest.mark.parametrize("verb", ["snapshot", "state", "pull"])
def test_answers_that_are_not_read_are_bounded(shm: Path, verb: str) -> None:
    """Also the first ones of each session: they are counted before they are made."""
    arguments = {"snapshot": (2, 60.0), "state": (60.0,), "pull": (Codec.F32, None)}[verb]
    with serving() as (address, server), greedy(address) as clients:
        before = own_bytes(server)
        for _ in range(CALLS):
            for client in clients:
                client.send(client.message(verb, *arguments))
        most, until = 0, time.monotonic() + 3.0
        while time.monotonic() < until:
            most = max(most, own_bytes(server) - before)
            time.sleep(0.02)
        print(f"{verb}: {most / 2**20:.0f} MiB")
        assert most < 1.2 * BOUND
        with RawClient(address, "127.0.0.2") as other:
            assert isinstance(other.ask("hello", PROTOCOL, "model"), Answer)
            assert isinstance(other.ask("join", Role.OBSERVER, -1), Answer)
            assert isinstance(other.ask("pull", Codec.F32, None), Answer)


def test_a_waiting_answer_comes_when_earlier_ones_were_read(shm: Path) -> None:
    with serving(bound=4 * SIZE * 4) as (address, _), greedy(address) as clients:
        for client in clients:
            for _ in range(3):
                client.send(client.message("pull", Codec.F32, None))
        left = dict.fromkeys(clients, 3)
        while any(left.values()):
            for client in clients:
                reply = client.reply(0.01)
                assert not isinstance(reply, Failure)
                if isinstance(reply, Answer):
                    left[client] -= 1
                client.send(encode(Ping(client.session, client.seq - left[client])))


@contextmanager
def silent(address: str) -> Iterator[None]:
    """Connections that bring nothing, as fast as they can be made."""
    target, stop = parse_address(address), threading.Event()

    def connect() -> None:
        held: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((target.host, target.port), 1.0))
            while len(held) > 200:
                held.pop(0).close()
            time.sleep(0.0005)
        for one in held:
            one.close()

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.promise("keeps descriptors for the admitted")
def test_descriptors_are_kept_for_the_admitted(shm: Path) -> None:
    with serving(descriptors=64) as (address, server), silent(address):
        time.sleep(0.3)
        for _ in range(5):
            with open_store(address) as far:
                far.join(role="observer")
                assert far.status().version == 0
        assert server.poll() is None
