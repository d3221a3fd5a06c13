"""Define what the ranks of the tests of micro-batches do."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from ddp_jobs import DEVICE, IGNORED, Speaker, flat, mine, net, numbers, off, square, words
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from pyps.errors import InputError
from pyps.torch import GradientNoise, UnevenBatchSampler, UnevenSyncBatchNorm, weighted_hook
from pyps.torch.schedule import micro_batches

LARGEST_NORM = 0.1


def one_process(model: torch.nn.Module, batch: Any, clip: bool) -> torch.Tensor:
    """The gradient of the mean over all samples, clipped or not."""
    model.zero_grad()
    square(model, *batch).backward()
    if clip:
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)) > LARGEST_NORM
    return flat(p.grad for p in model.parameters())


def accumulated_errors(
    group: dist.ProcessGroup,
    batches: list[int],
    parts: list[int],
    clip: bool = False,
    scaled: bool = False,
    backend: str = "",
) -> list[float]:
    """By round, how far the gradient of hook.accumulate() is from that of one process, in fp64."""
    alone = net(torch.float64)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=scaled, init_scale=2.0**10)
    hook = weighted_hook(ddp, scaler=scaler)
    torch._dynamo.reset()
    model: Any = torch.compile(ddp, backend=backend) if backend else ddp
    part = parts[dist.get_rank(group)]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    errors = []
    for number, split in enumerate((batches, batches[1:] + batches[:1], [b + 5 for b in batches])):
        whole = numbers(number, sum(split), torch.float64)
        optimizer.zero_grad()
        for x, y in hook.accumulate([values[mine(split, group)] for values in whole], part):
            scaler.scale(square(model, x, y)).backward()
        scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), LARGEST_NORM)
        errors.append(off(flat(p.grad for p in ddp.parameters()), one_process(alone, whole, clip)))
        scaler.step(optimizer)
        scaler.update()
    return errors


def rounds_errors(group: dist.ProcessGroup, batches: list[int], parts: list[int]) -> list[float]:
    """The same for hook.rounds() over a loader whose sampler accumulates, with a shorter last round."""
    length = 2 * sum(batches) + 11
    inputs, targets = numbers(5, length, torch.float64)
    sampler = UnevenBatchSampler(length, batches, dist.get_rank(group), accumulate=parts, shuffle=False)
    alone = net(torch.float64)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    hook = weighted_hook(ddp, sampler)
    errors, begin = [], 0
    rounds = hook.rounds(DataLoader(TensorDataset(inputs, targets), batch_sampler=sampler))
    for size, micros in zip(sampler.sizes(), rounds, strict=True):
        ddp.zero_grad()
        for x, y in micros:
            square(ddp, x, y).backward()
        right = one_process(alone, (inputs[begin : begin + size], targets[begin : begin + size]), False)
        errors.append(off(flat(p.grad for p in ddp.parameters()), right))
        begin += size
    return errors


def token_rounds_errors(group: dist.ProcessGroup, batches: list[int], parts: int, said: bool) -> list[float]:
    """The same for a mean over targets, counted from forward() or said."""
    torch.manual_seed(0)
    alone = Speaker().double().to(DEVICE)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    hook = weighted_hook(ddp, count=None if said else lambda texts, targets: (targets != IGNORED).sum())
    errors = []
    for number in range(3):
        whole = words(number, sum(batches))
        ddp.zero_grad()
        for texts, targets in hook.accumulate([x[mine(batches, group)] for x in whole], parts):
            loss = ddp(texts, targets)
            if said:
                hook.set_weight(int((targets != IGNORED).sum()))
            loss.backward()
        right = flat(torch.autograd.grad(alone(*whole), list(alone.parameters())))
        errors.append(off(flat(p.grad for p in ddp.parameters()), right))
    return errors


def norm_rounds_error(group: dist.ProcessGroup, batches: list[int], parts: int, shares: bool) -> float:
    """With BatchNorm over all ranks' micro-batches: against one process with the same statistics.

    shares: in a loop of the script's own.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 4)]
    alone = torch.nn.Sequential(*layers).double().to(DEVICE)
    together = UnevenSyncBatchNorm.convert(copy.deepcopy(alone), group)
    ddp = DistributedDataParallel(together, process_group=group)
    hook = weighted_hook(ddp)
    whole = numbers(0, sum(batches), torch.float64)
    own = [x[mine(batches, group)] for x in whole]
    rows = len(own[0])
    if shares:
        for low, high in micro_batches(0, rows, parts):
            with nullcontext() if high == rows else ddp.no_sync():
                loss = square(ddp, *(x[low:high] for x in own))
                (loss * hook.share(high - low, rows)).backward()
    else:
        for x, y in hook.accumulate(own, parts):
            square(ddp, x, y).backward()
    starts = [sum(batches[:k]) for k in range(len(batches))]
    for number in range(parts):  # the number-th micro-batch of all ranks, as one process would see it
        cuts = [micro_batches(s, s + b, parts)[number] for s, b in zip(starts, batches, strict=True)]
        chosen = [k for low, high in cuts for k in range(low, high)]
        (square(alone, *(x[chosen] for x in whole)) * (len(chosen) / sum(batches))).backward()
    return off(flat(p.grad for p in ddp.parameters()), flat(p.grad for p in alone.parameters()))


