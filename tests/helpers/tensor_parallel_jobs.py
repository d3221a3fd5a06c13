"""Define what ranks of a mesh of 2 data-parallel by 2 tensor-parallel ones do in the tests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_balance_jobs import BATCH, EmulatedTimer
from ddp_tools import flat, numbers, off, square
from mean_jobs import said
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pyps.torch
from pyps.solver import Line
from pyps.torch import (
    AdaptiveBatch,
    GlobalMean,
    GradientNoise,
    Rebalancer,
    UnevenBatchSampler,
    agreed_split,
    check_gradient,
)


class Blocks(nn.Module):
    """Layers that are cut by columns and by rows, and a norm that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)
        self.out = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.norm(inputs + self.down(torch.tanh(self.up(inputs)))))
        return found


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))


def divided(model: nn.Module, mesh: DeviceMesh, kind: str) -> Any:
    """The model in tensor-parallel parts, in DDP or sharded."""
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "DDP":
        return DistributedDataParallel(model, device_mesh=mesh["dp"])
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def parts_of(alone: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    """The whole gradient as a tensor-parallel rank of DDP has it."""
    rank, cut = mesh.get_local_rank("tp"), {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    return flat(
        p.grad.chunk(2, cut[name])[rank] if name in cut else p.grad for name, p in alone.named_parameters()
    )


def errors(group: dist.ProcessGroup, kind: str, batches: list[int], parts: list[int]) -> list[float]:
    """Return by round how far the gradient is from one process's; and the check's own error, in the end."""
    mesh = mesh_of(group)
    alone = Blocks().double()
    model = divided(copy.deepcopy(alone), mesh, kind)
    parameters = list(model.parameters())  # as an optimizer has them
    mean, rank = GlobalMean(model), mesh.get_local_rank("dp")
    found = []
    for number in range(3):
        whole = numbers(number, sum(batches), torch.float64)
        low = sum(batches[:rank])
        batch = tuple(x[low : low + batches[rank]] for x in whole)
        for parameter in (*parameters, *alone.parameters()):
            parameter.grad = None
        square(alone, *whole).backward()
        for micro in mean.accumulate(batch, parts) if max(parts) > 1 else [batch]:
            mean.backward(square(model, *micro))
        own: list[Any] = [p.grad for p in parameters]
        if kind == "DDP":
            found.append(off(flat(own), parts_of(alone, mesh)))
        else:
            found.append(off(flat(g.full_tensor() for g in own), flat(p.grad for p in alone.parameters())))
        with torch.no_grad():
            for parameter in (*parameters, *alone.parameters()):
                parameter -= 0.05 * parameter.grad  # type: ignore[operator]
    checked = check_gradient(model, square, batch, batches)
    assert checked.cause.name == "NONE", checked
    return [*found, checked.error]


def unlike_peers(group: dist.ProcessGroup, kind: str) -> str:
    """Return what ranks hear whose peers have batches of other sizes."""
    mesh = mesh_of(group)
    model = divided(Blocks().double(), mesh, kind)
    mean, size = GlobalMean(model), 5 - mesh.get_local_rank("tp")
    batch = [x[:size] for x in numbers(0, 5, torch.float64)]
    return said(lambda: mean.backward(square(model, *batch)))


def causes(group: dist.ProcessGroup, kind: str) -> tuple[str, float]:
    """Return what check_gradient says without weights."""
    mesh = mesh_of(group)
    model = divided(Blocks().double(), mesh, kind)
    count = (9, 3)[mesh.get_local_rank("dp")]
    batch = [x[:count] for x in numbers(mesh.get_local_rank("dp"), 12, torch.float64)]
    checked = check_gradient(model, square, batch)
    return checked.cause.name, checked.error


def noise(group: dist.ProcessGroup, kind: str, batches: list[int]) -> tuple[list[float], list[float]]:
    """Noise and signal as measured, and by their definition."""
    mesh = mesh_of(group)
    alone = Blocks().double()
    model = divided(copy.deepcopy(alone), mesh, kind)
    rank = mesh.get_local_rank("dp")
    sampler = UnevenBatchSampler(sum(batches), batches, rank)
    mean = GlobalMean(model, sampler)
    next(iter(sampler))
    measured = GradientNoise(mean, 0.0)
    whole = numbers(0, sum(batches), torch.float64)
    low = sum(batches[:rank])
    mean.backward(square(model, *(x[low : low + batches[rank]] for x in whole)))
    measured.step()
    parameters = list(alone.parameters())
    right = flat(torch.autograd.grad(square(alone, *whole), parameters))
    spread, low = 0.0, 0
    for batch in batches:
        part = [x[low : low + batch] for x in whole]
        one = flat(torch.autograd.grad(square(alone, *part), parameters))
        spread, low = spread + batch * float((one - right).square().sum()), low + batch
    signal = float(right.square().sum()) - spread / sum(batches)
    return measured.state_dict()["sums"][:2], [spread, signal]


def trained(
    group: dist.ProcessGroup, kind: str, costs: list[Line], steps: int, folder: Path | None = None
) -> dict[str, Any]:
    """Batches that follow unlike devices; the second of two peers measures other times than the first."""
    mesh = mesh_of(group)
    rank, peer = (mesh.get_local_rank(name) for name in ("dp", "tp"))
    split = agreed_split(BATCH, group=mesh["dp"].get_group(), peers=mesh["tp"].get_group())
    sampler = UnevenBatchSampler(BATCH * steps, split, rank)
    model = divided(Blocks().double(), mesh, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mean = GlobalMean(model, sampler)
    noise, balance = GradientNoise(mean, 0.9), Rebalancer(sampler, mean)
    cost = costs[rank]
    balance.timer = EmulatedTimer(Line(cost.fixed_seconds, cost.per_sample_seconds * (1 + 0.3 * peer)))  # type: ignore[assignment]
    adaptive = AdaptiveBatch(noise, balance, optimizer, max_batch=4 * BATCH)
    state = {"mean": mean, "noise": noise, "balance": balance, "adaptive": adaptive}
    if folder is not None and folder.exists():
        pyps.torch.load(folder, model, optimizer, sampler, **state)
    inputs, targets = numbers(0, len(sampler) * BATCH, torch.float64)
    seen, splits = [], []
    for rows in sampler:
        optimizer.zero_grad()
        mean.backward(square(model, inputs[rows], targets[rows]))
        noise.step()
        optimizer.step()
        balance.step()
        seen.append(rows)
    splits.append(list(sampler.latest_split))
    adaptive.epoch()
    splits.append(list(sampler.split))
    refused = ""
    if folder is not None:
        refused = said(lambda: pyps.torch.save(folder, model, optimizer, sampler, step=1, **state))
    return {"rank": rank, "seen": seen, "splits": splits, "said": refused}
