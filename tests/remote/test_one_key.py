"""Test what one key can take of a server, and of a store's memory and ranks: others have theirs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_key
import numpy as np
import pytest
import zmq
from remote_tools import eventually

import pyps.remote.address
from pyps.errors import InvalidArgument, OutOfSpace, SegmentNotFound
from pyps.native.values import Hyper
from pyps.remote import create_store, open_store
from pyps.remote.address import needs_ipv6, parse_address
from pyps.remote.admission import LET_IN_PART, Admission
from pyps.remote.keys import KeyFolder, read_client_keys
from pyps.remote.server import Server
from pyps.remote.wire import Ping, encode
from pyps.store import Store

MOST = 40  # connections of the test's server
BATCHES = [4, 4]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = KeyFolder.open(tmp_path / "keys")
    for name in ("maker", "hostile"):
        folder.add(name)
    folder.add("bound", ranks=[1])
    return tmp_path / "keys"


@pytest.fixture
def server(shm: Path, keys: Path) -> Iterator[Server]:
    with Server("model", keys=keys) as server:
        yield server


@pytest.fixture
def store(server: Server, keys: Path) -> Iterator[Store]:
    """Made by `maker`, with two planned ranks."""
    options: dict[str, Any] = {"batches": BATCHES, "policy": "asp:scaling=none"}
    with create_store(at(server, keys, "maker"), {"w": np.ones(5000, np.float32)}, **options) as store:
        yield store


def at(server: Server, keys: Path, name: str) -> str:
    return f"{server.address}?keys={keys / name}.key"


def pinging(context: zmq.Context[Any], server: Server, keys: Path) -> zmq.Socket[bytes]:
    """A connection of `hostile` that has brought a ping, and no session."""
    found = parse_address(at(server, keys, "hostile"))
    one = hostile_key.connection(context, read_client_keys(keys / "hostile.key"), found.endpoint)
    one.send(encode(Ping(b"h" * 16)))
    assert one.poll(20_000)
    return one


@pytest.mark.promise("connections, sessions, calls under way")
@pytest.mark.promise("Handshakes under way have a share")
def test_connections_of_one_key_leave_room_for_the_handshakes_of_others(server: Server, keys: Path) -> None:
    connections = server._connections
    connections._bound.most, connections._bound.each = MOST, MOST // 4
    host, port = parse_address(server.address + f"?keys={keys / 'maker.key'}").endpoint[6:].split(":")
    with ExitStack() as stack:
        context: zmq.Context[Any] = stack.enter_context(zmq.Context())
        slow = stack.enter_context(closing(socket.create_connection((host, int(port)))))
        time.sleep(0.1)
        for _ in range(MOST + 10):
            stack.enter_context(pinging(context, server, keys))
        theirs = [one for one in connections._open.values() if one.peer == "key 'hostile'"]
        assert len(theirs) <= MOST // 4
        slow.setblocking(False)
        assert slow.recv(64)  # the server's greeting
        with pytest.raises(BlockingIOError):  # it was not cut
            slow.recv(64)


@pytest.mark.promise("between two counts a key opens few")
def test_few_connections_of_one_key_come_in_between_two_counts(
    server: Server, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq would take all of them, with their messages. Another key comes in; the rest wait, uncut."""
    few, own = server._connections._bound.share // LET_IN_PART, read_client_keys(keys / "hostile.key")
    endpoint = parse_address(at(server, keys, "hostile")).endpoint
    with ExitStack() as stack:
        context: zmq.Context[Any] = stack.enter_context(zmq.Context())
        with monkeypatch.context() as patch:
            patch.setattr(Admission, "count_anew", lambda _: None)
            make = partial(hostile_key.connection, context, own, endpoint)
            many = [stack.enter_context(make()) for _ in range(3 * few)]
            for one in many:
                one.send(encode(Ping(b"h" * 16)))
            eventually(lambda: sum(map(has_pong, many)) == few)
            with pytest.raises(SegmentNotFound), open_store(at(server, keys, "maker")):
                pass
            assert sum(map(has_pong, many)) == few
        eventually(lambda: all(map(has_pong, many)))


def has_pong(one: zmq.Socket[bytes]) -> bool:
    return bool(one.poll(0))


