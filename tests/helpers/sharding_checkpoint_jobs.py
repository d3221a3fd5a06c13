"""Define the jobs of the tests that save and load sharded runs: each runs on all ranks of a group."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from ddp_tools import flat, off
from sharding_jobs import OPTIMIZERS, Net, all_step, gathered_flat, groups, sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pyps.torch
from pyps.errors import InputError
from pyps.sharding import load_state_dict, part_state_dict


def _made(kind: str, group: dist.ProcessGroup, shares: list[float]) -> tuple[Any, torch.optim.Optimizer]:
    """A model in a stage, and its optimizer."""
    if kind in ("shard", "tied"):
        model: Any = sharded(Net("plain" if kind == "shard" else kind), shares, group)
        return model, OPTIMIZERS["AdamW"](groups(model))
    model = Net()
    if kind == "fully_shard":
        for module in (*model.blocks, model):
            mesh = DeviceMesh.from_group(group, "cpu")
            fully_shard(module, mesh=mesh, ignored_params={model.scale})  # it takes no scalar
    one = OPTIMIZERS["AdamW"](groups(model))
    if kind == "shard_optimizer":
        pyps.torch.shard_optimizer(one, shares, group)
    return model, one


def through_save(
    group: dist.ProcessGroup, folder: str, kind: str, shares: list[float], steps: list[int]
) -> list[float]:
    """Train between two steps in a stage, from a checkpoint of pyps and to one: the whole parameters."""
    model, one = _made(kind, group, shares)
    found = pyps.torch.load(folder, model, one, group=group)
    assert (0 if found is None else found["step"]) == steps[0]
    for step in range(*steps):
        all_step(model, one, step)
    pyps.torch.save(folder, model, one, step=steps[1], group=group)
    return _numbers_of(model, kind)


def _numbers_of(model: nn.Module, kind: str) -> list[float]:
    """Return the whole parameters, on all ranks."""
    if kind == "fully_shard":
        return flat([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]).tolist()
    return (gathered_flat(model) if kind in ("shard", "tied") else flat(model.parameters())).tolist()


def through_checkpoint(
    group: dist.ProcessGroup, folder: str, kind: str, shares: list[float], steps: list[int]
) -> list[float]:
    """Train between two steps in a stage, from a checkpoint of torch's and to one: the whole parameters."""
    from torch.distributed import checkpoint as dcp

    model, one = _made(kind, group, shares)
    is_plain = kind in ("plain", "fully_shard")

    def parts() -> dict[str, Any]:
        optimizer = one.state_dict() if is_plain else part_state_dict(one)
        return {"model": model.state_dict(), "optimizer": optimizer}

    if steps[0]:
        if is_plain:
            all_step(model, one, 0)  # makes a state, to load into
        state = parts()
        dcp.load(state, checkpoint_id=f"{folder}/{steps[0]}", process_group=group)
        load_state_dict(model, state["model"]) if not is_plain else model.load_state_dict(state["model"])
        one.load_state_dict(state["optimizer"]) if is_plain else load_state_dict(one, state["optimizer"])
    else:
        parts()  # one to load into: the optimizer still begins with its first step
    for step in range(*steps):
        all_step(model, one, step)
    dcp.save(parts(), checkpoint_id=f"{folder}/{steps[1]}", process_group=group)
    return _numbers_of(model, kind)


class Images(nn.Module):
    """[n, 3, 4, 4] -> [n, 2]; its weights lie with their channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 5, 3), nn.Linear(5, 2)
        self.to(memory_format=torch.channels_last, dtype=torch.float64)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x).mean((2, 3)))
        return found


def other_memory_orders(group: dist.ProcessGroup, folder: str) -> float:
    """Return how far weights and states with channels last are off after a checkpoint, sharded and plain."""
    x = torch.arange(96.0, dtype=torch.float64).sin().view(2, 3, 4, 4)
    found = []
    for is_sharded, loads in ((True, False), (True, True), (False, True), (False, None)):
        model: Any = Images()
        if is_sharded:
            pyps.torch.shard(model, [0.4, 0.6] if loads else [0.7, 0.3], group)
        one = torch.optim.AdamW(model.parameters(), lr=0.1)
        if loads:
            pyps.torch.load(folder, model, one, group=group)
        for _ in range(2 if loads is not None else 4):
            model(x).square().sum().backward()
            one.step()
            one.zero_grad()
        if loads is False:
            pyps.torch.save(folder, model, one, step=1, group=group)
        found.append(gathered_flat(model) if is_sharded else flat(model.parameters()))
    return max(off(found[1], found[3]), off(found[2], found[3]))


def own_state_dict(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return what an optimizer's and a model's own state dicts say, and whether wholes and parts load."""
    model, right = sharded(Net(), [0.7, 0.3], group), Net()
    pair: list[tuple[Any, Any]] = [(m, OPTIMIZERS["AdamW"](groups(m))) for m in (model, right)]
    for m, one in pair:
        all_step(m, one, 0)
    state, whole = pair[0][1].state_dict(), pair[1][1].state_dict()
    shapes = [
        {k: {n: tuple(v.shape) for n, v in values.items()} for k, values in one["state"].items()}
        for one in (state, whole)
    ]
    said = []
    for one in (state, model.state_dict()):
        try:
            torch.save(one, io.BytesIO())
        except InputError as error:
            said.append(str(error))
    for loaded in (whole, state):
        pair[0][1].load_state_dict(loaded)
    for m, one in pair:
        all_step(m, one, 1)
    far = off(gathered_flat(model), flat(right.parameters()))
    return {"alike": shapes[0] == shapes[1], "said": said, "off": far}
