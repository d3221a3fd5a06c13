"""Trains a small CNN on the digits, as one worker of a run: pyps run --plan plan.json train.py."""

from __future__ import annotations

import data
import torch

import pyps
from pyps.tasks.builtin import digits_cnn

LEARNING_RATE = 0.1  # for a global batch of REFERENCE samples, at the beginning
REFERENCE = 256
MOMENTUM = 0.9


def main() -> None:
    torch.set_num_threads(1)
    (images, labels), _ = data.load()
    model = digits_cnn(seed=0).model
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    with pyps.join() as worker:
        worker.attach(model, optimizer)
        rate = (
            LEARNING_RATE * sum(worker.settings.batches) / REFERENCE
        )  # of a global batch, under every policy
        for inputs, targets in worker.batches((images, labels)):
            left = 1.0 - worker.claim.first / worker.settings.samples
            optimizer.param_groups[0]["lr"] = rate * left  # falls to zero in a line
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            worker.backward(loss)
            worker.step(loss)


if __name__ == "__main__":
    main()