@pytest.mark.promise("New workers of one key get at most half")
def test_new_workers_of_one_key_leave_planned_ranks_theirs(
    server: Server, store: Store, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In room for seven workers two planned ranks need two; one key may have half of the rest."""
    worker = 4 * store.layout.flat_elements * store.layout.staging_buffers
    fake = SimpleNamespace(f_bavail=7 * worker, f_frsize=1)
    monkeypatch.setattr("pyps.remote.bounds.os", SimpleNamespace(statvfs=lambda _: fake))
    with ExitStack() as stack:
        clients = [stack.enter_context(open_store(at(server, keys, "hostile"))) for _ in range(3)]
        for rank, one in enumerate(clients[:2], 2):
            one.join(rank, "new_worker")
        with pytest.raises(OutOfSpace, match="2 planned ranks"):
            clients[2].join(4, "new_worker")
        assert store.join(rank=0) == 0
        other = stack.enter_context(open_store(at(server, keys, "maker")))
        assert other.join(4, "new_worker") == 4
        fake.f_bavail = 0
        with pytest.raises(OutOfSpace):
            stack.enter_context(open_store(at(server, keys, "maker"))).join(5, "new_worker")


@pytest.mark.promise("it joins as these ranks alone, and does not re-plan")
def test_a_key_that_is_bound_to_ranks_joins_as_these_and_does_not_plan(
    server: Server, store: Store, keys: Path
) -> None:
    with open_store(at(server, keys, "bound")) as bound:
        for join in ({"rank": 0}, {"rank": 2, "role": "new_worker"}, {"role": "new_worker"}):
            with pytest.raises(InvalidArgument, match="bound"):
                bound.join(**join)
        assert bound.join() == 1
        with pytest.raises(InvalidArgument, match="planner"):
            bound.replan([1, 7])
    with open_store(at(server, keys, "hostile")) as other:
        with pytest.raises(InvalidArgument, match="planner"):
            other.replan([1, 7])
        other.join(rank=0)
        other.replan([1, 7])


@pytest.mark.promise("at most 16,777,216 samples")
def test_a_plan_has_a_sane_bound(store: Store) -> None:
    store.join()
    with pytest.raises(InvalidArgument, match="4294967296 samples"):
        store.replan([2**31, 2**31])
    store.replan([3, 5])


def test_a_call_that_no_frame_can_carry_is_an_error_at_once(server: Server, keys: Path) -> None:
    groups = 2000
    tensors = {f"w{k}": np.ones(1, np.float32) for k in range(groups)}
    options: dict[str, Any] = {"batches": [4], "policy": "asp", "groups": {f"w{k}": k for k in range(groups)}}
    began = time.monotonic()
    with create_store(at(server, keys, "maker"), tensors, chunk_params=1024, **options) as store:
        store.join()
        store.start()
        staging = store.stage()
        with pytest.raises(InvalidArgument, match="parameter groups"):
            store.push(staging, 4, [Hyper(lr=0.1)] * groups, timeout=5.0)
    assert time.monotonic() - began < 60.0


@pytest.mark.parametrize(
    ("families", "expected"),
    [([socket.AF_INET6], True), ([socket.AF_INET6, socket.AF_INET], False), ([socket.AF_INET], False)],
)
def test_a_name_is_resolved_for_both_families(
    monkeypatch: pytest.MonkeyPatch, families: list[int], expected: bool
) -> None:
    found = [(family, 0, 0, "", ()) for family in families]
    monkeypatch.setattr(pyps.remote.address.socket, "getaddrinfo", lambda *_: found)
    assert needs_ipv6("only-six.example") is expected


def test_names_of_keys_with_ranks_are_listed_and_revoked(keys: Path) -> None:
    folder = KeyFolder.open(keys)
    assert folder.ranks_of("bound") == (1,)
    folder.revoke("bound")
    assert KeyFolder.open(keys).ranks_of("bound") is None


@pytest.mark.promise("removes the store that it made, never another")
def test_a_server_that_ends_leaves_another_store_of_its_name(server: Server, store: Store, shm: Path) -> None:
    path = shm / "pyps-model"
    os.rename(path, shm / "pyps-away")
    with Store.create("model", {"w": np.ones(8, np.float32)}, batches=[4], keep=True):
        server.close()
        assert path.exists()
    path.unlink()
    (shm / "pyps-away").unlink()


def test_no_connection_is_left_by_those_that_come_and_go(server: Server, keys: Path) -> None:
    with zmq.Context() as context:
        for _ in range(5):
            pinging(context, server, keys).close()
    eventually(lambda: len(server._connections) == 0)


@pytest.mark.promise("take all connections, sessions, descriptors or memory")
def test_honest_workers_go_on_beside_a_hostile_key(capfd: pytest.CaptureFixture[str]) -> None:
    """A few seconds of what tests/helpers/hostile_key.py measures in ten minutes."""
    passed = hostile_key.trial(0.01, 3.0)
    assert passed, capfd.readouterr().out
