"""The same with batches that fit the devices, found while training: torchrun --nproc-per-node 4 after.py"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import EmulatedDevice, accuracy, digits, network
from torch.nn.functional import cross_entropy

from pyps.torch import uneven

GLOBAL_BATCH = 256


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train, held_out = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, loader, step = uneven(model, train, GLOBAL_BATCH, optimizer=optimizer)
    device = EmulatedDevice(model)
    for _ in range(int(os.environ.get("EPOCHS", "10"))):
        for images, labels in loader:
            optimizer.zero_grad()
            step.backward(cross_entropy(model(images), labels))
            step()
            device.step()
    history = [f"{change}" for change in step.balance.history]
    device.print_summary(accuracy=accuracy(model, held_out), batches=step.sampler.split, history=history)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
