"""One worker of benchmarks/modes.py: a model of MODEL numbers, and data that cost nothing to load."""

from __future__ import annotations

import torch
from modes import MODEL

import pyps

SAMPLES, WIDTH = 4096, 8


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    filler = torch.nn.Parameter(torch.zeros(MODEL - WIDTH - 1))
    model.register_parameter("filler", filler)
    with pyps.join() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        for x, y in worker.batches((inputs, targets)):
            loss = torch.nn.functional.mse_loss(model(x), y) + 0.0 * filler.sum()
            loss.backward()
            worker.step()


if __name__ == "__main__":
    main()
