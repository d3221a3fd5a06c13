"""A client with another's numbers, over several servers: it gets an error, and nothing else happens."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from remote_tools import process
from shard_tools import CHUNK, ONE, SILENCE, backend, make, only_value, push, serving

from pyps.errors import InvalidArgument, StoreError
from pyps.native.values import Agreement, Codec, Encoding, Hyper, PushRequest
from pyps.remote import open_store
from pyps.remote.address import parse_servers
from pyps.remote.client import Client
from pyps.remote.creation import created_numbers
from pyps.remote.keys import KeyFolder
from pyps.remote.server import Server
from pyps.remote.wire import PROTOCOL, PushHeader
from pyps.shards.cut import Cut, cut, flat_of, shard_config
from pyps.shards.verbs import (
    COMMIT,
    CREATE_SHARD,
    PULL_PINNED,
    READ_PINNED,
    REMOVE_HEAD,
    STAGE,
    CommitHeader,
    LogKind,
)
from pyps.store import Store
from pyps.store.creation import store_config

TWO = {"batches": [1, 1], "staging_buffers": 2}


class Attacked:
    """Two servers, a victim that trains, and what an attacker knows: run, numbers, tags."""

    def __init__(self, address: str, servers: list[Server], victim: Store, other: Store) -> None:
        self.address, self.servers, self.victim, self.other = address, servers, victim, other
        self.run = backend(victim)._cut.run
        self.before = 1  # version

    @property
    def number(self) -> int:
        return backend(self.victim)._client

    @contextlib.contextmanager
    def stranger(self, index: int) -> Iterator[Client]:
        """A session of the attacker's at a server."""
        client = Client(parse_servers(self.address)[index])
        try:
            yield client
        finally:
            client.close()

    def header(self, index: int, **changes: Any) -> PushHeader:
        groups = backend(self.victim)._layouts[index].groups
        fields = {"samples": 1, "hyper": (ONE,) * groups, "scale": 1.0, "timeout": 1.0} | changes
        return PushHeader(encoding=fields.pop("encoding", Encoding(Codec.F32)), **fields)

    def part(self, index: int, value: float) -> np.ndarray[Any, Any]:
        return np.full(backend(self.victim)._layouts[index].flat_elements, value, np.float32)


@pytest.fixture
def attacked(shm: Path) -> Iterator[Attacked]:
    with serving(2) as (address, servers), make(address, **TWO) as victim, open_store(address) as other:
        victim.join(0), other.join(1)
        push(victim)
        yield (found := Attacked(address, servers, victim, other))
        before = found.before
        for step in range(2, 5):  # whatever was tried, the victim goes on, alone and exact
            push(victim)
            assert only_value(victim) == (step, before + step - 1)
        for server in servers:
            assert server._shards.shard.fault is None
            assert server.counters.faults == 0


@pytest.mark.parametrize("index", [0, 1])
def test_a_part_under_anothers_number_is_refused(attacked: Attacked, index: int) -> None:
    with attacked.stranger(index) as client:
        for ahead in range(1, 4):
            tag = (attacked.number, ahead)
            asked = STAGE(attacked.run, tag, attacked.header(index))
            with pytest.raises(InvalidArgument, match="another client's number"):
                client.exchange(asked, [attacked.part(index, -1e6)])
    assert attacked.servers[index]._shards.shard._staged.tags() == []


@pytest.mark.promise("a push counts only with every server's receipt")
def test_a_commit_whose_parts_no_shard_was_sent_is_refused(attacked: Attacked) -> None:
    claim, calls = attacked.other.start(), backend(attacked.other)
    header = calls._header(PushRequest(0, claim.count, (ONE,)))
    with pytest.raises(InvalidArgument, match="receipts"):
        calls.client.call(COMMIT(CommitHeader(next(calls._numbers), header)))
    assert attacked.victim.status().version == 1


def test_a_commit_counts_once(attacked: Attacked) -> None:
    """The gradient of the first one is gone: a second version of it could be made nowhere."""
    calls, commits = backend(attacked.other), []
    real = calls.client.call
    calls.client.call = lambda asked: (commits.append(asked), real(asked))[1]  # type: ignore[method-assign]
    push(attacked.other, 0.0)
    calls.client.call = real  # type: ignore[method-assign]
    (commit,) = [asked for asked in commits if asked.verb is COMMIT]
    attacked.other.start()
    with pytest.raises(InvalidArgument, match="seq"):
        real(commit)
    assert attacked.victim.status().version == 2
    attacked.before = 2


