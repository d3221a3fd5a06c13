"""Workers elsewhere: the store's calls over a link, with the same meaning and exactly-once pushes.

    with Server("model", "tcp://10.0.0.1:5555", keys="keys") as server: ...  # at the store
    worker = pyps.join("tcp://10.0.0.1:5555/model?keys=client.key", rank=2, batches=[8, 8, 4])  # elsewhere

`open_store` and `create_store` take a segment's name or such an address, and give a Store either way.
"""

from __future__ import annotations

from typing import Any

from pyps.errors import InputError, how_to_install
from pyps.native.state import StoreState
from pyps.native.values import Config
from pyps.remote.address import is_address, is_sharded
from pyps.store.backend import Backend
from pyps.store.store import Store

__all__ = ["create_store", "open_store"]


def _link(name: str, config: Config | None = None, state: StoreState | None = None) -> Backend:
    try:
        if is_sharded(name):
            from pyps.remote.site import wing

            return wing().backend(name, config, state)
        from pyps.remote.link import LinkBackend
    except ModuleNotFoundError as error:
        raise InputError("address", "", f"no {error.name}", how_to_install("remote")) from None
    return LinkBackend(name, config, state)


def _make(name: str, config: Config, state: StoreState | None, keep: bool) -> Backend:
    return _link(name, config, state)


def open_store(name: str) -> Store:
    """Store.open for a segment's name, or over TCP for a "tcp://host:port/name". Raises as Store.open, and
    InputError, LinkRefused, LinkLost: the server is gone; whether it took a push under way is then not known.

    Over a link Fenced also means that the server had not heard of this worker for so long that it gave its
    samples to others.
    """
    return Store(name, _link(name)) if is_address(name) else Store.open(name)


def create_store(name: str, tensors: Any = None, **options: Any) -> Store:
    """Store.create, which see, here or on the server's machine; the server removes what it made."""
    if is_address(name):
        options["make"] = _make
    return Store.create(name, tensors, **options)
