"""Workers elsewhere: the store's calls over a link, with the same meaning and exactly-once pushes.

    with Server("model", "tcp://10.0.0.1:5555", keys="keys") as server: ...  # at the store
    worker = pyps.join("tcp://10.0.0.1:5555/model?keys=client.key", rank=2, batches=[8, 8, 4])  # elsewhere

`open_store` and `create_store` take a segment's name or such an address, and give a Store either way.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pyps.errors import InputError
from pyps.remote.address import is_address
from pyps.store.store import Store

if TYPE_CHECKING:
    from pyps.remote.store import RemoteStore

__all__ = ["as_remote", "create_store", "open_store"]


def _kind(name: str) -> type[Store]:
    if not is_address(name):
        return Store
    try:
        from pyps.remote.store import RemoteStore
    except ModuleNotFoundError as error:
        raise InputError("address", "", f"no {error.name}", "pip install 'pyps-train[remote]'") from None
    return RemoteStore


def as_remote(store: Store) -> RemoteStore | None:
    """The store, if it is over a link; needs no ZeroMQ to say that it is not."""
    module = sys.modules.get("pyps.remote.store")
    return store if module is not None and isinstance(store, module.RemoteStore) else None


def open_store(name: str) -> Store:
    """Store.open for a segment's name, or over TCP for a "tcp://host:port/name". Raises as Store.open, and
    InputError, LinkLost, LinkRefused.
    """
    return _kind(name).open(name)


def create_store(name: str, tensors: Any = None, **options: Any) -> Store:
    """Store.create, which see, here or on the server's machine; the server removes what it made."""
    return _kind(name).create(name, tensors, **options)
