"""Define the jobs of the tests of FSDP2 checkpoints: each function runs on all ranks of a group."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_tools import flat, mine, net, numbers, square
from device import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyps.torch
from pyps.torch import GlobalMean, Moves, Rebalancer, UnevenBatchSampler

LENGTH = 46  # of the data set: the last round of an epoch is short


def mesh_of(group: dist.ProcessGroup, replicas: int) -> DeviceMesh:
    """All ranks in one dimension, or in two: replicas of shards."""
    if replicas == 1:
        return DeviceMesh.from_group(group, DEVICE.type)
    ranks = torch.arange(dist.get_world_size(group)).view(replicas, -1)
    return DeviceMesh(DEVICE.type, ranks, mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def from_ddp(group: dist.ProcessGroup, folder: Path, split: list[int]) -> bool:
    """Return whether a sharded model goes on from a DDP run's checkpoint, and DDP from its own."""
    whole = net(torch.float64)
    runs = [
        DistributedDataParallel(copy.deepcopy(whole), process_group=group),
        sharded(copy.deepcopy(whole), mesh_of(group, 1)),
        DistributedDataParallel(whole, process_group=group),
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in runs]
    batch = [x[mine(split, group)] for x in numbers(0, sum(split), torch.float64)]
    parameters = []
    for step, (model, optimizer) in enumerate(zip(runs, optimizers, strict=True)):
        mean = GlobalMean(model)
        if step:
            pyps.torch.load(folder, model, optimizer, group=group)
        for other in range(step, 1 if step == 0 else 2):  # the third only loads
            optimizer.zero_grad()
            mean.backward(square(model, *batch))
            optimizer.step()
            pyps.torch.save(folder, model, optimizer, step=other + 1, group=group)
        parameters.append(flat(getattr(p, "full_tensor", p.detach)() for p in model.parameters()))
    moments = optimizers[2].state_dict()["state"][0]["exp_avg"]
    return torch.equal(parameters[1], parameters[2]) and bool(moments.any())


def train(
    group: dist.ProcessGroup,
    folder: Path,
    steps: int,
    split: list[int],
    replicas: int = 1,
    save_at: int = 0,
    loads: bool = False,
) -> dict[str, Any]:
    """Train up to a step, or on from a checkpoint; the whole parameters and the samples of this rank."""
    model = sharded(net(torch.float64), mesh_of(group, replicas))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank = dist.get_rank(group)
    sampler = UnevenBatchSampler(LENGTH, split, rank, seed=3, accumulate=[1, 2, *[1] * (len(split) - 2)])
    mean = GlobalMean(model, sampler)
    state: dict[str, Any] = {"mean": mean, "rebalancer": Rebalancer(sampler, mean, moves=Moves(window=3))}
    inputs, targets = numbers(0, LENGTH, torch.float64)
    step, taken = 0, []
    if loads:
        kept = pyps.torch.load(folder, model, optimizer, sampler, group=group, **state)
        assert kept is not None
        step = kept["note"]
    while step < steps:
        for passes in mean.rounds(sampler):
            optimizer.zero_grad()
            taken.append([])
            for chosen in passes:
                mean.backward(square(model, inputs[chosen], targets[chosen]))
                taken[-1] += chosen
            optimizer.step()
            mean.end_step()
            step += 1
            if step == save_at:
                pyps.torch.save(folder, model, optimizer, sampler, group=group, note=step, **state)
            if step == steps:
                break
    return {"model": [p.full_tensor().detach() for p in model.parameters()], "taken": taken}
