"""One worker of a run that trains a built-in model on random data: builtin_worker.py MODEL DEVICE [SHARES].

SHARES: each rank's percent of a GPU's multiprocessors, with commas between; CUDA reads it when it starts.
"""

from __future__ import annotations

import os
import sys

import torch

import pyps
from pyps.tasks import load_task

SAMPLES = 1024


def main() -> None:
    torch.set_num_threads(1)
    model, device, *shares = sys.argv[1:]
    if shares:
        share = shares[0].split(",")[int(os.environ["LOCAL_RANK"])]
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = share
    task = load_task(model)
    task.model.to(device)
    optimizer = task.make_optimizer()
    data = tuple(part.to(device) for part in task.make_batch(SAMPLES))
    with pyps.join() as worker:
        worker.attach(task.model, optimizer)
        for inputs, targets in worker.batches(data):
            loss = task.loss(task.model(inputs), targets)
            worker.backward(loss)
            worker.step(loss)


if __name__ == "__main__":
    main()
