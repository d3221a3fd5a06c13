"""Define what the ranks of the FSDP2 tests do: each function runs on all ranks of a group, with equal
arguments.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_balance_jobs import BATCH, EmulatedTimer, best_seconds, pace, profile_of
from ddp_jobs import IGNORED, Speaker, flat, mine, net, numbers, off, square, words
from ddp_misuse_jobs import said_by
from ddp_more_jobs import added, normed
from device import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyps.torch
from pyps.torch import (
    GradientNoise,
    Moves,
    Rebalancer,
    UnevenBatchSampler,
    UnevenSyncBatchNorm,
    agreed_split,
    check_gradient,
    weighted_hook,
)
from pyps.torch.schedule import micro_batches
from pyps.torch.waiting import ComputeTimer

LENGTH = 46  # of the data set of the runs that stop and go on: the last round of an epoch is short


def mesh_of(group: dist.ProcessGroup, replicas: int) -> DeviceMesh:
    """All ranks in one dimension, or in two: replicas of shards."""
    if replicas == 1:
        return DeviceMesh.from_group(group, DEVICE.type)
    ranks = torch.arange(dist.get_world_size(group)).view(replicas, -1)
    return DeviceMesh(DEVICE.type, ranks, mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def gradient(model: Any) -> torch.Tensor:
    return flat(p.grad.full_tensor() for p in model.parameters())


def gradient_errors(
    group: dist.ProcessGroup,
    batches: list[int],
    parts: int | list[int],
    replicas: int,
    compiled: bool = False,
    most: list[int] | None = None,
) -> list[float]:
    """By round, how far the gradient is from one process's; batches change places, then are larger.

    most: samples of a micro-batch by rank, in place of parts.
    """
    cut: dict[str, Any] = {"parts": parts} if most is None else {"most": most[dist.get_rank(group)]}
    alone = net(torch.float64)
    model = sharded(copy.deepcopy(alone), mesh_of(group, replicas))
    hook = weighted_hook(model)
    trained: Any = torch.compile(model, backend="aot_eager") if compiled else model
    longer = [batch + 7 * k + 3 for k, batch in enumerate(batches)]
    errors = []
    for number, split in enumerate((batches, batches, batches[1:] + batches[:1], longer)):
        model.train(number % 2 == 1)
        whole = numbers(number, sum(split), torch.float64)
        own = tuple(x[mine(split, group)] for x in whole)
        right = flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
        model.zero_grad()
        for micro in [own] if parts == 1 else hook.accumulate(own, **cut):
            square(trained, *micro).backward()
        errors.append(off(gradient(model), right))
        with torch.no_grad():  # a pass that trains nothing counts for nothing
            model(own[0])
    return errors


def errors_after_rounds_left(
    group: dist.ProcessGroup, batches: list[int], parts: int | list[int], replicas: int
) -> list[float]:
    """How far gradients are off after rounds that a script leaves, each time before another micro-batch's
    backward(). replicas: none under DDP.
    """
    alone = net(torch.float64)
    model: Any = copy.deepcopy(alone)
    if replicas:
        model = sharded(model, mesh_of(group, replicas))
    else:
        model = DistributedDataParallel(model, process_group=group)
    hook = weighted_hook(model)
    count = parts if isinstance(parts, int) else parts[dist.get_rank(group)]
    errors = []
    for left in range(count):
        whole = numbers(left, sum(batches), torch.float64)
        own = tuple(x[mine(batches, group)] for x in whole)
        right = flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
        for number, micro in enumerate(hook.accumulate(own, parts)):
            if number == left:
                break
            square(model, *micro).backward()
        for cut in (True, False):
            model.zero_grad()  # those before the round that was left, too
            for micro in hook.accumulate(own, parts) if cut else [own]:
                square(model, *micro).backward()
            found = gradient(model) if replicas else flat(p.grad for p in model.parameters())
            errors.append(off(found, right))
    return errors


def error_after_a_failed_pass(group: dist.ProcessGroup, batches: list[int]) -> float:
    """How far a gradient is off after a backward pass that failed when some of it was reduced."""
    alone = net(torch.float64)
    model = sharded(copy.deepcopy(alone), mesh_of(group, 1))
    weighted_hook(model)
    if not hasattr(model, "reset_iter_state"):
        return 0.0  # before torch 2.13 FSDP2 does not go on

    def fail(*_: Any) -> None:
        raise ArithmeticError

    failing = model[1].register_full_backward_hook(fail)
    for number, split in enumerate((batches, batches[::-1])):
        whole = numbers(number, sum(split), torch.float64)
        own = tuple(x[mine(split, group)] for x in whole)
        try:
            square(model, *own).backward()
        except ArithmeticError:
            failing.remove()
            model.reset_iter_state()
            model.zero_grad()
    right = flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
    return off(gradient(model), right)


class Parts(nn.Module):
    """Gives its loss, as some models do, and the scores that it comes from."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        scores = self.inner(inputs)
        return {"loss": nn.functional.mse_loss(scores, targets), "scores": 1.0 * scores}


