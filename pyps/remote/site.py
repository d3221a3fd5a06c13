"""What every session of a server knows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyps.native.values import Layout
from pyps.remote.shard_host import ShardHost


@dataclass(frozen=True)
class Site:
    """A server: what it serves, its identity, and when a client counts as dead."""

    store: str
    server: bytes
    client_timeout_seconds: float
    created: Callable[[], None]  # called once the store has been made through the link
    opened: Callable[[Layout], None]  # called by every session that opens or makes the store
    shards: ShardHost  # of a model over several servers
