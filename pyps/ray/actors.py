"""A rank as Ray runs it: a plain class, made an actor by pyps.ray.trainer; its work and its resources."""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyps.errors import InputError, how_to_install
from pyps.formats.setup import SETUP_FILE
from pyps.ray.servers import NearStore, ShardedStore, node_id
from pyps.run.launcher import restore_signals
from pyps.worker.run.settings import stored_elsewhere

NOTICE_SECONDS = 1.0  # between two looks at the nodes that are drained


@dataclass(frozen=True)
class Work:
    """Tell what a rank runs. train: a function or a script's path. args: the script's. folder: of its start.

    env: its settings. run_dir: the run's folder. store: where the run's store is.
    """

    rank: int
    train: Callable[[], object] | str
    args: Sequence[str]
    folder: str
    env: Mapping[str, str]
    run_dir: Path
    store: NearStore | ShardedStore


class WorkerActor:
    """One rank's process."""

    def pid(self) -> int:
        """This process's id on its node."""
        return os.getpid()

    def train(self, work: Work) -> tuple[int, str]:
        """Run the work: an exit code as a script's process has, and the traceback of what it raised.

        When Ray drains the node, the worker leaves as on SIGTERM (pyps.worker.run.notice).
        """
        trained = threading.Event()
        before = signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # Ray's own: pyps.join() takes no other's place
        watch = threading.Thread(target=_leave_when_drained, args=(trained,), name="pyps-notice", daemon=True)
        watch.start()
        try:
            self._train(work)
        except SystemExit as end:
            return _exit_code(end)
        except BaseException:
            return 1, traceback.format_exc()
        finally:
            trained.set()
            watch.join()
            restore_signals({signal.SIGTERM: before})
            gc.collect()
        return 0, ""

    def _train(self, work: Work) -> None:
        if not (work.run_dir / SETUP_FILE).exists():
            found = f"no {work.run_dir} on node {node_id()}"
            raise InputError("run_dir", "", found, "a folder that all nodes have")
        address = work.store.address(f"rank-{work.rank}")
        os.environ.update(work.env if address is None else stored_elsewhere(work.env, address))
        if os.path.isdir(work.folder):
            os.chdir(work.folder)
        if callable(work.train):
            work.train()
            return
        sys.argv = [work.train, *work.args]
        sys.path.insert(0, os.path.dirname(work.train))
        runpy.run_path(work.train, run_name="__main__")


def _leave_when_drained(trained: threading.Event) -> None:
    """Send this process SIGTERM once Ray drains its node, as before a preemption."""
    here = node_id()
    while not trained.wait(NOTICE_SECONDS):
        if here in draining_nodes():
            os.kill(os.getpid(), signal.SIGTERM)
            return


def draining_nodes() -> set[str]:
    """The ids of the nodes that Ray drains; none with a Ray that does not say so."""
    state = importlib.import_module("ray._private.state").state
    return set(state.get_draining_nodes()) if hasattr(state, "get_draining_nodes") else set()


def _exit_code(end: SystemExit) -> tuple[int, str]:
    """Return the code as the interpreter takes sys.exit's argument."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0, ""
    return 1, str(end.code)


Resources = Mapping[str, float]  # as ray.cluster_resources() names them: CPU, GPU, and the cluster's own


def connected_ray() -> Any:
    """The ray module, connected to this process's cluster, or to RAY_ADDRESS's, or to this machine's.

    Starts none: its ports would be open to the network. Raises InputError without ray or a cluster, and
    outside its nodes.
    """
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise InputError("ray", "", f"no {error.name}", how_to_install("ray")) from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError:
            expected = "a cluster: ray.init() starts one on this machine, `ray start` one of several"
            raise InputError("ray", "", "no cluster to connect to", expected) from None
    if importlib.import_module("ray.util.client").ray.is_connected():
        expected = "a process on a node of the cluster, as `ray job submit` starts"
        raise InputError("ray", "", "a connection of Ray Client (ray://)", expected)
    return ray


def check_resources(where: str, resources: Resources) -> None:
    """Raise InputError for an amount that is no positive number."""
    for name, amount in resources.items():
        if not (isinstance(amount, int | float) and amount > 0):
            raise InputError(where, name, repr(amount), "a number above 0")
    if not resources:
        raise InputError(where, "", "nothing", 'at least one resource, such as {"CPU": 1}')


def actor_options(resources: Resources) -> dict[str, Any]:
    """The options of an actor or a task that takes these."""
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": own}
