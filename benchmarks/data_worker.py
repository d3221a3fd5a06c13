"""Define what each rank of benchmarks/data.py runs: a tiny model on a data set whose samples take a
set time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.utils.data import Dataset

import pyps
from pyps.profiler.throttle import sleep_until

SAMPLES = 6000


class Timed(Dataset[Any]):
    """Reading a sample takes so many seconds, however many processes read at once: it needs no CPU."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        until = time.monotonic_ns() + round(self.seconds * 1e9)
        x = torch.full((8,), index / SAMPLES)
        sleep_until(until)
        return x, x[:1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample-seconds", type=float, default=0.001)
    parser.add_argument("--slow-seconds", type=float, help="of rank 0's samples, instead")
    parser.add_argument("--num-workers", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    with pyps.join() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.001))
        slow = options.slow_seconds if worker.rank == 0 else None
        data = Timed(slow or options.sample_seconds)
        for x, y in worker.batches(data, options.num_workers):
            loss = torch.nn.functional.mse_loss(model(x), y)
            worker.backward(loss)
            worker.step(loss)


if __name__ == "__main__":
    main()
