"""Ranks for tests: gloo processes that are started once and then run any function of an importable module.

    results = ranks.run(2, function, *arguments)      # function(group, *arguments) on the first two ranks

A rank that raises, dies or does not answer in time fails the caller, with its traceback; nothing outlives it.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

# Two ranks that compile for the GPU which they share take longer than all else.
DEADLINE_SECONDS = 110.0 if os.environ.get("PYPS_TEST_DEVICE", "cpu") == "cpu" else 300.0
GROUPS_OF_A_JOB = 1000  # at most
PRELOADED = ["torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch._dynamo"]
PRELOADED += ["torch.distributed.fsdp", "sklearn.datasets", "pyps.torch"]


class Ranks:
    """`most` processes, and for each number up to it a group of the first ones."""

    def __init__(self, most: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder, self._jobs = tempfile.TemporaryDirectory(), 0
        file = Path(self._folder.name) / "store"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(most):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, most, str(file), theirs))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        atexit.register(self.close)

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(group, *arguments) on the first `count` ranks: their results in order."""
        pipes = self._pipes[:count]
        self._jobs += 1
        for pipe in pipes:
            pipe.send((self._jobs, count, function, arguments))
        results: dict[int, Any] = {}
        while len(results) < count:
            waited_for = [pipe for k, pipe in enumerate(pipes) if k not in results]
            ready = wait_for(waited_for, DEADLINE_SECONDS)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(set(range(count)) - set(results))} do not answer")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    failed, results[pipes.index(pipe)] = pipe.recv()
                except (EOFError, ConnectionError):
                    failed, results[pipes.index(pipe)] = True, "the process died"
                if failed:
                    self.close()  # the others may wait for it in a collective
                    raise RuntimeError(f"rank {pipes.index(pipe)}: {results[pipes.index(pipe)]}")
        return [results[k] for k in range(count)]

    @property
    def closed(self) -> bool:
        return not self._processes

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()


def serve(rank: int, most: int, file: str, pipe: Connection) -> None:
    """A rank's process: run what comes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # As in training: otherwise each DataLoader worker would start a forkserver and import torch.
    multiprocessing.set_start_method("fork", force=True)
    limit = timedelta(seconds=0.8 * DEADLINE_SECONDS)  # sooner: a rank that waits in vain says where
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=most, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, most + 1)}
    gc.freeze()
    while True:
        try:
            number, count, function, arguments = pipe.recv()
        except EOFError:
            return
        # torch names groups by counting them: a job on fewer ranks may have made some, and a later group's
        # ranks would wait for each other under unlike names.
        dist.distributed_c10d._world.group_count = GROUPS_OF_A_JOB * number
        faulthandler.dump_traceback_later(limit.total_seconds())  # where it waits, in a group of its own too
        try:
            pipe.send((False, function(groups[count], *arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
        # A later job's loader processes are forks: one that collects an old group would join its threads,
        # which are not there, and crash.
        gc.collect()


def run_script(path: Path, count: int, *, imported: Sequence[str] = (), **environment: str) -> str:
    """Return what `count` ranks of a script print, started as by torchrun, but with torch, the libraries that
    the script imports first, and the modules `imported` imported already.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # the scripts want a GPU for each rank
    common = (
        hidden
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        | environment
    )
    with tempfile.NamedTemporaryFile("r") as said:
        first = context.Process(target=_scripts, args=(str(path), count, imported, common, said.name))
        first.start()
        assert first.pid is not None
        try:
            first.join(DEADLINE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)
            first.join(10)
        output = said.read()
    assert first.exitcode == 0, f"exit code {first.exitcode}:\n{output}"
    return output


def _scripts(path: str, count: int, imported: Sequence[str], environment: dict[str, str], said: str) -> None:
    """Import what the ranks of a script need, once, and fork them. Exits with 1 if one of them failed."""
    import torch

    os.setsid()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in serve()
    os.environ.update(environment)
    sys.path.insert(0, str(Path(path).parent))
    gc.disable()  # nothing that is imported is garbage
    with contextlib.suppress(ImportError):  # the ranks say so
        exec(compile(_imports(Path(path)), path, "exec"), {})
        for name in imported:
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    ranks = [multiprocessing.Process(target=_script, args=(path, rank, said)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


def _imports(path: Path) -> ast.Module:
    """The imports at the top of a script. Files of its folder are left out: they may read their rank."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [name]
        is_import = isinstance(node, ast.Import | ast.ImportFrom) and name != "__future__"
        if is_import and not any((path.parent / f"{one.split('.')[0]}.py").exists() for one in names):
            found.append(node)
    return ast.Module(found, [])


def _script(path: str, rank: int, said: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with open(said, "a", buffering=1) as sys.stdout:
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            sys.stdout.write(traceback.format_exc())
            raise
