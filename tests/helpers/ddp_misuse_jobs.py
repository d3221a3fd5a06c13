"""Define what the ranks of the tests of misuse do: each call ends in an error that names the rank and the
cause.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from ddp_balance_jobs import EmulatedTimer
from ddp_jobs import Speaker, flat, mine, net, numbers, off, square, words
from device import DEVICE
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from pyps.errors import PypsError
from pyps.solver import Line
from pyps.torch import Rebalancer, UnevenBatchSampler, agreed_split, loss_scale, weighted_hook

SPLIT = [3, 2]


def in_new_pair(job: Callable[..., Any]) -> Callable[..., Any]:
    """Run by four ranks: the job runs on the first two, in a new group, which an error may leave unusable."""

    @wraps(job)
    def run(group: dist.ProcessGroup, *arguments: Any) -> Any:
        pair = dist.new_group([0, 1])
        return job(pair, *arguments) if dist.get_rank(group) < 2 else None

    return run


def said_by(call: Callable[[], Any]) -> str:
    """The error of a call, or nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except PypsError as error:
            return f"{type(error).__name__}: {error}"
    return ""


class Training:
    """A rank's model, sampler and hook."""

    def __init__(self, group: dist.ProcessGroup, samples: int = 60) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.sampler = UnevenBatchSampler(samples, SPLIT, self.rank)
        self.ddp = DistributedDataParallel(net(), process_group=self.group)
        self.hook = weighted_hook(self.ddp, self.sampler)

    def run(self, step: Callable[[], Any], rounds: int = 8) -> None:
        """Train some rounds; what step() does ends each."""
        for rows in list(self.sampler)[:rounds]:
            inputs = torch.tensor(rows, device=DEVICE)[:, None].float().expand(-1, 8)
            square(self.ddp, inputs, inputs[:, :4]).backward()
            step()


@in_new_pair
def steps(group: dist.ProcessGroup, calls: list[int]) -> tuple[str, int]:
    """Return what is said if ranks call Rebalancer.step() some times after each gradient; the calls until
    then.
    """
    training = Training(group)
    balance = Rebalancer(training.sampler, training.hook)

    def step() -> None:
        for _ in range(calls[training.rank]):
            balance.step()

    return said_by(lambda: training.run(step)), balance.steps


@in_new_pair
def unlike_data(group: dist.ProcessGroup, samples: list[int]) -> str:
    """Return what is said if the ranks' data sets have unlike lengths."""
    training = Training(group, samples[dist.get_rank(group)])
    return said_by(lambda: training.run(lambda: None))


@in_new_pair
def unread_profile(group: dist.ProcessGroup, profiles: list[str | None]) -> tuple[str, str]:
    """Return what agreed_split and Rebalancer say if a rank's profile cannot be read."""
    training = Training(group)
    profile = profiles[training.rank]
    return (
        said_by(lambda: agreed_split(64, profile, group=training.group)),
        said_by(lambda: Rebalancer(training.sampler, training.hook, profile)),
    )


@in_new_pair
def least_batch(group: dist.ProcessGroup, accumulate: int, normalized: bool) -> int:
    """The least batch that a Rebalancer leaves a rank, whose model may have batch normalization."""
    layers = [torch.nn.BatchNorm1d(2)] if normalized else []
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), *layers), process_group=group)
    sampler = UnevenBatchSampler(60, [4, 4], dist.get_rank(group), accumulate=accumulate)
    return Rebalancer(sampler, weighted_hook(model, sampler)).min_batch


@in_new_pair
def no_number(group: dist.ProcessGroup, batches: list[Any]) -> str:
    """Return what agreed_split says of a global batch that is none."""
    training = Training(group)
    return said_by(lambda: agreed_split(batches[training.rank], group=training.group))


@in_new_pair
def alone(group: dist.ProcessGroup, call: str, seconds: float) -> str:
    """Return what is said on rank 1 if only that one makes a call."""
    training = Training(group)
    if training.rank != 1:
        return ""
    if call == "agreed_split":
        return said_by(lambda: agreed_split(64, group=training.group, timeout=seconds))
    return said_by(lambda: Rebalancer(training.sampler, training.hook, timeout=seconds))


