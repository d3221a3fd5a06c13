"""Define what every session of a server knows of it, and what a server asks of the wing for several servers.

That wing, pyps.shards, is found by its name when a server starts or an address names several servers: no
other room imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pyps.native.local import LocalBackend
from pyps.native.state import StoreState
from pyps.native.values import Config, Layout
from pyps.remote.bounds import ServerBounds
from pyps.remote.verbs import Caller, Handlers
from pyps.store.backend import Backend

Home = str | Callable[[], str]
WING = "pyps.shards.wing"
MAKER = b""  # in place of a session in `Site.planners`, of the peer that has made the store


@dataclass(frozen=True, slots=True)
class Whose:
    """A session's name, which its client and this server know, and the peer that it comes from."""

    session: bytes
    peer: str


class WingSession(Protocol):
    """One client's session: its calls are the wing's handlers, with this as their first argument."""

    @property
    def caller(self) -> Caller:
        """Return what the wing's calls have made of the session; no flag: nothing."""

    @property
    def layout(self) -> Layout:
        """Return the layout that its calls answer from. Raises SegmentNotFound."""

    @property
    def past(self) -> int | None:
        """Return what a later thread of this session has to know of it; None: nothing."""

    def check(self) -> None:
        """Before each call. Raises LinkLost where all shards began anew since the session's first."""

    def created(self) -> None:
        """The session has made a store."""

    def start(self) -> None:
        """The worker starts afresh after a failure."""

    def abandon(self) -> None:
        """The store has taken its staging buffers back."""

    def forget(self) -> None:
        """The session leaves the store, or begins anew."""

    def close(self) -> None:
        """The session has left the store."""


class WingHost(Protocol):
    """Hold what a server has of a model over several."""

    @property
    def is_head(self) -> bool:
        """Return whether the server's store decides for others, so that no push goes to it alone."""

    def open_existing(self) -> None:
        """Go on with what an earlier server has left here. Raises StoreError."""

    def created(self) -> None:
        """The store has been made through the link."""

    def session(
        self, site: Site, whose: Whose, store: Callable[[], LocalBackend], past: int | None
    ) -> WingSession:
        """For a session; store: gives its store. past: of the thread that it had before."""

    def close(self, remove: bool) -> None:
        """End; remove: what is here of the model. Idempotent."""


class Wing(Protocol):
    """pyps.shards, as this room sees it."""

    @property
    def handlers(self) -> Handlers:
        """Return what is done for its calls."""

    def host(self, store: str, home: Home | None, opened: Callable[[Layout], None]) -> WingHost:
        """For a server of this store; home, opened: as for pyps.remote.server.Server and Site."""

    def backend(self, address: str, config: Config | None, state: StoreState | None) -> Backend:
        """A store at this address of several servers: opened, or with a config made."""


def wing() -> Wing:
    found: Wing = importlib.import_module(WING).WING
    return found


@dataclass(frozen=True)
class Site:
    """A server: what it serves, its identity, when a client counts as dead, and what it does for a call."""

    store: str
    server: bytes
    client_timeout_seconds: float
    created: Callable[
        [LocalBackend | None], None
    ]  # called with a store, or None: a shard, that was made through the link
    opened: Callable[[Layout], None]  # called by every session that opens or makes the store
    shards: WingHost  # of a model over several servers
    bounds: ServerBounds
    planners: dict[bytes, str] | None  # peers, by the sessions for which they may plan; None: all may
    handlers: Handlers
    ranks_of: Callable[[str], tuple[int, ...] | None]  # those that a peer's key is bound to; None: to none

    def may_plan(self, peer: str) -> bool:
        """Return whether a peer made the store, or has a worker in it by a key that is bound to no ranks."""
        if self.planners is None or peer == self.planners.get(MAKER):
            return True
        return peer in tuple(self.planners.values()) and self.ranks_of(peer) is None

    def may_remove(self, peer: str) -> bool:
        """Return whether a peer may remove a model of which a shard is lost: who may plan, and where the
        server has been started anew since the model was made any whose key is bound to no ranks.
        """
        if self.planners is not None and MAKER not in self.planners:
            return self.ranks_of(peer) is None
        return self.may_plan(peer)
