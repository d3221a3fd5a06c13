"""Scripts that tests train with `pyps run`, and how they run them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PYPS = str(Path(sys.executable).parent / "pyps")
BATCHES = (5, 3)
B = sum(BATCHES)
ROUNDS = 12
SAMPLES = B * ROUNDS
LENGTH = 40
PATIENCE_SECONDS = 60.0

TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch
import pyps

torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(40, 4, generator=draws), torch.randn(40, 1, generator=draws)
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
with pyps.join() as worker:
    rank, run_dir = worker.rank, worker.settings.run_dir
    worker.attach(model, optimizer)
    print("attached", *sys.argv[1:])
    for step, (x, y) in enumerate(worker.batches((inputs, targets))):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        {within}
        worker.step(loss)
"""
KILLED_ONCE = """
        if rank == 1 and step == 3 and not (run_dir / "killed").exists():
            (run_dir / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def script(folder: Path, within: str = "", text: str = TRAIN) -> Path:
    path = folder / "train.py"
    path.write_text(text.replace("{within}", within.strip()) if text is TRAIN else text)
    return path


def options_for(plan: Path, samples: int, folder: Path) -> list[object]:
    """The options of a run of so many samples, whose folder is `folder`/out."""
    return ["--plan", plan, "--samples", str(samples), "--run-dir", folder / "out"]


def pyps_run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PYPS, "run", *map(str, arguments)], capture_output=True, text=True)


def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