def by_parts(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found = model(inputs, targets)
    scores = found["scores"]
    scores *= 2.0
    return found["loss"] + scores.square().mean()  # type: ignore[no-any-return]


def error_of_outputs(group: dist.ProcessGroup, batches: list[int]) -> float:
    """With a loss from within the model and one from its scores, changed in place."""
    alone = Parts(net(torch.float64))
    model = sharded(copy.deepcopy(alone), mesh_of(group, 1))
    weighted_hook(model)
    whole = numbers(0, sum(batches), torch.float64)
    by_parts(alone, *whole).backward()
    by_parts(model, *(x[mine(batches, group)] for x in whole)).backward()
    return off(gradient(model), flat(p.grad for p in alone.parameters()))


def token_errors(group: dist.ProcessGroup, batches: list[int], parts: list[int], said: bool) -> list[float]:
    """The same for a mean over targets, weighted by them; then the first rank has none, then no rank has."""
    torch.manual_seed(0)
    alone = Scores().double()
    model = sharded(copy.deepcopy(alone), mesh_of(group, 1))
    hook = weighted_hook(model, count=None if said else lambda texts, targets: (targets != IGNORED).sum())
    errors = []
    for number in range(4):
        texts, targets = words(number, sum(batches))
        if number >= 2:
            targets[: batches[0] if number == 2 else None] = IGNORED
        own = [x[mine(batches, group)] for x in (texts, targets)]
        right = flat(torch.autograd.grad(by_targets(alone, texts, targets), list(alone.parameters())))
        model.zero_grad()
        for micro in hook.accumulate(own, parts) if max(parts) > 1 else [own]:
            loss = by_targets(model, *micro)
            if said:
                hook.set_weight(int((micro[1] != IGNORED).sum()))
            loss.backward()
        if number == 3:
            assert not gradient(model).any()
        else:
            errors.append(off(gradient(model), right))
    return errors


class Scores(Speaker):
    """Tokens [n, TOKENS] -> scores of the next words."""

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(torch.tanh(self.embed(words)))
        return scores


def by_targets(model: Any, texts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    scores = model(texts, targets).flatten(0, 1)
    return nn.functional.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED)


def norm_error(group: dist.ProcessGroup, batches: list[int]) -> float:
    """With BatchNorm over all ranks."""
    alone = normed()
    model = sharded(UnevenSyncBatchNorm.convert(copy.deepcopy(alone), group), mesh_of(group, 1))
    weighted_hook(model)
    whole = numbers(0, sum(batches), torch.float64)
    square(alone, *whole).backward()
    square(model, *(x[mine(batches, group)] for x in whole)).backward()
    return off(gradient(model), flat(p.grad for p in alone.parameters()))


def summed_errors(
    group: dist.ProcessGroup, batches: list[int], parts: int, normalized: bool = False
) -> list[float]:
    """With a loss that is a sum, in micro-batches that each reduce, or with BatchNorm over all ranks."""
    alone: nn.Module = normed() if normalized else net(torch.float64)
    model = sharded(UnevenSyncBatchNorm.convert(copy.deepcopy(alone), group), mesh_of(group, 1))
    hook = weighted_hook(model, reduction="sum")
    errors = []
    for number, split in enumerate((batches, batches[::-1])):
        whole = numbers(number, sum(split), torch.float64)
        for trained in (alone, model):
            trained.zero_grad()
        (added(alone, *whole) / sum(split)).backward()
        for micro in hook.accumulate([x[mine(split, group)] for x in whole], parts):
            added(model, *micro).backward()
        errors.append(off(gradient(model), flat(p.grad for p in alone.parameters())))
    return errors


def from_ddp(group: dist.ProcessGroup, folder: Path, split: list[int]) -> bool:
    """Return whether a sharded model and its optimizer go on from a DDP run's checkpoint, and DDP from
    theirs.
    """
    whole = net(torch.float64)
    runs = [
        DistributedDataParallel(copy.deepcopy(whole), process_group=group),
        sharded(copy.deepcopy(whole), mesh_of(group, 1)),
        DistributedDataParallel(whole, process_group=group),
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in runs]
    batch = [x[mine(split, group)] for x in numbers(0, sum(split), torch.float64)]
    parameters = []
    for step, (model, optimizer) in enumerate(zip(runs, optimizers, strict=True)):
        weighted_hook(model)
        if step:
            pyps.torch.load(folder, model, optimizer, group=group)
        for other in range(step, 1 if step == 0 else 2):  # the third only loads
            optimizer.zero_grad()
            square(model, *batch).backward()
            optimizer.step()
            pyps.torch.save(folder, model, optimizer, step=other + 1, group=group)
        parameters.append(flat(getattr(p, "full_tensor", p.detach)() for p in model.parameters()))
    moments = optimizers[2].state_dict()["state"][0]["exp_avg"]
    return torch.equal(parameters[1], parameters[2]) and bool(moments.any())


def misused(group: dist.ProcessGroup) -> list[str]:
    """Return what each misuse says."""
    mesh = mesh_of(group, 1)
    model = sharded(net(), mesh)
    hook = weighted_hook(model)
    batch = numbers(0, 4)
    model.set_requires_gradient_sync(False)
    said = [said_by(lambda: square(model, *batch).backward())]
    model.set_requires_gradient_sync(True)
    model.zero_grad()
    said.append(said_by(lambda: weighted_hook(model)))
    said.append(said_by(lambda: weighted_hook(sharded(net(), mesh), wire="int8")))
    said.append(said_by(lambda: list(hook.accumulate(batch, 0))))
    said.append(said_by(lambda: list(hook.rounds([]))))
    said.append(said_by(lambda: GradientNoise(model)))

    def without_the_last(parts: int | list[int]) -> None:
        for number, micro in enumerate(hook.accumulate(batch, parts)):
            if number == 0:
                square(model, *micro).backward()

    said += [said_by(partial(without_the_last, parts)) for parts in ([2, 2], 2)]
    return said


def train(
    group: dist.ProcessGroup,
    folder: Path,
    steps: int,
    split: list[int],
    replicas: int = 1,
    save_at: int = 0,
    loads: bool = False,
) -> dict[str, Any]:
    """Train up to a step, or on from a checkpoint; the whole parameters and the samples of this rank."""
    model = sharded(net(torch.float64), mesh_of(group, replicas))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank = dist.get_rank(group)
    sampler = UnevenBatchSampler(LENGTH, split, rank, seed=3, accumulate=[1, 2, *[1] * (len(split) - 2)])
    hook = weighted_hook(model, sampler)
    state: dict[str, Any] = {"hook": hook, "rebalancer": Rebalancer(sampler, hook, moves=Moves(window=3))}
    inputs, targets = numbers(0, LENGTH, torch.float64)
    step, taken = 0, []
    if loads:
        kept = pyps.torch.load(folder, model, optimizer, sampler, group=group, **state)
        assert kept is not None
        step = kept["note"]
    while step < steps:
        done = 0
        for passes in hook.rounds(sampler):
            optimizer.zero_grad()
            taken.append([])
            for chosen in passes:
                square(model, inputs[chosen], targets[chosen]).backward()
                taken[-1] += chosen
            optimizer.step()
            step, done = step + 1, done + 1
            if step == save_at:
                more = {"rounds": done, "group": group, "note": step}
                pyps.torch.save(folder, model, optimizer, sampler, **more, **state)
            if step == steps:
                break
        else:
            sampler.set_epoch(sampler.epoch + 1)
    return {"model": [p.full_tensor().detach() for p in model.parameters()], "taken": taken}


def cause_reported(group: dist.ProcessGroup, batches: list[int], case: str) -> tuple[str, float, bool]:
    """The cause that check_gradient names, the error, and whether it left the gradients alone."""
    model = sharded(net(), mesh_of(group, 1))
    batch = [x[mine(batches, group)] for x in numbers(0, sum(batches))]
    if case != "plain":
        weighted_hook(model, reduction="sum" if case == "sum, said" else "mean")
    loss = added if "sum" in case else square
    loss(model, *batch).backward()
    before = gradient(model)
    checked = check_gradient(model, loss, batch, batches)
    return checked.cause.name, checked.error, torch.equal(before, gradient(model))


def balanced(
    group: dist.ProcessGroup, speeds: tuple[float, ...], slows_at: int, steps: int, profiled: bool, most: int
) -> dict[str, Any]:
    """One epoch, in equal batches at first or as profiled; rank 0 takes twice as long from a step on."""
    rank = dist.get_rank(group)
    cost = pace(speeds[rank], False)
    profile = profile_of(cost) if profiled else None
    cap = most if rank == 0 else None
    sampler = UnevenBatchSampler(
        BATCH * steps + 20, agreed_split(BATCH, profile, max_batch=cap, group=group), rank
    )
    model = sharded(net(), mesh_of(group, 1))
    balance = Rebalancer(sampler, weighted_hook(model, sampler), profile, max_batch=cap)
    timer = balance.timer = EmulatedTimer(cost)  # type: ignore[assignment]
    seen, seconds = [], []
    for step, rows in enumerate(sampler):
        timer.cost = pace(speeds[rank], rank == 0 and step >= slows_at)
        inputs = torch.tensor(rows)[:, None].float().expand(-1, 8).to(DEVICE) / len(sampler)
        square(model, inputs, inputs[:, :4]).backward()
        seen += rows
        seconds.append(timer.cost.seconds(len(rows)))
        balance.step()
    history = [str(change) for change in balance.history]
    best = [best_seconds(speeds, slowed) for slowed in (False, True)]
    return {
        "seen": seen,
        "seconds": seconds[:steps],
        "history": history,
        "best": best,
        "split": sampler.split,
    }


class Slow(torch.autograd.Function):
    """The same values, later; so is their gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


def timed(group: dist.ProcessGroup, seconds: float, steps: int, between: float) -> list[float]:
    """Return what the timer gives for each step of two passes, with so many seconds between these; rank 0
    is slow between its layers, where the others wait for it.
    """
    model = sharded(net(), mesh_of(group, 1))
    if dist.get_rank(group) == 0:
        for layer in model:
            layer.register_forward_hook(lambda module, args, output: Slow.apply(output, seconds))
    timer, inputs = ComputeTimer(weighted_hook(model)), torch.ones(2, 8, device=DEVICE)
    for step in range(steps):
        timer.start()
        square(model, inputs, inputs[:, :4]).backward()
        time.sleep(between)
        square(model, inputs, inputs[:, :4]).backward()
        timer.finish(step)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    finished = timer.finished()
    assert [step for step, _ in finished] == list(range(steps))
    return [seconds for _, seconds in finished]


def noise_found(group: dist.ProcessGroup, batches: list[int], parts: int | list[int], replicas: int) -> Any:
    """Noise and signal by hooks of DDP and of FSDP2 in the same rounds, and those of the micro-batches."""
    alone = net(torch.float64)
    count = dist.get_world_size(group)
    models: list[Any] = [
        DistributedDataParallel(copy.deepcopy(alone), process_group=group),
        sharded(copy.deepcopy(alone), mesh_of(group, replicas)),
    ]
    hooks = [weighted_hook(model) for model in models]
    noises = [GradientNoise(hook, 0.5) for hook in hooks]
    own_parts = parts if isinstance(parts, int) else parts[dist.get_rank(group)]
    for number in range(4):
        whole = numbers(number, sum(batches), torch.float64)
        batch = [x[mine(batches, group)] for x in whole]
        for model, hook, noise, cut in zip(models, hooks, noises, (own_parts, parts), strict=True):
            model.zero_grad()
            if number == 2:  # a check in between leaves no trace
                check_gradient(model, square, batch)
            for micro in [batch] if parts == 1 else hook.accumulate(batch, cut):
                square(model, *micro).backward()
            noise.step()
    pieces = [
        (low, high)
        for rank in range(count)
        for low, high in micro_batches(
            sum(batches[:rank]), sum(batches[: rank + 1]), parts if isinstance(parts, int) else 1
        )
    ]
    averaged = [noise.state_dict()["sums"][:2] for noise in noises]
    return averaged, pooled(alone, sum(batches), pieces, 4), noises[1].batch


def pooled(alone: Any, count: int, pieces: list[tuple[int, int]], rounds: int) -> list[float]:
    """Noise and signal by their definition: from the gradients of these pieces of each round."""
    sums = torch.zeros(2, dtype=torch.float64)
    for number in range(rounds):
        inputs, targets = numbers(number, count, torch.float64)
        parameters = list(alone.parameters())
        whole = flat(torch.autograd.grad(square(alone, inputs, targets), parameters))
        spread = 0.0
        for low, high in pieces:
            one = flat(torch.autograd.grad(square(alone, inputs[low:high], targets[low:high]), parameters))
            spread += (high - low) * float((one - whole).square().sum())
        noise = spread / (len(pieces) - 1)
        signal = float(whole.square().sum()) - noise / count
        sums = 0.5 * sums + 0.5 * torch.tensor([noise, signal], dtype=torch.float64)
    return sums.tolist()  # type: ignore[no-any-return]
