"""The same with batches that fit the devices, found while training: torchrun --nproc-per-node 4 after.py"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import EmulatedDevice, accuracy, digits, network
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pyps.torch import Rebalancer, UnevenBatchSampler, agreed_split, weighted_hook

GLOBAL_BATCH = 256


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train, held_out = digits()
    sampler = UnevenBatchSampler(train, agreed_split(GLOBAL_BATCH))
    loader = DataLoader(train, batch_sampler=sampler)
    model = DistributedDataParallel(network())
    hook = weighted_hook(model, sampler)
    device = EmulatedDevice(model, hook)
    balance = Rebalancer(sampler, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(int(os.environ.get("EPOCHS", "10"))):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            balance.step()
            device.step()
    history = [f"{change}" for change in balance.history]
    device.print_summary(accuracy=accuracy(model.module, held_out), batches=sampler.split, history=history)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
