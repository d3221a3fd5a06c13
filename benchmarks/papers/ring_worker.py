"""One worker of benchmarks/papers/ring.py: ring_worker.py ADDRESS RANK POLICY LR STEP_SECONDS.

It computes real gradients, and sleeps until its step has lasted as long as on the device that it stands for.
"""

from __future__ import annotations

import sys
import time

import torch
from ring import BATCH, SAMPLES, WORKERS, data_and_model

import pyps


def main() -> None:
    torch.set_num_threads(1)
    address, rank, policy, lr, step_seconds = sys.argv[1:]
    data, model = data_and_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(lr))
    options = {"batches": [BATCH] * WORKERS, "policy": policy, "samples": SAMPLES, "seed": 1}
    with pyps.join(address, int(rank), **options) as worker:
        worker.attach(model, optimizer)
        for images, labels in worker.batches(data):
            until = time.monotonic() + float(step_seconds)
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            time.sleep(max(0.0, until - time.monotonic()))
            worker.step(loss)


if __name__ == "__main__":
    main()
