"""Uneven batches under Accelerate, exactly: torchrun --nproc-per-node 2 with_accelerate.py

UnevenAccelerator stands for Accelerator; the rest is a usual script. The last rank takes at most 16 samples.
EVEN=1 trains with equal batches that stay; PACES emulates devices (common.py).
"""

from __future__ import annotations

import os

import torch
from common import EmulatedDevice, accuracy, digits, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from pyps.torch.accelerate import UnevenAccelerator


def main() -> None:
    torch.set_num_threads(1)
    even = bool(os.environ.get("EVEN"))
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    accelerator = UnevenAccelerator(
        cpu=not torch.cuda.is_available(), max_batch=16 if last and not even else None, rebalance=not even
    )
    train, held_out = digits()
    loader = DataLoader(train, batch_size=96, shuffle=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    device = EmulatedDevice(model)
    for _ in range(int(os.environ.get("EPOCHS", "5"))):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            device.step()
    split = accelerator.run.sampler.split
    device.print_summary(batches=split, accuracy=accuracy(accelerator.unwrap_model(model), held_out))
    accelerator.end_training()


if __name__ == "__main__":
    main()
