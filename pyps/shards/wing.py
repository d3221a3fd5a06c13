"""The wing as pyps.remote sees it, which finds it by this module's name."""

from __future__ import annotations

from collections.abc import Callable

from pyps.native.local import LocalBackend
from pyps.native.state import StoreState
from pyps.native.values import Config, Layout
from pyps.remote.site import Home, Site, Whose, Wing, WingHost, WingSession
from pyps.remote.verbs import Handlers
from pyps.shards.handlers import ShardSession
from pyps.shards.host import ShardHost
from pyps.shards.sharded import ShardedBackend
from pyps.shards.verbs import HANDLERS
from pyps.store.backend import Backend


class AnsweringHost(ShardHost):
    """A server's part of a model, whose sessions answer the wing's calls."""

    def session(
        self, site: Site, whose: Whose, store: Callable[[], LocalBackend], past: int | None
    ) -> WingSession:
        return ShardSession(self, site, whose, store, past)


class Shards:
    """A model over several servers."""

    @property
    def handlers(self) -> Handlers:
        return HANDLERS

    def host(self, store: str, home: Home | None, opened: Callable[[Layout], None]) -> WingHost:
        return AnsweringHost(store, home, opened)

    def backend(self, address: str, config: Config | None, state: StoreState | None) -> Backend:
        return ShardedBackend(address, config, state)


WING: Wing = Shards()
