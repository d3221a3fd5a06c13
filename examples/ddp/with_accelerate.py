"""Uneven batches under Accelerate, exactly: torchrun --nproc-per-node 2 with_accelerate.py

The model and the optimizer are prepared as usual, the loader is not: its sampler knows the ranks already. The
loss carries its weight (loss_scale), as Accelerate's averaging expects.
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from common import EmulatedDevice, accuracy, digits, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from pyps.torch import UnevenBatchSampler, agreed_split, loss_scale


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    train, held_out = digits()
    ranks = accelerator.num_processes
    split = agreed_split(96, max_batch=16 if accelerator.process_index == ranks - 1 else None)
    loader = DataLoader(train, batch_sampler=UnevenBatchSampler(train, split))
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    device = EmulatedDevice(model)
    for epoch in range(int(os.environ.get("EPOCHS", "5"))):
        loader.batch_sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.to(accelerator.device), labels.to(accelerator.device)
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss * loss_scale(len(labels)))
            optimizer.step()
            device.step()
    device.print_summary(batches=split, accuracy=accuracy(accelerator.unwrap_model(model), held_out))
    accelerator.end_training()


if __name__ == "__main__":
    main()
