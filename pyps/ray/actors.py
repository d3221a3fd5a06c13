"""A rank as Ray runs it: a plain class, made an actor by pyps.ray.trainer, and what it is to do."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyps.errors import InputError
from pyps.formats.setup import SETUP_FILE
from pyps.ray.servers import NearStore, ShardedStore, node_id
from pyps.worker.settings import stored_elsewhere


@dataclass(frozen=True)
class Work:
    """What a rank runs. train: a function, or a script's path. args: the script's. folder: where it starts.

    env: its settings. run_dir: the run's folder. store: where the run's store is.
    """

    rank: int
    train: Callable[[], object] | str
    args: Sequence[str]
    folder: str
    env: Mapping[str, str]
    run_dir: Path
    store: NearStore | ShardedStore


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


def _exit_code(end: SystemExit) -> tuple[int, str]:
    """As the interpreter takes sys.exit's argument."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0, ""
    return 1, str(end.code)
