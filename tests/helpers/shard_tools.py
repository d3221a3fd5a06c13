"""Several servers of one model in this process, pushes to it, and the two halves of a push."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from pyps.native.values import Claim, Hyper, PushResult
from pyps.remote import create_store
from pyps.remote.server import Server
from pyps.shards.sharded import ShardedBackend
from pyps.shards.verbs import CommitHeader
from pyps.store import Store
from pyps.store.staging import push_request

ONE = Hyper(lr=1.0)
CHUNK = 1024
SILENCE = 1.0


@contextmanager
def serving(count: int) -> Iterator[tuple[str, list[Server]]]:
    """So many servers in this process, and their address. Their shards share a folder of segments."""
    with ExitStack() as stack:
        options: dict[str, Any] = {"insecure": True, "client_timeout_seconds": SILENCE}
        servers = [stack.enter_context(Server("model", "tcp://127.0.0.1:*", **options))]
        for _ in range(count - 1):
            servers.append(
                stack.enter_context(Server("model", "tcp://127.0.0.1:*", home=servers[0].address, **options))
            )
        yield address_of(*(server.address for server in servers)), servers


def address_of(*addresses: str) -> str:
    hosts = [address.removeprefix("tcp://").partition("/")[0] for address in addresses]
    return f"tcp://{','.join(hosts)}/model?insecure=1"


def make(address: str, elements: int = 4 * CHUNK, **options: Any) -> Store:
    given = {"batches": [1], "policy": "asp:scaling=none", "chunk_params": CHUNK} | options
    return create_store(address, given.pop("tensors", {"w": np.zeros(elements)}), **given)


def push(store: Store, value: float = -1.0, **options: Any) -> PushResult:
    """A step that adds 1 to every parameter."""
    claim = store.start()
    return push_claimed(store, claim, value, **options)


def push_claimed(store: Store, claim: Claim, value: float, **options: Any) -> PushResult:
    staging = store.stage()
    staging.flat[:] = value
    return store.push(staging, claim.count, ONE, **options)


def only_value(store: Store) -> tuple[float, int]:
    """Return what every parameter is, and the version: of one pull."""
    flat, version = store.pull()
    (value,) = set(flat.tolist())
    return float(value), version


def backend(store: Store) -> ShardedBackend:
    assert isinstance(store.backend, ShardedBackend)
    return store.backend


def stage_parts(store: Store, value: float) -> CommitHeader:
    """The first half of a push: every server has its part. What the second half needs."""
    calls = backend(store)
    claim, staging = store.start(), store.stage()
    staging.flat[:] = value
    seq = next(calls._numbers)
    header, parts, _ = calls._sent(push_request(staging, claim.count, ONE, groups=store.layout.groups))
    return CommitHeader(seq, header, calls._stage(seq, header, calls._post_parts(seq, header, parts)))
