"""Measure what pyps costs a small step, a look at the store, and a start: python benchmarks/small_steps.py
[--save].

Steps of a network of 340 parameters, by one worker on this machine, beside the same steps in plain torch: the
difference is the worker's own work, in CPU time of its thread. A start is a new interpreter, until the name
is there, or until a worker has its first batch; for the first optimizer torch imports its compiler. Rounds
are interleaved; medians with range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from record import machine, milliseconds, save_table, seconds_of, table
from torch import nn

import pyps

POLICIES = ("asp", "bsp", "r2sp", "ssp")
BATCH, SAMPLES, STEPS = 8, 64, 600
STARTS = {
    "import torch": "import torch",
    "torch, an optimizer": "import torch; torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])",
    "import pyps": "import pyps",
    "pyps.Store": "import pyps; pyps.Store",
    "pyps.join": "import pyps; pyps.join",
    "a worker's first batch": """
import os, pyps, torch
model = torch.nn.Linear(4, 2)
with pyps.join(f"start-{os.getpid()}", 0, batches=[8], samples=8) as worker:
    worker.attach(model)
    x, = next(iter(worker.batches((torch.zeros(64, 4),))))
    os._exit(0 if worker.store.backend.close() is None else 1)
""",
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def plain(data: tuple[torch.Tensor, ...]) -> list[float]:
    """Seconds of each step in torch alone."""
    model, times = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        began = time.thread_time()
        x, y = (column[torch.randint(0, SAMPLES, (BATCH,))] for column in data)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        float(loss.detach())
        times.append(time.thread_time() - began)
    return times


def worked(data: tuple[torch.Tensor, ...], policy: str) -> tuple[list[float], list[float]]:
    """Seconds of each step of a worker, and of each look at its store."""
    model, times = network(), []
    name, samples = f"small-{os.getpid()}", BATCH * (STEPS + 1)
    with pyps.join(name, 0, batches=[BATCH], samples=samples, policy=policy) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
        began = time.thread_time()
        for x, y in worker.batches(data):
            times.append(time.thread_time() - began)
            began = time.thread_time()
            loss = nn.functional.mse_loss(model(x), y)
            worker.backward(loss)
            worker.step(loss)
        looks = [seconds_of(worker.store.status) for _ in range(STEPS)]
    return times[1:], looks


def start(code: str) -> float:
    return seconds_of(lambda: subprocess.run([sys.executable, "-c", code], check=True))


def microseconds(times: list[float]) -> str:
    """The median and the quartiles, as text."""
    low, middle, high = (1e6 * part for part in statistics.quantiles(times, n=4))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def repeated(rounds: int, calls: dict[str, Callable[[], list[float]]]) -> dict[str, list[float]]:
    """All times of each call."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name] += call()
    return found


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 4)
    looks: list[float] = []

    def step_of(policy: str) -> list[float]:
        times, seen = worked(data, policy)
        looks.extend(seen)
        return times

    calls = {"plain torch": lambda: plain(data)} | {p: (lambda p=p: step_of(p)) for p in POLICIES}
    steps = repeated(options.rounds, calls)
    alone = statistics.median(steps["plain torch"])
    rows = [["a small step", "CPU us (quartiles)", "more than torch, us"]]
    rows += [
        [name, microseconds(t), f"{1e6 * (statistics.median(t) - alone):.0f}"] for name, t in steps.items()
    ]
    rows.append(["Store.status()", microseconds(looks), ""])
    starts = repeated(options.rounds, {name: (lambda c=code: [start(c)]) for name, code in STARTS.items()})
    begun = [["a start", "ms (range)"], *([name, milliseconds(times)] for name, times in starts.items())]
    text = f"{machine()}, one thread of torch.\n\n{table(rows)}\n\n{table(begun)}"
    print(text)
    if options.save:
        save_table("small-steps", text)


if __name__ == "__main__":
    main()
