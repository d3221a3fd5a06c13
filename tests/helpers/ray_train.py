"""Define what the ranks of tests/ray train: a parameter that each sample changes by the same exact amount.

A process takes its first steps slowly, so that it can be killed among them, and then waits for the file `go`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

import pyps

SLOW_STEPS, SLOW_SECONDS = 200, 0.02
WIDTH = 256  # whose square is the parameters of two chunks


def train(width: int = 1) -> None:
    """A gradient is 1 / width everywhere."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(width, width, bias=False)
    torch.nn.init.zeros_(model.weight)
    with pyps.join() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step, (x,) in enumerate(worker.batches((torch.ones(64, width),))):
            loss = model(x).mean()
            loss.backward()
            pace(step)
            worker.step(loss)


def train_wide() -> None:
    """With a model that two servers can share."""
    train(WIDTH)


def pace(step: int) -> None:
    go = Path(json.loads(os.environ["PYPS_RUN"])["run_dir"]) / "go"
    if step < SLOW_STEPS and not go.exists():
        time.sleep(SLOW_SECONDS)
    while step >= SLOW_STEPS and not go.exists():
        time.sleep(0.01)


def fail() -> None:
    train()
    raise ValueError("of my own")
