"""Ranks of the loop of a LIBRARY with AdaptiveBatch, on emulated devices; prints as JSON for each epoch: the
batch, the samples, the worst distance of a gradient from that of one process, and the learning rate.
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from ddp_balance_jobs import EmulatedTimer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyps.solver import Line
from pyps.torch import AdaptiveBatch, GradientNoise

LENGTH, BATCH, EPOCHS = 720, 24, 5


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, 6, generator=draws, dtype=torch.float64)
    return TensorDataset(
        x, x.sum(1, keepdim=True) + torch.randn(LENGTH, 1, generator=draws, dtype=torch.float64)
    )


def prepared(library: str, model: nn.Module, optimizer: Any) -> tuple[Any, ...]:
    """Model, optimizer, loader, the run, and what calls backward."""
    if library == "Accelerate":
        from pyps.torch.accelerate import UnevenAccelerator

        accelerator = UnevenAccelerator(cpu=True)
        loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
        return *accelerator.prepare(model, optimizer, loader), accelerator.run, accelerator.backward
    import lightning

    from pyps.torch.lightning import UnevenFabricStrategy

    strategy = UnevenFabricStrategy(process_group_backend="gloo")
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    both = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=BATCH // 2, shuffle=True))
    return *both, loader, strategy.run, fabric.backward


def main(library: str) -> None:
    torch.manual_seed(0)
    alone = nn.Linear(6, 1).double()
    model: Any = copy.deepcopy(alone)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer, loader, run, backward = prepared(library, model, optimizer)
    noise = GradientNoise(run.mean, 0.9)
    adaptive = AdaptiveBatch(noise, run.balance, optimizer, max_batch=96)
    run.balance.timer = EmulatedTimer(Line(0.02, 0.0005 * (1 + 2 * dist.get_rank())))
    found = []
    for _ in range(EPOCHS):
        sizes, worst, rate = [], 0.0, optimizer.param_groups[0]["lr"]
        for x, y in loader:
            every: list[Any] = [None, None]
            dist.all_gather_object(every, (x, y))
            whole = [torch.cat(parts) for parts in zip(*every, strict=True)]
            optimizer.zero_grad()
            alone.load_state_dict(model.module.state_dict())
            alone.zero_grad()
            nn.functional.mse_loss(alone(whole[0]), whole[1]).backward()  # type: ignore[no-untyped-call]
            backward(nn.functional.mse_loss(model(x), y))
            pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
            worst = max(worst, *(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs))  # type: ignore[operator, union-attr]
            sizes.append(len(whole[0]))
            noise.step()
            optimizer.step()
        adaptive.epoch()
        found.append([sizes[0], sum(sizes), worst, rate])
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


main(os.environ["LIBRARY"])
