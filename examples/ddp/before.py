"""Digits on DistributedDataParallel as usual, equal batches: torchrun --nproc-per-node 4 before.py"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import EmulatedDevice, accuracy, digits, network
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

GLOBAL_BATCH = 256


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train, held_out = digits()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    device = EmulatedDevice(model)
    for epoch in range(int(os.environ.get("EPOCHS", "10"))):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            device.step()
    device.print_summary(accuracy=accuracy(model.module, held_out))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
