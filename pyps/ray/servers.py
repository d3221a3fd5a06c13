"""The servers of a run's store: actors that Ray places and starts again, each with a server of `pyps serve`.

The store is a segment on the trainer's node (NearStore): a rank there maps it, and others use the link. Or it
is spread over several nodes (ShardedStore), with a shard in the memory of each. A server that was killed
finds its shard in its node's memory. Where the node is lost, it begins without one on another, and rank 0
makes all shards from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyps.errors import InputError, LinkLost, PypsError

KEYS = "keys"  # in the run's folder
TRAINER = "trainer"  # whose key is the launcher's
HOME_SECONDS = 5.0  # for the first server to say where it is


def node_id() -> str:
    """The node that this process is on."""
    ray = importlib.import_module("ray")
    return str(ray.get_runtime_context().get_node_id())


class StoreActor:
    """Serves a store of its node, or a shard. It listens once it is asked where, and not before."""

    def __init__(
        self,
        store: str,
        run_dir: str,
        env: Mapping[str, str],
        client_timeout: float,
        number: int = 0,
        first: str | None = None,
    ) -> None:
        """store: its name. run_dir: the run's folder. env: to be set here. client_timeout: as of a Server.
        number: of this server among several; first: name of the first one's actor, if this is another.
        """
        os.environ.update(env)
        self._store, self._run_dir, self._client_timeout = store, Path(run_dir), client_timeout
        self._number, self._first = number, first
        self._note = self._run_dir / f"server-{number}.address"
        self._server: Any = None
        if self._before():  # it was killed: those that it served look for it there
            with contextlib.suppress(PypsError):  # raised again where it is asked for
                self._start(HOME_SECONDS)

    def pid(self) -> int:
        """This process's id on its node."""
        return os.getpid()

    def endpoint(self) -> str:
        """Where it listens, as host:port. A server that was started again has its port again if it can."""
        self._start(None)
        return self._endpoint()

    def _start(self, seconds: float | None) -> None:
        """Listen. seconds: to wait for the first server; None: until it is there."""
        if self._server is None:
            if not self._run_dir.is_dir():
                found = f"no {self._run_dir} on node {node_id()}"
                raise InputError("run_dir", "", found, "a folder that all nodes have")
            if self._first is not None:
                self._home(seconds)  # the first one makes the keys
            self._server = self._listen()
            self._note.write_text(f"{self._endpoint()}/{self._store}")
            threading.Thread(target=self._watch, args=(self._server,), daemon=True).start()

    def _endpoint(self) -> str:
        return str(self._server.address).removeprefix("tcp://").partition("/")[0]

    def _before(self) -> str:
        """Where it listened before it was started again; "" if it did not."""
        endpoint, _, store = (self._note.read_text() if self._note.exists() else "").partition("/")
        return endpoint if store == self._store else ""

    def _listen(self) -> Any:
        from pyps.remote.server import Server

        options: dict[str, Any] = {
            "keys": self._run_dir / KEYS,
            "client_timeout_seconds": self._client_timeout,
            "home": self._home if self._first is not None else None,
        }
        host = importlib.import_module("ray").util.get_node_ip_address()
        host = f"[{host}]" if ":" in host else host
        before, _, port = self._before().rpartition(":")
        if before == host:
            with contextlib.suppress(InputError):  # another process may have the port
                return Server(self._store, f"tcp://{host}:{port}", **options)
        return Server(self._store, f"tcp://{host}:*", **options)

    def _watch(self, server: Any) -> None:
        """A server that ends by a fault of its own ends this process; Ray starts another."""
        server.wait()
        if self._server is server:
            os._exit(1)

    def _home(self, seconds: float | None = HOME_SECONDS) -> str:
        """The first server's address, for this one. Raises LinkLost where it does not answer in time."""
        ray, name = importlib.import_module("ray"), f"server-{self._number}"
        try:
            first = ray.get_actor(self._first)
            found = [first.endpoint.remote(), first.key.remote(name)]
            endpoint, key = ray.get(found, timeout=seconds)
        except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
            raise LinkLost("shard", f"no answer of the first server's actor: {error}") from None
        return f"tcp://{endpoint}/{self._store}?keys={key}"

    def key(self, client: str) -> str:
        """The file of a client's key, which is made if it is missing."""
        from pyps.remote.keys import KeyFolder

        self.endpoint()
        key = self._run_dir / KEYS / f"{client}.key"
        if not key.exists():
            KeyFolder.open(key.parent).add(client)
        return str(key)

    def close(self) -> None:
        """End, and remove what is left of the store on this node."""
        from pyps.store.segments import remove_all

        server, self._server = self._server, None
        if server is not None:
            server.close()
        remove_all(self._store)


@dataclass(frozen=True)
class NearStore:
    """The segment of this name on the trainer's node. node: that node; server: the actor there."""

    name: str
    node: str
    server: Any

    def address(self, client: str) -> str | None:
        """Where a client on this node finds it; None: it maps the segment."""
        if node_id() == self.node:
            return None
        ray = importlib.import_module("ray")
        endpoint, key = ray.get([self.server.endpoint.remote(), self.server.key.remote(client)])
        return f"tcp://{endpoint}/{self.name}?keys={key}"


@dataclass(frozen=True)
class ShardedStore:
    """Shards of the store of this name. servers: their actors, in order."""

    name: str
    servers: tuple[Any, ...]

    def address(self, client: str, timeout: float | None = None) -> str:
        """Where a client finds them now, once all have a place. Raises LinkLost after the timeout."""
        ray = importlib.import_module("ray")
        asked = [self.servers[0].key.remote(client), *(one.endpoint.remote() for one in self.servers)]
        try:
            key, *endpoints = ray.get(asked, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise LinkLost("open", "a server has no place on the cluster now") from None
        return f"tcp://{','.join(endpoints)}/{self.name}?keys={key}"