def eval_mode_errors(group: dist.ProcessGroup, batches: list[int], parts: int) -> list[float]:
    """By round: in eval mode, then in train mode after a look in eval mode, then in eval mode again."""
    alone = net(torch.float64)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    hook = weighted_hook(ddp, count=lambda inputs: len(inputs))
    errors = []
    for number, trains in enumerate((False, True, False)):
        split = batches if number < 2 else batches[::-1]
        whole = numbers(number, sum(split), torch.float64)
        own = tuple(x[mine(split, group)] for x in whole)
        right = flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
        ddp.zero_grad()
        ddp.eval()
        if parts == 1:  # else DDP itself would take the first backward() under no_sync() for this one's
            ddp(own[0][:1])
        if parts == 1 and trains:  # forces of a validation
            seen = own[0][:1].clone().requires_grad_()
            torch.autograd.grad(ddp(seen).sum(), seen, create_graph=True)
        ddp.train(trains)
        for micro in [own] if parts == 1 else hook.accumulate(own, parts):
            square(ddp, *micro).backward()
        errors.append(off(flat(p.grad for p in ddp.parameters()), right))
    return errors


def most_errors(group: dist.ProcessGroup, batches: list[int], most: list[int], normed: bool) -> list[float]:
    """Return for micro-batches of at most so many samples, by rank, how far the gradient is off, and their
    number.
    """
    layers = [torch.nn.Linear(32, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)]
    alone = torch.nn.Sequential(*(layer for layer in layers if normed or layer is not layers[1])).double()
    alone = alone.to(DEVICE)
    own = copy.deepcopy(alone)
    own = UnevenSyncBatchNorm.convert(own, group) if normed else own
    ddp = DistributedDataParallel(own, process_group=group)
    hook = weighted_hook(ddp)
    rank, draws = dist.get_rank(group), torch.Generator().manual_seed(3)
    x, y = (torch.randn(sum(batches), n, generator=draws, dtype=torch.float64).to(DEVICE) for n in (32, 4))
    sizes = []
    for one, target in hook.accumulate((x[mine(batches, group)], y[mine(batches, group)]), most=most[rank]):
        sizes.append(len(one))
        square(ddp, one, target).backward()
    assert max(sizes) <= most[rank]
    if normed:  # statistics are of all ranks' micro-batches
        return [0.0, len(sizes)]
    square(alone, x, y).backward()
    return [off(*(flat(p.grad for p in net.parameters()) for net in (ddp, alone))), len(sizes)]


def said_alone(group: dist.ProcessGroup) -> str:
    """The same of loss / k on rank 1, whose micro-batches are unlike; on rank 0 they are alike."""
    return said_of(group, 28 - 2 * dist.get_rank(group), 4, "loss / k")


def said_of(group: dist.ProcessGroup, batch: int, parts: int, idiom: str) -> str:
    """Return what the hook says of a hand-written loop."""
    ddp = DistributedDataParallel(net(), process_group=group)
    hook = weighted_hook(ddp)
    inputs, targets = numbers(0, batch)
    try:
        if idiom == "accumulate":
            for x, y in hook.accumulate((inputs, targets), parts):
                square(ddp, x, y).backward()
            return "nothing"
        for low, high in micro_batches(0, batch, parts):
            with nullcontext() if high == batch else ddp.no_sync():
                loss = square(ddp, inputs[low:high], targets[low:high])
                if idiom == "share":
                    loss = loss * hook.share(high - low, batch)
                elif idiom == "share of the parts":
                    loss = loss * hook.share(1, parts + 1)
                else:
                    loss = loss / parts
                loss.backward()
    except InputError as error:
        return str(error)
    return "nothing"


