"""Define what the ranks of benchmarks/fsdp.py do; each prints what it found as one line of JSON.

A rank emulates its device in every block: the forward pass of a block takes a third of its share of the
step's time, the backward pass the rest, whatever the cores do. FSDP2's collectives lie between the blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pyps.profiler.throttle import sleep_until
from pyps.torch import GlobalMean, Rebalancer, UnevenBatchSampler

WIDTH, BLOCKS = 64, 4


class Device:
    """Seconds of this rank's step: pace * (fixed + each * samples), in equal parts for the blocks."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.pace = chosen.paces[dist.get_rank()]
        self.fixed, self.each = chosen.fixed_seconds, chosen.sample_seconds
        self.samples = 0
        self._began = 0

    def seconds(self) -> float:
        return float(self.pace * (self.fixed + self.each * self.samples))

    def begin(self) -> None:
        self._began = time.monotonic_ns()

    def hold(self, share: float) -> None:
        sleep_until(self._began + round(share * self.seconds() / BLOCKS * 1e9))


class Begin(torch.autograd.Function):
    """The block's last operation: its backward pass begins here."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, device: Device) -> torch.Tensor:
        ctx.device = device
        device.hold(1 / 3)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.device.begin()
        return gradient, None


class End(torch.autograd.Function):
    """The block's first operation: its backward pass ends here."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, device: Device) -> torch.Tensor:
        ctx.device = device
        device.begin()
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.device.hold(2 / 3)
        return gradient, None


class Block(nn.Module):
    """A residual layer on the emulated device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.inner, self.device = nn.Linear(WIDTH, WIDTH), device

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = End.apply(values, self.device)  # type: ignore[no-untyped-call]
        found: torch.Tensor = Begin.apply(values + torch.tanh(self.inner(values)), self.device)  # type: ignore[no-untyped-call]
        return found


def train(chosen: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, the batches at the end, the changes, and how far measured own times are off."""
    torch.manual_seed(0)
    device, ranks = Device(chosen), dist.get_world_size()
    shape: tuple[int, ...] = (ranks,)
    names: tuple[str, ...] = ("shard",)
    if chosen.replicas > 1:
        shape, names = (chosen.replicas, ranks // chosen.replicas), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = nn.Sequential(*(fully_shard(Block(device), mesh=mesh) for _ in range(BLOCKS)))
    fully_shard(model, mesh=mesh)
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn(chosen.global_batch * 40, WIDTH, generator=draws)
    sampler = UnevenBatchSampler(inputs, [chosen.global_batch // ranks] * ranks)
    mean = GlobalMean(model, sampler)
    balance = Rebalancer(sampler, mean) if chosen.rebalance else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds: list[float] = []
    off: list[float] = []
    while len(seconds) < chosen.steps:
        for rows in sampler:
            if dist.get_rank() == 0 and len(seconds) == chosen.slows_at:
                device.pace *= 2
            began = time.perf_counter()
            device.samples = len(rows)
            batch = inputs[rows].requires_grad_()  # so that the first block has a backward pass that ends
            optimizer.zero_grad()
            mean.backward(nn.functional.mse_loss(model(batch), batch.detach().roll(1, 1)))
            optimizer.step()
            if balance is None:
                mean.end_step()
            else:
                balance.step()
                batch_of, measured = balance.latest or (0, 0.0)
                off += [measured / device.seconds() - 1] if batch_of == len(rows) else []
            seconds.append(time.perf_counter() - began)
            if len(seconds) == chosen.steps:
                break
    history = [str(change) for change in balance.history] if balance else []
    return {"seconds": seconds, "batches": sampler.split, "history": history, "off": off}


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = argparse.Namespace(**json.loads(sys.argv[2]))
    dist.init_process_group("gloo")
    print(json.dumps(train(options)), flush=True)
    dist.barrier()
    os._exit(0)  # torch's own threads may abort a process while its interpreter is torn down
