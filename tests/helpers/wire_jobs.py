"""Define what the ranks of the wire's tests do: plain DDP of equal weights, in another type."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from ddp_tools import flat, mine, net, numbers, off, square
from device import DEVICE
from torch.nn.parallel import DistributedDataParallel

from pyps.torch.wire import GradientWire, install_wire, quantized_sum
from pyps.worker.device.quantize import INT4, INT8

Group = dist.ProcessGroup


def half_errors(group: Group, wire: Any, options: dict[str, Any]) -> list[float]:
    """Return how far gradients sent in halves are from DDP's own, by step."""
    ranks = dist.get_world_size(group)
    plain = DistributedDataParallel(net(), process_group=group)
    ddp = DistributedDataParallel(net(), process_group=group, **options)
    install_wire(ddp, wire)
    errors = []
    for number in range(3):
        own = [x[mine([4] * ranks, group)] for x in numbers(number, 4 * ranks)]
        for model in (plain, ddp):
            model.zero_grad()
            square(model, *own).backward()
        errors.append(off(flat(p.grad for p in ddp.parameters()), flat(p.grad for p in plain.parameters())))
    return errors


def feedback_left(group: Group, wire: Any, reload: bool, scale: float, static: bool) -> tuple[float, float]:
    """After 6 rounds: how far sent + kept is from put in; the same without kept.

    Buckets are small and cut anew after the first round; with `reload`, another hook goes on from the state.
    scale: that of a GradScaler, which halves in the middle.
    """
    ranks = dist.get_world_size(group)
    alone, scaler = net(width=300), torch.amp.GradScaler(DEVICE.type, init_scale=scale)
    scaler.scale(torch.zeros((), device=DEVICE))  # torch makes the scale when it is first used

    def wired(megabytes: float) -> tuple[DistributedDataParallel, GradientWire]:
        options: dict[str, Any] = {"bucket_cap_mb": megabytes, "static_graph": static}
        ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group, **options)
        return ddp, install_wire(ddp, wire, scaler)

    ddp, hook = wired(0.1)
    sent = put_in = torch.zeros(1)
    for number in range(6):
        whole = numbers(number, 4 * ranks)
        put_in = put_in + flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
        ddp.zero_grad()
        unit = scaler.get_scale()
        (square(ddp, *(x[mine([4] * ranks, group)] for x in whole)) * unit).backward()
        sent = sent + flat(p.grad / unit for p in ddp.parameters())
        if number == 2:
            scaler.update(unit / 2)
            if reload:
                state = copy.deepcopy(hook.state_dict())
                ddp, hook = wired(0.2)
                hook.load_state_dict(state)
    residuals = hook.state_dict()["residuals"]
    kept = flat(residuals[name] for name, _ in alone.named_parameters()).to(DEVICE)
    dist.all_reduce(kept, group=group)
    return off(sent + kept.cpu(), put_in), off(sent, put_in)


def one_bad_value(group: Group, bits: int) -> tuple[int, bool, bool]:
    """Rank 1 holds a NaN in block 1: how many sums are NaN, all in that block, and the same on all ranks."""
    codec = INT8 if bits == 8 else INT4
    values = torch.randn(2000, generator=torch.Generator().manual_seed(dist.get_rank(group))).to(DEVICE)
    if dist.get_rank(group) == 1:
        values[codec.block + 3] = torch.nan
    total, _ = quantized_sum(codec, values, group)
    bad = total.isnan()
    copies: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(copies, total.nan_to_num(7), group=group)
    inside = bool(bad[codec.block : 2 * codec.block].all())
    return int(bad.sum()), inside, all(torch.equal(c, copies[0]) for c in copies)


def kept_after_a_bad_step(group: Group) -> bool:
    """Return whether a step with an infinite loss on one rank leaves the kept errors as they were."""
    ddp = DistributedDataParallel(net(), process_group=group)
    hook = install_wire(ddp, "int8")
    inputs, targets = numbers(dist.get_rank(group), 5)
    square(ddp, inputs, targets).backward()
    before = {name: values.clone() for name, values in hook.state_dict()["residuals"].items()}
    (square(ddp, inputs, targets) * (torch.inf if dist.get_rank(group) == 1 else 1)).backward()
    after = hook.state_dict()["residuals"]
    return all(torch.equal(values, after[name]) for name, values in before.items())
