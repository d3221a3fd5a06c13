"""Who may remove a model over several servers, and when: a worker that may plan, once a shard is lost."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from shard_tools import SILENCE, backend, make

from pyps.errors import InvalidArgument
from pyps.remote import open_store
from pyps.remote.address import parse_servers
from pyps.remote.client import Client
from pyps.remote.keys import KeyFolder
from pyps.remote.server import Server
from pyps.remote.wire import PROTOCOL
from pyps.shards.verbs import REMOVE_HEAD


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


def two_servers(stack: ExitStack, keys: Path) -> tuple[Server, Server]:
    first = stack.enter_context(Server("model", keys=keys, client_timeout_seconds=SILENCE))
    home = f"{first.address}?keys={keys / 'maker.key'}"
    second = Server("model", keys=keys, home=home, client_timeout_seconds=SILENCE)
    return first, stack.enter_context(second)
