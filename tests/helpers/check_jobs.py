"""Define what the ranks of check_gradient's tests do."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from ddp_tools import flat, mine, net, numbers, square
from device import DEVICE
from norm_jobs import normed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.torch import GlobalMean, UnevenSyncBatchNorm, check_gradient


def cause_reported(group: dist.ProcessGroup, batches: list[int], case: str) -> tuple[str, float, bool]:
    """The cause that check_gradient names, the error, and whether it left model and gradients alone."""
    model: nn.Module = normed() if "norm" in case else net(torch.float64)
    if case == "synced norm":
        model = UnevenSyncBatchNorm.convert(model, group)
    if case == "dropout":
        model = nn.Sequential(model, nn.Dropout(0.5))
    ddp = DistributedDataParallel(model, process_group=group)
    mean = None if case in ("plain", "sum") else GlobalMean(ddp, reduction="sum" if "sum" in case else "mean")
    batch = [x[mine(batches, group)] for x in numbers(0, sum(batches), torch.float64)]
    if "targets" in case:
        there = torch.arange(len(batch[1]), device=DEVICE) % (dist.get_rank(group) + 1) == 0
        batch[1] = torch.where(there[:, None], batch[1], torch.nan)
    loss = targeted if "targets" in case else added if "sum" in case else square
    n = len(batch[0]) if case == "targets by samples" else None
    if mean is None:
        loss(ddp, *batch).backward()  # type: ignore[no-untyped-call]
    else:
        mean.backward(loss(ddp, *batch), n)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = flat(p.grad for p in model.parameters())
    checked = check_gradient(ddp, loss, batch, batches, n=n)
    after = model.state_dict()
    same = all(torch.equal(v, after[k]) for k, v in before.items())
    assert str(checked).startswith(f"batches {'/'.join(map(str, batches))}: ")
    same = same and torch.equal(gradients, flat(p.grad for p in model.parameters()))
    return checked.cause.name, checked.error, same


def mean_dropped(group: dist.ProcessGroup) -> str:
    """Return what check_gradient says of a model whose GlobalMean is no more."""
    ddp = DistributedDataParallel(net(torch.float64), process_group=group)
    GlobalMean(ddp)
    gc.collect()
    try:
        check_gradient(ddp, square, numbers(0, 8, torch.float64))
    except InputError as error:
        return str(error)
    return ""


def targeted(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over the targets that are there."""
    there = ~targets.isnan()
    return ((model(inputs) - targets.nan_to_num()) ** 2)[there].mean()


def added(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = ((model(inputs) - targets) ** 2).sum()
    return found
