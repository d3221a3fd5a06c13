"""Define what the ranks of the DDP tests do on a GPU."""

from __future__ import annotations

import copy
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_tools import flat, mine, net, numbers, off, square
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyps.torch
from pyps.torch import GlobalMean, Moves, Rebalancer, UnevenBatchSampler, agreed_split
from pyps.torch.compute_timer import ComputeTimer

GPU = torch.device("cuda")
BUSY_CYCLES = 2_000_000  # a millisecond or so


def on_gpu(group: dist.ProcessGroup, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return DistributedDataParallel(net().to(GPU, dtype), process_group=group, **options)


def part(number: int, batches: list[int], group: Any, dtype: torch.dtype = torch.float32) -> Any:
    return tuple(x[mine(batches, group)].to(GPU) for x in numbers(number, sum(batches), dtype))


def nccl() -> dist.ProcessGroup:
    """A group of this rank alone."""
    torch.cuda.set_device(0)
    alone: Any = dist.new_group([dist.get_rank()], backend="nccl", use_local_synchronization=True)
    return alone  # type: ignore[no-any-return]


def gradient_errors(group: dist.ProcessGroup, batches: list[int], dtype: str) -> list[float]:
    """Return by round how far the gradient is from that of one process on this GPU; batches change places."""
    kind = getattr(torch, dtype)
    ddp, alone = on_gpu(group, kind), net().to(GPU, kind)
    mean, errors = GlobalMean(ddp), []
    for number, split in enumerate((batches, batches, batches[1:] + batches[:1])):
        whole = [x.to(GPU) for x in numbers(number, sum(split), kind)]
        right = flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
        ddp.zero_grad()
        mean.backward(square(ddp, *part(number, split, group, kind)))
        errors.append(off(flat(p.grad for p in ddp.parameters()), right))
    return errors


def all_on_nccl(group: dist.ProcessGroup, folder: Path) -> float:
    """Return how far the parameters with wire int8, which one rank does not use, are from those with fp32."""
    alone = nccl()
    models = []
    for wire in ("same", "int8"):
        sampler = UnevenBatchSampler(40, agreed_split(8, group=alone), 0)
        ddp = on_gpu(alone)
        mean = GlobalMean(ddp, sampler, wire=wire)
        balance = Rebalancer(sampler, mean, moves=Moves(window=3))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for number, chosen in enumerate(sampler):
            inputs, targets = (x.to(GPU) for x in numbers(number, len(chosen)))
            optimizer.zero_grad()
            mean.backward(square(ddp, inputs, targets))
            optimizer.step()
            balance.step()
        pyps.torch.save(folder / wire, ddp, optimizer, sampler, group=alone, mean=mean, balance=balance)
        other = on_gpu(alone)
        theirs = torch.optim.AdamW(other.parameters(), lr=0.01)
        mean = GlobalMean(other, sampler, wire=wire)
        state = {"mean": mean, "balance": Rebalancer(sampler, mean, moves=Moves(window=3))}
        assert pyps.torch.load(folder / wire, other, theirs, sampler, group=alone, **state) is not None
        assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), other.parameters(), strict=True))
        models.append(flat(ddp.parameters()))
    return off(*models)


def waits(group: dist.ProcessGroup, wire: Any) -> str:
    """Return what waited for the device in the later steps; "" if nothing did."""
    alone = nccl()
    ddp = on_gpu(alone)
    sampler = UnevenBatchSampler(10_000, [8], 0)
    mean = GlobalMean(ddp, sampler, wire=wire)
    balance = Rebalancer(sampler, mean, moves=Moves(window=3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    inputs, targets = part(0, [8], alone)
    try:
        for step in range(12):
            if step == 3:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            mean.backward(square(ddp, inputs, targets))
            optimizer.step()
            balance.step()
    except RuntimeError:
        return traceback.format_exc()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def on_the_device(group: dist.ProcessGroup, batches: list[int]) -> list[float]:
    """Return the gradients' errors; divisors lie on the GPU, and the first rank has no target."""
    ddp, alone = on_gpu(group, torch.float64), net().to(GPU, torch.float64)
    mean, errors = GlobalMean(ddp), []
    for number in range(3):
        inputs, targets = (x.to(GPU) for x in numbers(number, sum(batches), torch.float64))
        mask = (targets > 0).double()
        mask[: batches[0]] *= number > 0

        def loss(model: Any, rows: slice, mask: Any = mask, of: Any = (inputs, targets)) -> torch.Tensor:
            squares = (model(of[0][rows]) - of[1][rows]).square()
            return (squares * mask[rows]).sum() / mask[rows].sum()

        right = flat(torch.autograd.grad(loss(alone, slice(None)), list(alone.parameters())))
        ddp.zero_grad()
        mean.backward(loss(ddp, mine(batches, group)))
        errors.append(off(flat(p.grad for p in ddp.parameters()), right))
    return errors


def timed(group: dist.ProcessGroup) -> tuple[list[float], float, list[int]]:
    """The timer's seconds of three steps, the seconds that a part of each took at least, and the labels."""
    ddp = on_gpu(group)
    mean = GlobalMean(ddp)
    timer = ComputeTimer(mean)
    batch = part(0, [5, 3], group)
    spent, known = [], []
    for label in range(3):
        timer.start()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(BUSY_CYCLES)
        end.record()
        mean.backward(square(ddp, *batch))
        timer.finish(label)
        spent.append((begin, end))
    torch.cuda.synchronize()
    known += timer.finished()
    assert timer.finished() == []
    least = min(begin.elapsed_time(end) / 1000 for begin, end in spent)
    return [seconds for _, seconds in known], least, [label for label, _ in known]


def scaled(group: dist.ProcessGroup, wire: Any) -> tuple[list[bool], float, float]:
    """Return which steps were taken, the scale in the end, and how far the parameters are from fp32's."""
    batches = [12, 4]
    ddp, alone = on_gpu(group), net().to(GPU)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    mean = GlobalMean(ddp, wire=wire, scaler=scaler)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (ddp, alone)]
    taken = []
    for step in range(5):
        bad = step == 2
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            inputs, targets = part(step, batches, group)
            loss = nn.functional.mse_loss(ddp(inputs).float(), targets)
        if bad and dist.get_rank(group) == 1:
            loss = loss + torch.inf * ddp.module[0].weight.sum()
        mean.backward(scaler.scale(loss), n=len(inputs))
        before = flat(ddp.parameters())
        scaler.step(optimizers[0])
        scaler.update()
        taken.append(not torch.equal(before, flat(ddp.parameters())))
        if not bad:
            square(alone, *(x.to(GPU) for x in numbers(step, sum(batches)))).backward()
            optimizers[1].step()
    return taken, scaler.get_scale(), off(flat(ddp.parameters()), flat(alone.parameters()))


def dropout_goes_on(group: dist.ProcessGroup, folder: Path) -> bool:
    """Return whether the draws after loading are those after saving, also without torch.cuda.set_device()."""
    ddp = on_gpu(group)
    torch.manual_seed(dist.get_rank(group))
    torch.rand(3, device=GPU)
    pyps.torch.save(folder, ddp, step=1, group=group)
    after = torch.rand(5, device=GPU)
    assert pyps.torch.load(folder, copy.deepcopy(ddp.module), group=group) is not None
    return torch.equal(torch.rand(5, device=GPU), after)
