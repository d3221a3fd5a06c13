"""Ranks for tests: gloo processes that are started once and then run any function of an importable module.

    results = ranks.run(2, function, *arguments)      # function(group, *arguments) on the first two ranks

A rank that raises, dies or does not answer in time fails the caller, with its traceback; nothing outlives it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 60.0


class Ranks:
    """`most` processes, and for each number up to it a group of the first ones."""

    def __init__(self, most: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "pyps.torch"])
        self._folder = tempfile.TemporaryDirectory()
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
        for pipe in pipes:
            pipe.send((count, function, arguments))
        results: dict[int, Any] = {}
        while len(results) < count:
            waited_for = [pipe for k, pipe in enumerate(pipes) if k not in results]
            ready = wait_for(waited_for, DEADLINE_SECONDS)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(set(range(count)) - set(results))} do not answer")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                failed, results[pipes.index(pipe)] = pipe.recv()
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
    limit = timedelta(seconds=DEADLINE_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=most, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, most + 1)}
    while True:
        try:
            count, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(groups[count], *arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