def misused(group: dist.ProcessGroup) -> list[str]:
    """Return what accumulate(), rounds() and share() say of wrong use; the hook goes on exactly after it."""
    sampler = UnevenBatchSampler(40, [7, 6], dist.get_rank(group), accumulate=2, shuffle=False)
    alone = net(torch.float64)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    hook = weighted_hook(ddp, sampler)
    whole = numbers(0, 13, torch.float64)
    own = [x[mine([7, 6], group)] for x in whole]
    normed = torch.nn.Sequential(torch.nn.Linear(8, 4), UnevenSyncBatchNorm(4)).double().to(DEVICE)
    parts = UnevenBatchSampler(40, [7, 6], dist.get_rank(group), accumulate=[2, 1])
    unlike = weighted_hook(DistributedDataParallel(normed, process_group=group), parts)
    said = []

    def without_the_last() -> None:
        for number, (x, y) in enumerate(hook.accumulate(own, 3)):
            if number < 2:
                square(ddp, x, y).backward()

    def step_within() -> None:
        model = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
        for x, y in weighted_hook(model).accumulate(own, 3):
            model.zero_grad()
            square(model, x, y).backward()

    for wrong in (
        lambda: list(hook.accumulate(own, 0)),
        lambda: list(weighted_hook(DistributedDataParallel(net(), process_group=group)).rounds([])),
        lambda: list(hook.rounds([own, own])),
        lambda: [list(micros) for micros in hook.rounds([own, own, own])],
        lambda: hook.share(-1, 4),
        lambda: hook.share(5, 4),
        lambda: list(unlike.rounds([own])),
        lambda: list(unlike.accumulate(own, [2, 1])),
        lambda: list(unlike.accumulate(own, 7)),  # rank 1 has 6
        without_the_last,
        step_within,
    ):
        try:
            wrong()
            said.append("nothing")
        except InputError as error:
            said.append(str(error))
    ddp.zero_grad()
    for x, y in hook.accumulate(own, 3):
        square(ddp, x, y).backward()
        break  # leaves a pass behind that is never reduced
    ddp.zero_grad()
    for x, y in hook.accumulate(own, 3):
        square(ddp, x, y).backward()
    found = off(flat(p.grad for p in ddp.parameters()), one_process(alone, whole, False))
    return [*said, "exact" if found < 1e-12 else f"{found} off"]


def error_after_dropped(group: dist.ProcessGroup, batches: list[int]) -> float:
    """How far a gradient is off after a micro-batch whose gradients a library's loop has dropped."""
    alone = net(torch.float64)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    weighted_hook(ddp).passes.managed = True  # as adapters of libraries do, for the whole run
    whole = numbers(0, sum(batches), torch.float64)
    own = [x[mine(batches, group)] for x in whole]
    with ddp.no_sync():
        square(ddp, *(x[:3] for x in own)).backward()
    ddp.zero_grad()
    square(ddp, *own).backward()
    return off(flat(p.grad for p in ddp.parameters()), one_process(alone, whole, False))


def noise_scales(
    group: dist.ProcessGroup, batches: list[int], parts: int, scaled: bool, sums: bool, steps: int
) -> tuple[float | None, float]:
    """The measured noise scale of random batches at fixed parameters, and the exact one."""
    inputs, targets = numbers(3, 400, torch.float64)
    model = net(torch.float64)
    each = [
        flat(torch.autograd.grad(square(model, x[None], y[None]), list(model.parameters())))
        for x, y in zip(inputs, targets, strict=True)
    ]
    samples = torch.stack(each)
    exact = float(samples.var(0, correction=0).sum() / samples.mean(0).square().sum())
    ddp = DistributedDataParallel(model, process_group=group)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=scaled, init_scale=2.0**10)
    hook = weighted_hook(ddp, scaler=scaler, reduction="sum" if sums else "mean")
    noise = GradientNoise(hook, memory=0.999)
    draws = torch.Generator().manual_seed(7)
    for _ in range(steps):
        rows = torch.randint(400, (sum(batches),), generator=draws)[mine(batches, group)]
        ddp.zero_grad()
        for x, y in hook.accumulate([inputs[rows], targets[rows]], parts):
            scaler.scale(square(ddp, x, y) * (len(x) if sums else 1)).backward()
        noise.step()
    state = noise.state_dict()
    noise.load_state_dict(state)
    return noise.scale, exact


def rounds_trained(group: dist.ProcessGroup, how: str) -> int | None:
    """The rounds that a sampler takes for trained after two whose batches are cut in three."""
    sampler = UnevenBatchSampler(60, [6, 4], dist.get_rank(group))
    ddp = DistributedDataParallel(net(torch.float64), process_group=group)
    count = (lambda x: len(x)) if how == "counted" else None
    hook = weighted_hook(ddp, sampler, count=count)
    for number, rows in enumerate(sampler):
        x, y = (values[: len(rows)] for values in numbers(number, 10, torch.float64))
        if how == "own":
            for k in range(3):
                own = slice(k, k + 1) if k < 2 else slice(2, None)
                with ddp.no_sync() if k < 2 else nullcontext():
                    part = square(ddp, x[own], y[own])
                    (part * hook.share(len(x[own]), len(x))).backward()
        else:
            for a, b in hook.accumulate((x, y), 3):
                square(ddp, a, b).backward()
        ddp.zero_grad()
        if number == 1:
            break
    return sampler.trained
