"""The two halves of a push to a store over several servers."""

from __future__ import annotations

from typing import Any

from pyps.native.values import Hyper
from pyps.remote.sharded import ShardedBackend
from pyps.remote.store import RemoteStore
from pyps.store import Store
from pyps.store.request import push_request

ONE = Hyper(lr=1.0)


def backend(store: Store) -> ShardedBackend:
    assert isinstance(store, RemoteStore)
    assert isinstance(store._calls, ShardedBackend)
    return store._calls


def stage_parts(store: Store, value: float) -> tuple[int, Any]:
    """The first half of a push: every server has its part. What the second half needs."""
    calls = backend(store)
    claim, staging = store.start(), store.stage()
    staging.flat[:] = value
    seq = next(calls._numbers)
    header, parts, _ = calls._sent(push_request(staging, claim.count, ONE, groups=store.layout.groups))
    calls._stage(seq, header, calls._post_parts(seq, header, parts))
    return seq, header
