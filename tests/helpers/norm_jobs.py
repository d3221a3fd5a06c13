"""Define what the ranks of UnevenSyncBatchNorm's tests do: train, beside one process with all samples."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from ddp_tools import flat, mine, numbers, off, square
from device import DEVICE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.torch import GlobalMean, UnevenSyncBatchNorm

Group = dist.ProcessGroup


def normed(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 12),
        nn.BatchNorm1d(12, momentum=momentum),
        nn.Tanh(),
        nn.Unflatten(1, (3, 2, 2)),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 4),
    ).to(DEVICE, torch.float64)


def wrapped(group: Group, model: nn.Module, **options: Any) -> tuple[DistributedDataParallel, GlobalMean]:
    ddp = DistributedDataParallel(
        UnevenSyncBatchNorm.convert(copy.deepcopy(model), group), process_group=group, **options
    )
    return ddp, GlobalMean(ddp)


def training_errors(
    group: Group, batches: list[int], momentum: float | None, late: bool
) -> tuple[float, float, float]:
    """After 30 steps: how far parameters, running means and running variances are from one process's.

    late: the layers are converted when DDP and GlobalMean are made already.
    """
    alone = normed(momentum)
    if late:
        ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
        mean = GlobalMean(ddp)
        UnevenSyncBatchNorm.convert(ddp, group)
    else:
        ddp, mean = wrapped(group, alone, broadcast_buffers=False)
    together = ddp.module
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (alone, together)]
    for step in range(30):
        whole = numbers(step, sum(batches), torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        square(alone, *whole).backward()
        mean.backward(square(ddp, *(x[mine(batches, group)] for x in whole)))
        mean.end_step()
        for optimizer in optimizers:
            optimizer.step()
    errors = [off(flat(together.parameters()), flat(alone.parameters()))]
    for name in ("running_mean", "running_var"):
        both = [flat(v for key, v in m.named_buffers() if key.endswith(name)) for m in (together, alone)]
        errors.append(off(*both))
    inputs = numbers(0, 5, torch.float64)[0]
    assert off(together.eval()(inputs), alone.eval()(inputs)) < 1e-9
    return errors[0], errors[1], errors[2]


def without_targets(group: Group, batches: list[int]) -> float:
    """The first rank has no targets: its loss weighs nothing, but its samples are normalised."""
    alone = normed()
    ddp, mean = wrapped(group, alone)
    inputs, targets = numbers(1, sum(batches), torch.float64)
    labels = targets.argmax(1)
    labels[: batches[0]] = -100
    torch.nn.functional.cross_entropy(alone(inputs), labels).backward()
    own = mine(batches, group)
    mean.backward(torch.nn.functional.cross_entropy(ddp(inputs[own]), labels[own]))
    return off(flat(p.grad for p in ddp.parameters()), flat(p.grad for p in alone.parameters()))


def micro_batched(group: Group, parts: list[list[int]]) -> float:
    """Each rank's micro-batches have sizes of their own; those of one pass are normalised together."""
    alone = normed()
    ddp, mean = wrapped(group, alone)
    rank, passes = dist.get_rank(group), len(parts[0])
    total = sum(map(sum, parts))
    for k in range(passes):
        sizes = [own[k] for own in parts]
        whole = numbers(k, sum(sizes), torch.float64)
        (square(alone, *whole) * sum(sizes) / total).backward()
        first = sum(sizes[:rank])
        with ddp.no_sync() if k < passes - 1 else nullcontext():
            mean.backward(square(ddp, *(x[first : first + sizes[rank]] for x in whole)))
    return off(flat(p.grad for p in ddp.parameters()), flat(p.grad for p in alone.parameters()))


def converted_too_late(group: Group) -> str:
    """Return what convert() says after a step, of layers that have trained by each rank's own statistics."""
    ddp = DistributedDataParallel(normed(), process_group=group)
    mean = GlobalMean(ddp)
    mean.backward(square(ddp, *numbers(0, 4, torch.float64)))
    try:
        UnevenSyncBatchNorm.convert(ddp, group)
    except InputError as error:
        return str(error)
    return "converted"
