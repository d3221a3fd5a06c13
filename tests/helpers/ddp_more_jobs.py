"""Define what the ranks of the tests of loss_scale, UnevenSyncBatchNorm, check_gradient and looks at a
model do.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from ddp_jobs import flat, mine, net, numbers, off, square
from device import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pyps.torch import UnevenSyncBatchNorm, check_gradient, loss_scale, weighted_hook
from pyps.torch.schedule import micro_batches


def scaled_errors(
    group: dist.ProcessGroup, batches: list[int], parts: list[int], sharded: bool
) -> list[float]:
    """How far the gradient is with loss_scale and no hook, on plain DDP or on FSDP2, with micro-batches."""
    alone, together = net(), net()
    if sharded:
        mesh = DeviceMesh.from_group(group, DEVICE.type)
        for layer in together:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        model: Any = fully_shard(together, mesh=mesh)
    else:
        model = DistributedDataParallel(together, process_group=group)
    errors = []
    for number in range(3):
        whole = numbers(number, sum(batches))
        own = [x[mine(batches, group)] for x in whole]
        right = flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
        model.zero_grad()
        cuts = micro_batches(0, len(own[0]), parts[dist.get_rank(group)])
        for low, high in cuts:
            total = None if len(cuts) == 1 and max(parts) == 1 else sum(batches)
            with _held_back(model, sharded, high == len(own[0])):
                loss = square(model, *(x[low:high] for x in own))
                (loss * loss_scale(high - low, total, group)).backward()
        found = [p.grad.full_tensor() if sharded else p.grad for p in model.parameters()]
        errors.append(off(flat(found), right))
    return errors


def _held_back(model: Any, sharded: bool, last: bool) -> Any:
    if sharded:
        model.set_requires_gradient_sync(last)
        return nullcontext()
    return nullcontext() if last else model.no_sync()


@dataclass
class Found:
    """A model's output; some set the second field later."""

    values: torch.Tensor
    later: Any = field(init=False)


class Table(nn.Module):
    """A part that gets no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return 2 * self.values


class Slopes(nn.Module):
    """Outputs, and a part of the slopes of these within the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = net(torch.float64), Table()

    def forward(self, inputs: torch.Tensor) -> Found:
        inputs = inputs.detach().requires_grad_()
        found = self.body(inputs)
        (slopes,) = torch.autograd.grad(found.sum(), inputs, create_graph=True)
        return Found(found + slopes[:, :4] + self.table())


def errors_after_looks(group: dist.ProcessGroup, batches: list[int], look: str) -> list[float]:
    """How far the gradient is off when a script has looked at the model with other samples before."""
    alone = Slopes().to(DEVICE)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    weighted_hook(ddp)
    errors = []
    for number in range(2):
        whole = numbers(number, sum(batches), torch.float64)
        own = tuple(x[mine(batches, group)] for x in whole)
        right = flat(torch.autograd.grad(by_values(alone, *whole), list(alone.parameters())))
        ddp.zero_grad()
        if look == "eval":  # differentiates also where nothing is trained
            ddp.module.eval()(own[0][:1])
            ddp.train()
        elif look == "table":
            ddp.module.table()
        else:
            by_sample(ddp.module.body, own[0])
        by_values(ddp, *own).backward()
        errors.append(off(flat(p.grad for p in ddp.parameters()), right))
    return errors


def by_values(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs).values, targets)


def by_sample(model: nn.Module, inputs: torch.Tensor) -> Any:
    """Each sample's gradient."""
    parameters = {name: values.detach() for name, values in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (one[None],)).sum()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, inputs)


def normed(dtype: torch.dtype = torch.float64, momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 12),
        nn.BatchNorm1d(12, momentum=momentum),
        nn.Tanh(),
        nn.Unflatten(1, (3, 2, 2)),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 4),
    ).to(DEVICE, dtype)


def norm_errors(
    group: dist.ProcessGroup, batches: list[int], way: str, steps: int, momentum: float | None
) -> tuple[float, float, float]:
    """After some steps: how far parameters, running means and running variances are from one process's.

    way: "hook", "sum" (of losses), or "scale" (loss_scale on plain DDP).
    """
    alone = normed(momentum=momentum)
    together = UnevenSyncBatchNorm.convert(copy.deepcopy(alone), group)
    ddp = DistributedDataParallel(together, process_group=group, broadcast_buffers=False)
    if way != "scale":
        weighted_hook(ddp, reduction="mean" if way == "hook" else "sum")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (alone, together)]
    for step in range(steps):
        whole = numbers(step, sum(batches), torch.float64)
        own = tuple(x[mine(batches, group)] for x in whole)
        for optimizer in optimizers:
            optimizer.zero_grad()
        square(alone, *whole).backward()
        loss = square(ddp, *own)
        if way == "scale":
            loss = loss * loss_scale(len(own[0]), group=group)
        (loss * len(own[0]) if way == "sum" else loss).backward()
        for optimizer in optimizers:
            optimizer.step()
    means, variances = (
        off(flat(m[1] for m in running(together, name)), flat(m[1] for m in running(alone, name)))
        for name in ("running_mean", "running_var")
    )
    alone.eval(), together.eval()
    inputs = numbers(0, 5, torch.float64)[0]
    assert off(together(inputs), alone(inputs)) < 1e-9
    return off(flat(together.parameters()), flat(alone.parameters())), means, variances


def running(model: nn.Module, name: str) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in model.named_buffers() if key.endswith(name)]


def cause_reported(group: dist.ProcessGroup, batches: list[int], case: str) -> tuple[str, float, bool]:
    """The cause that check_gradient names, the error, and whether it left model and gradients alone."""
    model = normed(torch.float32) if "norm" in case else net()
    if case == "synced norm":
        model = UnevenSyncBatchNorm.convert(model, group)
    if case == "dropout":
        model.append(nn.Dropout(0.5))
    ddp = DistributedDataParallel(model, process_group=group)
    if case != "plain":
        weighted_hook(ddp, reduction="sum" if case == "sum, said" else "mean")
    batch = [x[mine(batches, group)] for x in numbers(0, sum(batches))]
    if case == "targets":
        there = torch.arange(len(batch[1]), device=DEVICE) % (dist.get_rank(group) + 1) == 0
        batch[1] = torch.where(there[:, None], batch[1], torch.nan)
    loss = {"targets": targeted, "sum": added, "sum, said": added}.get(case, square)
    loss(ddp, *batch).backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = flat(p.grad for p in model.parameters())
    checked = check_gradient(ddp, loss, batch, batches)
    after = model.state_dict()
    same = all(torch.equal(v, after[k]) for k, v in before.items())
    assert str(checked).startswith(f"batches {'/'.join(map(str, batches))}: ")
    same = same and torch.equal(gradients, flat(p.grad for p in model.parameters()))
    return checked.cause.name, checked.error, same


def targeted(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over the targets that are there."""
    there = ~targets.isnan()
    return ((model(inputs) - targets.nan_to_num()) ** 2)[there].mean()


def added(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((model(inputs) - targets) ** 2).sum()
