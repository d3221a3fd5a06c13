"""Define what each rank of benchmarks/checkpoint.py runs: square layers under AdamW, on random data."""

from __future__ import annotations

import sys

import torch

import pyps

SAMPLES = 1024


def main() -> None:
    layers, width = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    inputs = torch.randn(SAMPLES, width)
    with pyps.join() as worker:
        worker.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        for x, y in worker.batches((inputs, inputs)):
            loss = torch.nn.functional.mse_loss(model(x), y)
            worker.backward(loss)
            worker.step(loss)


if __name__ == "__main__":
    main()
