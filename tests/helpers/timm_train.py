"""Ranks of a loop as in timm's training script, uneven: the gradient's error, and the batches."""

from __future__ import annotations

import os

import timm
import torch
import torch.distributed as dist
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.task import ClassificationTask
from timm.utils import dispatch_clip_grad
from torch.utils.data import DataLoader, TensorDataset

from pyps.torch import GlobalMean, Rebalancer, UnevenBatchSampler, UnevenSyncBatchNorm, check_gradient

LOSS = LabelSmoothingCrossEntropy(0.1)


def loss_of(model: torch.nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return LOSS(model(images), targets)  # type: ignore[no-any-return]


def trained(name: str) -> str:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, in_chans=1).double()
    model = UnevenSyncBatchNorm.convert(model)
    task = ClassificationTask(model, LOSS, verbose=False)
    task.prepare_distributed()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, t_initial=2)
    images = torch.randn(16, 1, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(images, torch.arange(16) % 4)
    sampler = UnevenBatchSampler(dataset, [6, 2])
    loader = DataLoader(dataset, batch_sampler=sampler)
    mean = GlobalMean(task.trainable_module, sampler)
    balance = Rebalancer(sampler, mean)
    worst, sizes = 0.0, set()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            worst = max(worst, check_gradient(task.trainable_module, loss_of, batch).error)
            sizes.add(len(batch[0]))
            optimizer.zero_grad()
            mean.backward(task(*batch)["loss"])
            dispatch_clip_grad(task.get_clip_parameters(), value=1.0)
            optimizer.step()
            balance.step()
        schedule.step(epoch + 1)
    return f"{name}: {worst:.2g} off, batches of {sizes}"


def main() -> None:
    dist.init_process_group("gloo")
    said = [trained(name) for name in os.environ["MODELS"].split()]
    if dist.get_rank() == 0:
        print("\n".join(said))
    dist.destroy_process_group()


main()
