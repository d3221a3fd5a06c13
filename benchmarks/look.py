"""Measure what it costs a worker's step to find values that are not finite: python benchmarks/look.py
[--save].

One worker trains a wide network on the CPU, autograd included. Steps take turns: gradients are looked at as
backward makes them, as in any run; the push looks at them; nothing does. Where hooks do not look, they copy
gradients by numpy.copyto. CPU time of the thread, which computes all of it, so that other processes matter
less. A round is one step of each, and a ratio is of one round. Medians, with the quartiles of the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from record import machine, save_table, table
from torch import nn

import pyps
from pyps import native
from pyps.native.values import Flat

LAYERS = 8
WARM_UP = 2  # rounds
OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def copied(known: bool) -> tuple[Callable[..., bool], Callable[..., bool]]:
    """In place of native.finite and native.take: no look, and what they are to say."""

    def take(values: Flat, to: Flat) -> bool:
        np.copyto(to, values)
        return known

    return lambda _: known, take


LOOKS = {
    "in backward, by hooks": (native.finite, native.take),
    "in the push": copied(False),
    "none": copied(True),
}


def measure(parameters: int, batch: int, rounds: int, optimizer: str) -> dict[str, list[float]]:
    """CPU seconds of each step, by how it looked."""
    width = round((parameters / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    data = tuple(torch.randn(2 * batch, width) for _ in range(2))
    names, times = list(LOOKS), {name: [] for name in LOOKS}
    steps = len(names) * (rounds + WARM_UP) + 1  # the last one ends with the run
    with pyps.join(f"look-{os.getpid()}", 0, batches=[batch], samples=batch * steps, policy="asp") as worker:
        worker.attach(model, OPTIMIZERS[optimizer](model.parameters(), lr=1e-4))
        began, looked = 0.0, ""
        for k, (x, y) in enumerate(worker.batches(data)):
            if looked and k > len(names) * WARM_UP:
                times[looked].append(time.thread_time() - began)
            began, looked = time.thread_time(), names[(k + k // len(names)) % len(names)]
            native.finite, native.take = LOOKS[looked]
            loss = nn.functional.mse_loss(model(x), y)
            worker.backward(loss)
            worker.step(loss)
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=25e6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["a step of a worker", "look", "CPU ms", "over none (quartiles)"]]
    for optimizer in options.optimizers:
        times = measure(int(options.parameters), options.batch, options.rounds, optimizer)
        for name, found in times.items():
            ratios = [a / b for a, b in zip(found, times["none"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            shown = f"{middle:.3f} ({low:.3f} to {high:.3f})" if name != "none" else ""
            rows.append([optimizer, name, f"{1e3 * statistics.median(found):.1f}", shown])
    sizes = f"{options.parameters / 1e6:.0f} M parameters, batch {options.batch}, one thread of torch"
    text = f"{machine()}; {sizes}.\n\n{table(rows)}"
    print(text)
    if options.save:
        save_table("look", text)


if __name__ == "__main__":
    main()
