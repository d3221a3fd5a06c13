"""Define what the ranks of the tests of DDP checkpoints do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import pyps.torch
from pyps.errors import InputError
from pyps.torch import GlobalMean, Moves, Rebalancer, UnevenBatchSampler

SPLIT_OF_FOUR = [3, 1]
LENGTH = 46  # of the data set: the last round of an epoch is short
DRAWS = torch.Generator().manual_seed(0)
INPUTS = torch.randn(LENGTH, 6, generator=DRAWS).to(DEVICE)
TARGETS = torch.randn(LENGTH, 3, generator=DRAWS).to(DEVICE)


def make(
    group: dist.ProcessGroup, split: list[int], wire: str
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, UnevenBatchSampler, dict[str, Any]]:
    """A model with dropout and BatchNorm, and what belongs to its training."""
    torch.manual_seed(5)
    layers = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
    model = DistributedDataParallel(nn.Sequential(*layers).to(DEVICE), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = UnevenBatchSampler(LENGTH, split, dist.get_rank(group), seed=3)
    mean = GlobalMean(model, sampler, wire=wire)
    return (
        model,
        optimizer,
        sampler,
        {
            "mean": mean,
            "rebalancer": Rebalancer(sampler, mean, moves=Moves(window=3)),
            "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 9], gamma=0.5),
        },
    )


def train(
    group: dist.ProcessGroup,
    folder: Path,
    steps: int,
    split: list[int],
    wire: str = "same",
    save_at: int = 0,
    loads: bool = False,
) -> dict[str, Any]:
    """Train up to a step, or on from a checkpoint; the model's state and the samples of this rank."""
    model, optimizer, sampler, state = make(group, split, wire)
    step, kept = 0, None
    if loads:
        torch.manual_seed(1234 + dist.get_rank(group))
        kept = pyps.torch.load(folder, model, optimizer, sampler, group=group, **state)
        assert kept is not None
        step = kept["note"]["steps"]
    taken: list[list[int]] = []
    rows: Any = range(LENGTH)
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=list)  # which draws a random number, too
    while step < steps:
        for chosen in loader:
            optimizer.zero_grad()
            state["mean"].backward(nn.functional.mse_loss(model(INPUTS[chosen]), TARGETS[chosen]))
            optimizer.step()
            state["mean"].end_step()
            state["scheduler"].step()
            taken.append(chosen)
            step += 1
            if step == save_at:
                note = {"steps": step, "of": (1.5, None)}
                pyps.torch.save(folder, model, optimizer, sampler, group=group, note=note, **state)
            if step == steps:
                break
    return {
        "model": {name: value.clone() for name, value in model.module.state_dict().items()},
        "lr": state["scheduler"].get_last_lr(),
        "taken": taken,
        "kept": kept,
        "split": sampler.split,
    }


def load_into(group: dist.ProcessGroup, folder: Path, width: int) -> str:
    """The error of loading into a model of another width; "" if there is none to load."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, width)).to(DEVICE), process_group=group)
    try:
        return str(pyps.torch.load(folder, model, group=group) or "")
    except pyps.InputError as error:
        return str(error)


def plain_values(group: dist.ProcessGroup, folder: Path) -> dict[str, Any] | None:
    """Return what load() gives of values without a state, called as save() was."""
    model = DistributedDataParallel(nn.Linear(3, 3).to(DEVICE), process_group=group)
    values: dict[str, Any] = {"best": {"loss": 0.5, "epoch": 3}, "note": "warm"}
    pyps.torch.save(folder, model, step=7, group=group, **values)
    return pyps.torch.load(folder, model, group=group, **values)


def saved_at_the_end(group: dist.ProcessGroup, folder: Path) -> tuple[int, int]:
    """Return where a run goes on whose loop has counted all rounds of an epoch by itself."""
    model = DistributedDataParallel(nn.Linear(6, 3).to(DEVICE), process_group=group)
    sampler = UnevenBatchSampler(LENGTH, [5, 3], dist.get_rank(group))
    pyps.torch.save(folder, model, sampler=sampler, rounds=sampler.rounds, group=group)
    later = UnevenBatchSampler(LENGTH, [4, 4], dist.get_rank(group))
    pyps.torch.load(folder, model, sampler=later, group=group)
    return later.epoch, later.batch


def save_where_it_fails(group: dist.ProcessGroup, folder: Path) -> str:
    model = DistributedDataParallel(nn.Linear(3, 3).to(DEVICE), process_group=group)
    try:
        return str(pyps.torch.save(folder, model, step=1, group=group))
    except pyps.InputError as error:
        return str(error)


def save_where_something_else_fails(group: dist.ProcessGroup, folder: Path) -> str:
    """The first rank has an unforeseen error; then all go on."""
    model = DistributedDataParallel(nn.Linear(3, 3).to(DEVICE), process_group=group)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 0:
            patch.setattr("pyps.torch.checkpoint.fill_folder", lambda *_: 1 / 0)
        try:
            pyps.torch.save(folder, model, step=1, group=group)
        except (pyps.InputError, ZeroDivisionError) as error:
            said = f"{type(error).__name__}: {error}"
    count = torch.ones(())
    dist.all_reduce(count, group=group)
    assert float(count) == dist.get_world_size(group)
    return said


def tied(group: dist.ProcessGroup, folder: Path) -> bool:
    """Return whether two layers with one weight, and its optimizer, come back as they were."""
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(2)]
    layers[1].weight = layers[0].weight
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    mean = GlobalMean(model)
    optimizer = torch.optim.AdamW(model.parameters())
    mean.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
    pyps.torch.save(folder, model, optimizer, step=1, group=group)
    before = layers[0].weight.detach().clone()
    with torch.no_grad():
        layers[0].weight.zero_()
    pyps.torch.load(folder, model, optimizer, group=group)
    return torch.equal(layers[1].weight, before) and layers[0].weight is layers[1].weight


def divided_optimizer(group: dist.ProcessGroup, folder: Path) -> bool:
    """Return whether a run with ZeroRedundancyOptimizer goes on bit for bit."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    mean = GlobalMean(model)
    made = [
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.1)
        for _ in range(2)
    ]

    def step(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        optimizer.zero_grad()
        mean.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    step(made[0])
    pyps.torch.save(folder, model, made[0], step=1, group=group)
    right = step(made[0])
    pyps.torch.load(folder, model, made[1], group=group)
    return all(torch.equal(*pair) for pair in zip(step(made[1]), right, strict=True))


def saved_after(group: dist.ProcessGroup, folder: Path, counted: str, workers: int) -> tuple[int, int] | str:
    """The samples that were trained, and those of the checkpoint, in mid-epoch; or what refused it.

    counted: by a "GlobalMean", by a "Rebalancer", or by nothing.
    """
    sampler = UnevenBatchSampler(LENGTH, SPLIT_OF_FOUR, dist.get_rank(group))
    model = DistributedDataParallel(nn.Linear(6, 3).to(DEVICE), process_group=group)
    mean = GlobalMean(model, sampler)
    balance = Rebalancer(sampler, mean) if counted == "Rebalancer" else None
    for number, rows in enumerate(DataLoader(range(LENGTH), batch_sampler=sampler, num_workers=workers), 1):
        mean.backward(model(INPUTS[rows]).square().mean())
        if balance is not None:
            balance.step()
        elif counted == "GlobalMean":
            mean.end_step()
        if number == 3:
            try:
                pyps.torch.save(folder, model, None, sampler, step=1, group=group)
            except InputError as error:
                return str(error)
            return number * sum(SPLIT_OF_FOUR), int(sampler.state_dict()["position"])
    return "no third round"
