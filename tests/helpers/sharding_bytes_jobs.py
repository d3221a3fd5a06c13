"""Define the jobs of the tests that count the bytes of sharded runs: each runs on all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peak_bytes import peak_bytes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyps.torch
from pyps.formats import read_plan
from pyps.sharding import bytes_held
from pyps.sharding.modules import run_of
from pyps.torch import GlobalMean

WIDTH, BLOCKS = 128, 10  # of layers()


def planned_bytes(group: dist.ProcessGroup, plan: str, stage: int, views: bool = True) -> dict[str, int]:
    """Return this rank's bytes after a step of a run that follows a plan, and the most in a step."""
    kept: list[Any] = []

    def make() -> Callable[[], None]:
        model: Any = layers()
        if stage == 3:
            for block in model:
                pyps.torch.shard(block, plan, group)
            pyps.torch.shard(model, plan, group)
        else:
            model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views)
        one = torch.optim.AdamW(model.parameters())
        if stage == 1:
            pyps.torch.shard_optimizer(one, plan, group)
        kept[:] = model, one
        worker = read_plan(Path(plan)).workers[group.rank()]
        return planned_step(model, one, GlobalMean(model), worker.batch, worker.accumulation)

    most = []
    for _ in range(2):  # what another thread frees is not counted
        kept.clear()
        most.append(peak_bytes(make))
    return {**bytes_held(*kept), "peak": min(most)}


def planned_step(model: nn.Module, one: Any, mean: Any, batch: int, parts: int = 1) -> Callable[[], None]:
    """Return a step; without a GlobalMean it keeps gradients in place, as a profile's memory has them."""

    def step() -> None:
        one.zero_grad(set_to_none=mean is not None)
        x = torch.full((batch, WIDTH), 0.1)
        if mean is None:
            model(x).square().mean().backward()
        else:
            for (own,) in mean.accumulate((x,), parts):
                mean.backward(model(own).square().mean())
        one.step()

    return step


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def held_bytes(group: dist.ProcessGroup, shares: list[float]) -> dict[str, float]:
    """Return this rank's bytes between steps, in proportion to one process: parameters, gradients, states."""
    model: Any = layers()
    for block in model:
        pyps.torch.shard(block, shares, group)
    pyps.torch.shard(model, shares, group)
    one = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    one.step()
    whole = sum(vector.layout.count for vector in run_of(model).vectors) * 4

    def nbytes(tensors: Any) -> float:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values()) / whole

    states = [value for values in one.state.values() for value in values.values() if value.ndim]
    return {
        "parameters": nbytes(model.parameters()),
        "gradients": nbytes(p.grad for p in model.parameters()),
        "states": nbytes(states) / 2,
        "gathered": nbytes(vector.vector for vector in run_of(model).vectors),
    }


def state_bytes(group: dist.ProcessGroup, shares: list[float]) -> float:
    """Return this rank's bytes of the state of AdamW, in proportion to those of one process."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    one = pyps.torch.shard_optimizer(torch.optim.AdamW(model.parameters()), shares, group)
    model(torch.ones(2, 64)).sum().backward()
    one.step()
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for values in one.state.values()
        for value in values.values()
        if value.ndim
    }
    return sum(held.values()) / (2 * sum(p.nbytes for p in model.parameters()))


def reported(group: dist.ProcessGroup, plan: str) -> dict[str, Any]:
    """Return what a run in two lines, whose shares are a plan's, says of memory."""
    data = torch.utils.data.TensorDataset(torch.ones(640, WIDTH))
    model = layers()
    one = torch.optim.AdamW(model.parameters())
    ddp, loader, step = pyps.torch.uneven(model, data, 16, optimizer=one, shares=plan)
    for (x,) in loader:
        one.zero_grad()
        step.backward(ddp(x).square().mean())
        step()
    return {
        "copied": not ddp.gradient_as_bucket_view,
        "report": step.balance.report(),
        "held": [state.held_bytes for state in step.balance.states],
        "scalars": step.balance.scalars(),
    }
