"""Define what the ranks of benchmarks/sharding.py do; each prints what it found as one line of JSON.

All ways to train hold their own copy of one model and take their steps in turn, so that what else the machine
does meets them alike. CPU seconds are those of the whole process, with gloo's threads.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from pyps.torch import shard, shard_optimizer

Way = tuple[nn.Module, torch.optim.Optimizer]
RATE = 1e-3


class Block(nn.Module):
    """[n, width] -> [n, width], with 3 width**2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width * 3 // 2), nn.Linear(width * 3 // 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    """Run the steps that the first rank reports."""
    chosen = argparse.Namespace(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(chosen.width) for _ in range(chosen.blocks)))
    ways = {name: make(copy.deepcopy(model)) for name, make in makers().items()}
    batch = torch.randn(chosen.batch, chosen.width)
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for turn in range(chosen.rounds + 1):
        for name, (way, optimizer) in ways.items():
            took = timed(way, optimizer, batch, chosen.steps)
            if turn:  # the first one makes states and buckets
                seconds[name].append(took)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"seconds": seconds, "parameters": parameters}))
    dist.destroy_process_group()


def makers() -> dict[str, Callable[[Any], Way]]:
    """Return the ways to train, by name."""

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=RATE)

    def ddp(model: nn.Module) -> Way:
        whole = DistributedDataParallel(model)
        return whole, adamw(whole)

    def states(shares: list[float]) -> Callable[[nn.Module], Way]:
        def make(model: nn.Module) -> Way:
            whole, optimizer = ddp(model)
            return whole, shard_optimizer(optimizer, shares)

        return make

    def redundancy(model: nn.Module) -> Way:
        whole = DistributedDataParallel(model)
        return whole, ZeroRedundancyOptimizer(whole.parameters(), torch.optim.AdamW, lr=RATE)

    def fsdp(model: nn.Sequential) -> Way:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        whole = fully_shard(model, mesh=mesh)
        return whole, adamw(whole)

    def shards(shares: list[float]) -> Callable[[nn.Sequential], Way]:
        def make(model: nn.Sequential) -> Way:
            for block in model:
                shard(block, shares)
            whole = shard(model, shares)
            return whole, adamw(whole)

        return make

    even, uneven = [0.5, 0.5], [2 / 3, 1 / 3]
    return {
        "DDP": ddp,
        "shard_optimizer, 1:1": states(even),
        "shard_optimizer, 2:1": states(uneven),
        "ZeroRedundancyOptimizer": redundancy,
        "FSDP2": fsdp,
        "shard, 1:1": shards(even),
        "shard, 2:1": shards(uneven),
    }


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, steps: int) -> list[float]:
    """Return CPU and wall seconds of a step."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    dist.barrier()
    return [(time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps]


if __name__ == "__main__":
    main()
