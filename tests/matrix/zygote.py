"""A process that has imported torch, and forks a worker's process for each job: in milliseconds.

job: a pickled (cell, seat, folder of segments, steps after which it is killed) on stdin
answer: its exit code, a line on stdout
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Job = tuple[Any, ...]
HERE = Path(__file__).resolve()


class Zygote:
    """Runs one job after the other; see `zygote`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def run(self, job: Job) -> int:
        """The exit code of a job's process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(job, self._process.stdin)
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def zygote() -> Iterator[Zygote]:
    """One that ends with the block."""
    folders = [str(HERE.parent), str(HERE.parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "QUICK_START": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(HERE)], env=env, **pipes) as process:  # type: ignore[call-overload]
        yield Zygote(process)


def main() -> None:
    import torch
    from running import work_in_a_process

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # torch imports more for the first one
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.suppress(EOFError):
        while True:
            job = pickle.load(sys.stdin.buffer)
            child = os.fork()
            if child == 0:
                try:
                    work_in_a_process(*job)
                    os._exit(0)
                finally:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                    os._exit(1)
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
