"""Define what the ranks of the tests of AdaptiveBatch do: train on emulated devices, with a batch that may
grow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_balance_jobs import EmulatedTimer, profile_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyps.torch
from pyps.solver import Line
from pyps.torch import AdaptiveBatch, GlobalMean, GradientNoise, Rebalancer, UnevenBatchSampler

LENGTH, RATE = 600, 0.05


def trained(
    group: dist.ProcessGroup,
    costs: list[Line],
    split: list[int],
    epochs: int,
    options: dict[str, Any],
    folder: Path | None = None,
    loads: bool = False,
) -> dict[str, Any]:
    """A linear model on noisy targets; saves at each epoch's end. By epoch: the samples, B, lr."""
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(LENGTH, 6, generator=draws, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True) + torch.randn(LENGTH, 1, generator=draws, dtype=torch.float64)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 1).double(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sampler = UnevenBatchSampler(LENGTH, split, dist.get_rank(group))
    mean = GlobalMean(model, sampler)
    cost = costs[dist.get_rank(group)]
    noise, balance = GradientNoise(mean, 0.9), Rebalancer(sampler, mean, profile_of(cost))
    balance.timer = EmulatedTimer(cost)  # type: ignore[assignment]
    adaptive = AdaptiveBatch(noise, balance, optimizer, **options)
    state: dict[str, Any] = {"mean": mean, "noise": noise, "balance": balance, "adaptive": adaptive}
    if loads and folder is not None:
        pyps.torch.load(folder, model, optimizer, sampler, group=group, **state)
    found: dict[str, Any] = {"samples": [], "batches": [], "rates": []}
    while sampler.epoch < epochs:
        seen: list[int] = []
        found["rates"].append(optimizer.param_groups[0]["lr"])
        found["batches"].append(sampler.global_batch)
        for rows in sampler:
            optimizer.zero_grad()
            mean.backward(nn.functional.mse_loss(model(inputs[rows]), targets[rows]))
            noise.step()
            optimizer.step()
            balance.step()
            seen += rows
        found["samples"].append(seen)
        adaptive.epoch()
        if folder is not None and not loads:
            pyps.torch.save(folder, model, optimizer, sampler, keep=99, group=group, **state)
    found["model"] = [p.detach().clone() for p in model.parameters()]
    return found