def test_what_cannot_be_applied_is_refused_before_the_decision(attacked: Attacked) -> None:
    """Numbers that are finite in the header's 64 bits, and not in the 32 of the core."""
    calls = backend(attacked.other)
    for changes in ({"scale": 1e300}, {"hyper": (Hyper(lr=1e300),)}, {"hyper": (Hyper(1.0, eps=1e39),)}):
        asked = STAGE(attacked.run, (calls._client, next(calls._numbers)), attacked.header(0, **changes))
        with pytest.raises(InvalidArgument):
            calls._shards[0].exchange(asked, [attacked.part(0, -1.0)])


def test_anothers_copy_is_not_given(attacked: Attacked) -> None:
    calls = backend(attacked.victim)
    seq = next(calls._numbers)
    calls.client.call(COMMIT(CommitHeader(seq, pin=LogKind.PIN_ALL)))
    tag = (attacked.number, seq)
    with attacked.stranger(1) as client:
        for asked in (
            PULL_PINNED(attacked.run, tag, Codec.F32, 5.0),
            READ_PINNED(attacked.run, tag, 0, 5.0),
        ):
            with pytest.raises(InvalidArgument, match="another client's number"):
                client.exchange(asked)
    out = np.empty(attacked.victim.layout.flat_elements, np.float32)
    calls._fetch(tag, out, Codec.F32)
    assert set(out.tolist()) == {1.0}


@pytest.mark.promise("only a model that has lost a shard can be removed")
@pytest.mark.promise("remove or replace a model whose servers are there")
def test_a_head_whose_shards_are_there_stays(attacked: Attacked) -> None:
    with attacked.stranger(0) as client, pytest.raises(InvalidArgument, match="all 2 shards"):
        client.call(REMOVE_HEAD(PROTOCOL, "model", attacked.run))


def test_copies_that_are_not_fetched_are_bounded(attacked: Attacked) -> None:
    """Copies of the client with the most are dropped first; its next fetch says so."""
    shard, calls = attacked.servers[1]._shards.shard, backend(attacked.victim)
    shard.most_pinned = 3 * 4 * shard.layout.flat_elements
    with open_store(attacked.address) as greedy:
        greedy.join(role="observer")
        seq = next(calls._numbers)
        calls.client.call(COMMIT(CommitHeader(seq, pin=LogKind.PIN)))
        tags = []
        for _ in range(8):
            push(attacked.other, 0.0)
            hoard, number = backend(greedy), next(backend(greedy)._numbers)
            reply = hoard.client.call(COMMIT(CommitHeader(number, pin=LogKind.PIN)))
            tags.append((reply.client, number))
        out = np.empty(attacked.victim.layout.flat_elements, np.float32)
        calls._fetch((attacked.number, seq), out, Codec.F32)
        assert len({id(pin) for pin in shard._pins.values()}) <= 3
        with pytest.raises(StoreError, match="the copy for it has gone unfetched"):
            hoard._shards[1].exchange(PULL_PINNED(attacked.run, tags[0], Codec.F32, 0.5))
    attacked.before += 8


