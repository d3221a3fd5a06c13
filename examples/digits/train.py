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
        global_batch = sum(worker.settings.batches)
        rate = LEARNING_RATE * global_batch / REFERENCE  # under every policy that of a global batch
        for inputs, targets in worker.batches((images, labels)):
            trained = worker.claim.first // global_batch * global_batch  # the same on all ranks of a round
            optimizer.param_groups[0]["lr"] = rate * (1.0 - trained / worker.settings.samples)
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            worker.backward(loss)
            worker.step(loss)


if __name__ == "__main__":
    main()