@in_new_pair
def second_hook(group: dist.ProcessGroup) -> str:
    training = Training(group)
    return said_by(lambda: weighted_hook(training.ddp))


@in_new_pair
def idle(group: dist.ProcessGroup) -> list[str]:
    """The warnings of a run whose epochs are too short for a change of the split."""
    training = Training(group, samples=10)  # two rounds an epoch
    balance = Rebalancer(training.sampler, training.hook)
    balance.timer = EmulatedTimer(Line(0.01, 0.001))  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for epoch in range(20):
            training.sampler.set_epoch(epoch)
            training.run(balance.step)
    return [str(one.message) for one in seen if "Rebalancer" in str(one.message)]


@in_new_pair
def refused_alone(group: dist.ProcessGroup, how: str, rounds: int, shards: bool = False) -> str:
    """Return what is said if rank 1 alone does wrong, in the last of some rounds."""
    wrong = dist.get_rank(group) == 1
    plain = Early().to(DEVICE) if how == "met late" else net()
    model: Any
    if shards:
        mesh = DeviceMesh.from_group(group, DEVICE.type)
        for layer in plain.children() if how == "met late" else ():
            fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
    else:
        model = DistributedDataParallel(plain, process_group=group)
    hook = weighted_hook(model)
    inputs, targets = numbers(0, 6)

    def train() -> None:
        for number in range(rounds):
            model.zero_grad()
            now = wrong and number == rounds - 1
            if how == "two forwards":
                rows = 4 if now else 6
                (square(model, inputs, targets) + square(model, inputs[:rows], targets[:rows])).backward()
            elif how == "no forward":
                loss = square(model, inputs, targets)
                (sum(p.square().sum() for p in model.parameters()) if now else loss).backward()
            elif how == "met late":  # the head is reduced before the pass without it is met
                rows = inputs[: 4 if now else 6]
                (model(rows, False).square().mean() + model(inputs, True).square().mean()).backward()
            elif how == "loss_scale":
                loss = square(model, inputs, targets)
                (loss * loss_scale(6, 12, group) if now else loss).backward()
            elif how == "divide factor":
                model.set_force_sum_reduction_for_comms(True)  # gloo has no other for a factor
                model.set_gradient_divide_factor(1.0 if now else 2.0)
                square(model, inputs, targets).backward()
            elif how == "set once":
                if now:
                    hook.set_weight(6)
                for x, y in hook.accumulate((inputs, targets), 2):
                    square(model, x, y).backward()
            elif how == "no reduction":
                model.set_requires_gradient_sync(not now)
                square(model, inputs, targets).backward()
            else:
                for parameter in model.parameters() if now else ():
                    parameter.grad = torch.ones_like(parameter)
                for x, y in hook.accumulate((inputs, targets), 2):
                    square(model, x, y).backward()

    return said_by(train)