def test_a_shard_that_the_log_has_left_behind_follows_it_again(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, go_on = attacked.servers[1]._shards.shard, threading.Event()
    do = shard._do
    monkeypatch.setattr("pyps.shards.decisions.KEPT_ENTRIES", 8)
    monkeypatch.setattr(shard, "_do", lambda entry: (go_on.wait(30), do(entry)))
    with open_store(attacked.address) as flood:
        flood.join(role="observer")
        for _ in range(20):
            hoard = backend(flood)
            hoard.client.call(COMMIT(CommitHeader(next(hoard._numbers), pin=LogKind.PIN)))
    go_on.set()


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_is_not_made_anew_by_another(attacked: Attacked, index: int) -> None:
    whole = backend(attacked.victim)._cut
    forged = cut(whole.run, whole.tensors, whole.chunk_params, 2, bytes(range(16)))
    with attacked.stranger(index) as client:
        asked, numbers = creation_of(forged, index)
        with pytest.raises(StoreError, match="another model than the first server's"):
            client.exchange(asked, numbers)


def creation_of(whole: Cut, index: int) -> tuple[Any, Any]:
    """A call that makes a shard of sevens, and its numbers."""
    values = {"w": np.full(4 * CHUNK, 7.0, np.float32)}
    given: dict[str, Any] = dict.fromkeys(("optimizer", "groups", "samples", "master"))
    given |= {"batches": [1], "policy": "asp", "averaged": (), "chunk_params": CHUNK}
    given["agreement"] = Agreement()
    sizes = dict.fromkeys(("max_participants", "snapshot_spares", "staging_buffers"), 0)
    config, _ = store_config("test", values, None, **given, **sizes)
    flat = flat_of(whole, values)
    size, numbers = created_numbers(shard_config(whole, whole.shards[index], config, flat), None)
    return CREATE_SHARD(PROTOCOL, "model", index, size), numbers


@pytest.mark.promise("`remove_head` also needs a shard that is lost")
def test_a_worker_removes_what_has_lost_a_shard_and_no_other_key_does(shm: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for name, ranks in (("maker", None), ("worker", None), ("bound", [0]), ("idle", None)):
        KeyFolder.open(keys).add(name, ranks)
    with ExitStack() as stack:
        first, second = two_servers(stack, keys)
        hosts = ",".join(one.address.removeprefix("tcp://").partition("/")[0] for one in (first, second))

        def at(name: str) -> str:
            return f"tcp://{hosts}/model?keys={keys / name}.key"

        store = stack.enter_context(make(at("maker"), batches=[1, 1]))
        run = backend(store)._cut.run

        def remove(name: str) -> None:
            with closing(Client(parse_servers(at(name))[0])) as client:
                client.call(REMOVE_HEAD(PROTOCOL, "model", run))

        for rank, name in enumerate(("bound", "worker")):
            stack.enter_context(open_store(at(name))).join(rank)
        for name in ("bound", "idle"):
            with pytest.raises(InvalidArgument, match="remove"):
                remove(name)
        for name in ("worker", "maker"):
            with pytest.raises(InvalidArgument, match="all 2 shards"):
                remove(name)
        second.close()
        assert first._shards.is_head
        with pytest.raises(InvalidArgument, match="remove"):
            remove("bound")
        remove("worker")
        assert not first._shards.is_head
        with pytest.raises(InvalidArgument, match="no head"):
            remove("worker")


SERVED = """
import sys
from pyps.remote.server import Server
with Server("model", keys=sys.argv[1], home=sys.argv[2] or None) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.promise("A server that was started anew does not know the maker")
def test_a_server_started_anew_takes_any_key_that_is_not_bound_for_the_maker(tmp_path: Path) -> None:
    keys, folders = tmp_path / "keys", (tmp_path / "home", tmp_path / "far")
    for name, ranks in (("maker", None), ("bound", [0]), ("idle", None)):
        KeyFolder.open(keys).add(name, ranks)
    for folder in folders:
        folder.mkdir()

    def serve(folder: Path, home: str = "") -> AbstractContextManager[subprocess.Popen[str]]:
        return process(SERVED, str(keys), home, PYPS_SHM_DIR=str(folder))

    def remove(name: str) -> None:
        with closing(Client(parse_servers(f"{address}?keys={keys / name}.key")[0])) as client:
            client.call(REMOVE_HEAD(PROTOCOL, "model", run))

    with serve(folders[0]) as home:
        address = said_by(home)
        with serve(folders[1], f"{address}?keys={keys / 'maker.key'}") as far:
            hosts = f"{address.removesuffix('/model')},{said_by(far).removeprefix('tcp://')}"
            with make(f"{hosts}?keys={keys / 'maker.key'}") as store:
                run = backend(store)._cut.run
    with serve(folders[0]) as home:  # both were killed, and one comes again
        address = said_by(home)
        with pytest.raises(InvalidArgument, match="remove"):
            remove("bound")
        remove("idle")
        with pytest.raises(InvalidArgument, match="no head"):
            remove("idle")


def said_by(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline().strip()


def two_servers(stack: ExitStack, keys: Path) -> tuple[Server, Server]:
    first = stack.enter_context(Server("model", keys=keys, client_timeout_seconds=SILENCE))
    home = f"{first.address}?keys={keys / 'maker.key'}"
    second = Server("model", keys=keys, home=home, client_timeout_seconds=SILENCE)
    return first, stack.enter_context(second)
