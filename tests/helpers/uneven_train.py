"""Ranks that train with uneven(), compared with one process, stopped and resumed in mid-epoch.

Prints JSON: the worst relative errors of gradients and parameters, the samples of each epoch, and how far
the parameters of the run that was resumed are from those of the whole one.
"""

from __future__ import annotations

import copy
import json
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyps.errors import InputError
from pyps.torch import uneven

SAMPLES, GLOBAL_BATCH, SPLIT = 50, 12, [8, 4]
mse = nn.functional.mse_loss


def dataset() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=draws, dtype=torch.float64)
    y = torch.randn(SAMPLES, 3, generator=draws, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), x, y + torch.linspace(-2, 2, SAMPLES)[:, None])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def made() -> tuple[Any, ...]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return *uneven(model, dataset(), GLOBAL_BATCH, optimizer=optimizer), optimizer


def flat(model: nn.Module, gradients: bool = False) -> torch.Tensor:
    return torch.cat([(p.grad if gradients else p.detach()).flatten() for p in model.parameters()])


def train(epochs: int, folder: str, stops_at: int = 0, resumes: bool = False) -> dict[str, Any]:
    """stops_at: after so many steps, saved; 0: it trains to the end."""
    ddp, loader, step, optimizer = made()
    step.sampler.replan(SPLIT)
    if resumes:
        step.load(folder)
    alone = copy.deepcopy(ddp.module)
    whole = torch.optim.AdamW(alone.parameters(), lr=0.01)
    whole.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    worst, seen, steps = [0.0, 0.0], [], 0
    for _ in range(step.sampler.epoch, epochs):
        seen.append([])
        for rows, x, y in loader:
            every: list[Any] = [None, None]
            dist.all_gather_object(every, (rows, x, y))
            all_rows, all_x, all_y = (torch.cat(one) for one in zip(*every, strict=True))
            seen[-1] += all_rows.tolist()
            for one in (whole, optimizer):
                one.zero_grad()
            mse(alone(all_x), all_y).backward()
            step.backward(mse(ddp(x), y))
            for k, gradients in enumerate((True, False)):
                found, right = flat(ddp.module, gradients), flat(alone, gradients)
                worst[k] = max(worst[k], float((found - right).norm() / right.norm()))
            whole.step()
            step()
            steps += 1
            if steps == stops_at:
                step.save(folder)
                return {}
    return {"worst": worst, "seen": seen, "parameters": flat(ddp.module)}


def refused(**options: Any) -> str:
    model = network()
    chosen = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "dataset": dataset(), **options}
    try:
        uneven(model, chosen.pop("dataset"), GLOBAL_BATCH, **chosen)
    except InputError as error:
        return str(error)
    return "nothing"


def stepped(before: bool, after: bool, rate: float = 0.01) -> str:
    """Return what a loop meets with optimizer.step() before or after step(), beside a scheduler."""
    ddp, loader, step, optimizer = made()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.step()  # without a gradient yet, as some loops do for their scheduler
    try:
        for _, x, y in loader:
            optimizer.zero_grad()
            step.backward(mse(ddp(x), y))
            for group in optimizer.param_groups:
                group["lr"] = rate
            if before:
                optimizer.step()
            step()
            if after:
                optimizer.step()
            schedule.step()
    except InputError as error:
        return str(error)
    return "nothing"


def with_another_loader() -> str:
    """Return what a loop hears that still goes over the loader it had before."""
    ddp, _, step, _ = made()
    try:
        for _, x, y in DataLoader(dataset(), 4):
            step.backward(mse(ddp(x), y))
    except InputError as error:
        return str(error)
    return "nothing"


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def main() -> None:
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp(prefix="pyps-uneven-")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    found = train(3, folder[0])
    train(3, folder[0], stops_at=7)
    resumed = train(3, folder[0], resumes=True)
    foreign = torch.optim.SGD(network().parameters(), lr=0.1)
    said = [refused(batch_size=4), refused(dataset=Stream()), refused(optimizer=foreign), refused(plan="p")]
    said += [refused(dataset=DataLoader(dataset(), 4)), with_another_loader()]
    twice = [stepped(True, False), stepped(False, True), stepped(True, True, 0.0), stepped(False, False)]
    if dist.get_rank() == 0:
        whole = found.pop("parameters")
        apart = float((whole - resumed["parameters"]).norm() / whole.norm())
        found["worst"] += resumed["worst"]
        print(json.dumps({**found, "apart": apart, "refused": said, "stepped": twice, "folder": folder[0]}))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
