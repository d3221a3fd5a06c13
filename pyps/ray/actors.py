"""What Ray runs on the nodes: an actor for each rank, and one that serves the store to other nodes.

Both are plain classes, made actors by pyps.ray.trainer. The store is a segment on the trainer's node: a rank
there maps it; a rank on another node uses the link, with a key of its own.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyps.errors import InputError
from pyps.formats.setup import SETUP_FILE
from pyps.worker.settings import Variable

KEYS = "keys"  # in the run's folder


@dataclass(frozen=True)
class Work:
    """What a rank runs. train: a function, or a script's path. args: the script's. folder: where it starts.

    env: its settings. node: that has the store. server: a handle of its StoreActor.
    """

    train: Callable[[], object] | str
    args: Sequence[str]
    folder: str
    env: Mapping[str, str]
    node: str
    server: Any

    @property
    def rank(self) -> int:
        return int(self.env[Variable.RANK])


def node_id() -> str:
    """The node that this process is on."""
    ray = importlib.import_module("ray")
    return str(ray.get_runtime_context().get_node_id())


class RankActor:
    """One rank's process."""

    def pid(self) -> int:
        """This process's id on its node."""
        return os.getpid()

    def train(self, work: Work) -> tuple[int, str]:
        """Run the work: an exit code as a script's process has, and the traceback of what it raised."""
        try:
            self._train(work)
        except SystemExit as end:
            return _exit_code(end)
        except BaseException:
            return 1, traceback.format_exc()
        finally:
            gc.collect()
        return 0, ""

    def _train(self, work: Work) -> None:
        os.environ.update(work.env)
        run_dir = Path(work.env[Variable.RUN_DIR])
        if not (run_dir / SETUP_FILE).exists():
            raise InputError(
                "run_dir", "", f"no {run_dir} on node {node_id()}", "a folder that all nodes have"
            )
        if node_id() != work.node:
            ray = importlib.import_module("ray")
            os.environ[Variable.STORE] = ray.get(work.server.address.remote(work.rank))
        if os.path.isdir(work.folder):
            os.chdir(work.folder)
        if callable(work.train):
            work.train()
            return
        sys.argv = [work.train, *work.args]
        sys.path.insert(0, os.path.dirname(work.train))
        runpy.run_path(work.train, run_name="__main__")


def _exit_code(end: SystemExit) -> tuple[int, str]:
    """As the interpreter takes sys.exit's argument."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0, ""
    return 1, str(end.code)


class StoreActor:
    """Serves the store of its node. It listens once a rank on another node asks where, and not before."""

    def __init__(self, store: str, run_dir: str, env: Mapping[str, str], client_timeout: float) -> None:
        os.environ.update(env)
        self._store, self._keys, self._client_timeout = store, Path(run_dir) / KEYS, client_timeout
        self._server: Any = None

    def pid(self) -> int:
        """This process's id on its node."""
        return os.getpid()

    def address(self, rank: int) -> str:
        """The store's address for this rank, with the file of its key, which is made if it is missing."""
        from pyps.remote.keys import KeyFolder
        from pyps.remote.server import Server

        if self._server is None:
            ray = importlib.import_module("ray")
            host = ray.util.get_node_ip_address()
            bind = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
            timeout = self._client_timeout
            self._server = Server(self._store, bind, keys=self._keys, client_timeout_seconds=timeout)
        key = self._keys / f"rank-{rank}.key"
        if not key.exists():
            KeyFolder.open(self._keys).add(key.stem)
        return f"{self._server.address}?keys={key}"