class Early(torch.nn.Module):
    """Features, or what a head makes of them: its gradients are there before those of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, whole: bool) -> torch.Tensor:
        found: torch.Tensor = self.body(inputs)
        return self.head(found) if whole else found


@in_new_pair
def met_late(group: dist.ProcessGroup, batches: list[int], shares: bool) -> tuple[list[float], str]:
    """Return the met late of a loss of two passes, one of which is met when the head's bucket is on its
    way: by round, how far the gradient is off; what is said once rank 1 has one sample less in that pass.
    shares: each pass has its own samples, and its share.
    """
    torch.manual_seed(0)
    alone = Early().double().to(DEVICE)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group, bucket_cap_mb=1e-5)
    hook, errors = weighted_hook(ddp), list[float]()

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, rows: int) -> torch.Tensor:
        first = torch.nn.functional.mse_loss(model(x[:rows], False), y[:rows])
        first = first * hook.share(rows, rows + len(x)) if shares else first
        second = torch.nn.functional.mse_loss(model(x, True), y)
        return first + (second * hook.share(len(x), rows + len(x)) if shares else second)

    def train() -> None:
        for number in range(4):
            whole = numbers(number, sum(batches), torch.float64)
            own = [values[mine(batches, group)] for values in whole]
            less = 1 if number == 3 and dist.get_rank(group) == 1 else 0
            ddp.zero_grad()
            loss(ddp, *own, len(own[0]) - less).backward()
            right = torch.autograd.grad(loss(alone, *whole, sum(batches)), list(alone.parameters()))
            errors.append(off(flat(p.grad for p in ddp.parameters()), flat(right)))

    return errors, said_by(train)


@in_new_pair
def in_chunks(group: dist.ProcessGroup, batches: list[int], size: int) -> str:
    """Return what is said of a loss over a batch that goes through the model in chunks."""
    model = DistributedDataParallel(net(), process_group=group)
    weighted_hook(model)
    inputs, targets = numbers(0, batches[dist.get_rank(group)])

    def train() -> None:
        found = torch.cat([model(chunk) for chunk in inputs.split(size)])
        torch.nn.functional.mse_loss(found, targets).backward()

    return said_by(train)


class Masked(Speaker):
    """The same mean, by a mask."""

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores, kept = self.out(torch.tanh(self.embed(words))), targets.ge(0).flatten()
        losses = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none"
        )
        return (losses * kept).sum() / kept.sum()


@in_new_pair
def targets_in_the_model(group: dist.ProcessGroup, batches: list[int], masked: bool) -> str:
    """Return what is said of a mean over targets that the model computes of an argument without the name
    labels.
    """
    model = DistributedDataParallel((Masked() if masked else Speaker()).to(DEVICE), process_group=group)
    weighted_hook(model)
    texts, targets = (values[mine(batches, group)] for values in words(0, sum(batches)))
    return said_by(lambda: model(texts, targets).backward())


def copied(_: dist.ProcessGroup) -> tuple[float, str]:
    """How far a copy's outputs are from the model's; what is said where the copy is trained."""
    model = DistributedDataParallel(net())  # of another group torch makes no copy
    weighted_hook(model)
    inputs, targets = numbers(0, 6)
    average = AveragedModel(model)
    torch.save(model, io.BytesIO())
    with torch.no_grad():
        distance = off(average(inputs), model(inputs))
    return distance, said_by(lambda: square(average, inputs, targets).backward())


@in_new_pair
def counted_in_bits(group: dist.ProcessGroup, bits: torch.dtype) -> list[str]:
    """Return what is said of weights in a type that rounds them, counted or set, and of one below 0."""
    model = DistributedDataParallel(net(), process_group=group)
    hook = weighted_hook(model, count=lambda inputs: torch.ones(len(inputs), dtype=bits).sum())
    weights = (torch.ones((), dtype=bits), -1)
    calls = [lambda: model(numbers(0, 6)[0]), *(partial(hook.set_weight, weight) for weight in weights)]
    return [said_by(call) for call in calls]


def one_loss_of_two_models(group: dist.ProcessGroup, batches: list[int], constant: int) -> str:
    """Return what is said of a loss through a second model, which gets as many inputs on each rank."""
    three, rank = dist.new_group([0, 1, 2]), dist.get_rank(group)
    if rank > 2:
        return ""
    models = [DistributedDataParallel(net(), process_group=three) for _ in range(2)]
    for model in models:
        weighted_hook(model)
    inputs, targets = numbers(0, batches[rank])
    prompts = numbers(1, constant)[0]

    def train() -> None:
        found = models[0](inputs) + models[1](prompts).mean(0)
        torch.nn.functional.mse_loss(found, targets).backward()

    return said_by(train)


def one_loss_over_unlike_groups(group: dist.ProcessGroup, rows: list[int]) -> str:
    """Return what is said of a loss through a model of three ranks, on two of them through one of these two
    also, which gets as many inputs by rank.
    """
    three, two, rank = dist.new_group([0, 1, 2]), dist.new_group([0, 1]), dist.get_rank(group)
    if rank > 2:
        return ""
    model = DistributedDataParallel(net(), process_group=three)
    weighted_hook(model)
    inputs, targets = numbers(0, 6 + rank)
    other = None if rank == 2 else DistributedDataParallel(net(), process_group=two)
    if other is not None:
        weighted_hook(other)

    def train() -> None:
        found = model(inputs)
        if other is not None:
            found = found + other(inputs[: rows[rank]]).mean(0)
        torch.nn.functional.mse_loss(found, targets).backward()

    return said_by(train)
