"""Define what the ranks of the DDP tests do on a GPU."""

from __future__ import annotations

import copy
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_jobs import flat, mine, net, numbers, off, square
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyps.torch
from pyps.torch import Moves, Rebalancer, UnevenBatchSampler, agreed_split, loss_scale, weighted_hook
from pyps.torch import ddp_hook as hook_module
from pyps.torch.waiting import ComputeTimer

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
    """By round, how far the gradient is from that of one process on this GPU; batches change places."""
    kind = getattr(torch, dtype)
    ddp, alone = on_gpu(group, kind), net().to(GPU, kind)
    weighted_hook(ddp)
    errors = []
    for number, split in enumerate((batches, batches, batches[1:] + batches[:1])):
        whole = [x.to(GPU) for x in numbers(number, sum(split), kind)]
        right = flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
        ddp.zero_grad()
        square(ddp, *part(number, split, group, kind)).backward()
        errors.append(off(flat(p.grad for p in ddp.parameters()), right))
    return errors


def all_on_nccl(group: dist.ProcessGroup, folder: Path) -> float:
    """How far the parameters with wire int8, which one rank does not use, are from those with fp32."""
    alone = nccl()
    models = []
    for wire in ("same", "int8"):
        sampler = UnevenBatchSampler(40, agreed_split(8, group=alone), 0)
        ddp = on_gpu(alone)
        hook = weighted_hook(ddp, sampler, wire=wire)
        balance = Rebalancer(sampler, hook, moves=Moves(window=3))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for number, chosen in enumerate(sampler):
            inputs, targets = (x.to(GPU) for x in numbers(number, len(chosen)))
            optimizer.zero_grad()
            (square(ddp, inputs, targets) * loss_scale(3, group=alone)).backward()
            optimizer.step()
            balance.step()
        pyps.torch.save(folder / wire, ddp, optimizer, sampler, group=alone, hook=hook, balance=balance)
        other = on_gpu(alone)
        theirs = torch.optim.AdamW(other.parameters(), lr=0.01)
        hook = weighted_hook(other, sampler, wire=wire)
        state = {"hook": hook, "balance": Rebalancer(sampler, hook, moves=Moves(window=3))}
        assert pyps.torch.load(folder / wire, other, theirs, sampler, group=alone, **state) is not None
        assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), other.parameters(), strict=True))
        models.append(flat(ddp.parameters()))
    return off(*models)


def waits(group: dist.ProcessGroup, wire: Any) -> str:
    """Return what waited for the device in the later steps; "" if nothing did."""
    alone = nccl()
    ddp = on_gpu(alone)
    sampler = UnevenBatchSampler(10_000, [8], 0)
    hook = weighted_hook(ddp, sampler, wire=wire)
    balance = Rebalancer(sampler, hook, moves=Moves(window=3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    inputs, targets = part(0, [8], alone)
    try:
        for step in range(12):
            if step == 3:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            square(ddp, inputs, targets).backward()
            optimizer.step()
            balance.step()
    except RuntimeError:
        return traceback.format_exc()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def goes_on(group: dist.ProcessGroup) -> bool:
    """Return whether a bucket is weighed on a stream of its own, so that backward does not wait for W."""
    alone = nccl()
    ddp = on_gpu(alone)
    hook = weighted_hook(ddp)
    streams: dict[str, Any] = {}
    hook.on_ready.append(lambda: streams.update(backward=torch.cuda.current_stream()))
    multiplied = hook_module.multiply

    def multiply(*arguments: Any) -> None:
        streams["weighed"] = torch.cuda.current_stream()
        multiplied(*arguments)

    hook_module.multiply = multiply
    try:
        for _ in range(2):
            square(ddp, *part(0, [8], alone)).backward()
    finally:
        hook_module.multiply = multiplied
    return bool(streams["weighed"] != streams["backward"])


def timed(group: dist.ProcessGroup) -> tuple[list[float], float, list[int]]:
    """The timer's seconds of three steps, the seconds that a part of each took at least, and the labels."""
    ddp = on_gpu(group)
    timer = ComputeTimer(weighted_hook(ddp))
    batch = part(0, [5, 3], group)
    spent, known = [], []
    for label in range(3):
        timer.start()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(BUSY_CYCLES)
        end.record()
        square(ddp, *batch).backward()
        timer.finish(label)
        spent.append((begin, end))
    torch.cuda.synchronize()
    known += timer.finished()
    assert timer.finished() == []
    least = min(begin.elapsed_time(end) / 1000 for begin, end in spent)
    return [seconds for _, seconds in known], least, [label for label, _ in known]


def scaled(group: dist.ProcessGroup, wire: Any) -> tuple[list[bool], float, float]:
    """Which steps were taken, the scale in the end, and how far the parameters are from fp32's."""
    batches = [12, 4]
    ddp, alone = on_gpu(group), net().to(GPU)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    weighted_hook(ddp, wire=wire, scaler=scaler)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (ddp, alone)]
    taken = []
    for step in range(5):
        bad = step == 2
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            inputs, targets = part(step, batches, group)
            loss = nn.functional.mse_loss(ddp(inputs).float(), targets)
        scaler.scale(loss * (torch.inf if bad and dist.get_rank(group) == 1 else 1.0)).backward()
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
