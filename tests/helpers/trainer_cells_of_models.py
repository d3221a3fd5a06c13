"""Features in which a loss comes from several models, from gradients, or from unlike passes, as trainer_cells
tries them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from trainer_cells import SPLIT, Case, batches, mse
from trainer_checks import Model, whole_gradient

from pyps.torch import UnevenBatchSampler

CONSTANT = 5  # samples of a second model, the same on all ranks


def error_of(kit: Any, alone: list[nn.Module], models: list[Any]) -> float:
    right = torch.cat([p.grad.flatten() for m in alone for p in m.parameters() if p.grad is not None])
    found = torch.cat([whole_gradient(kit.inner(model)) for model in models])
    return float((found - right).norm() / right.norm())


def prompts(kit: Any) -> float:
    """A second model's output for a few constant inputs, as of prompts or classes, in one loss."""
    torch.manual_seed(0)
    models = kit.prepare(Model(), Model())
    x, y = batches(0)[1]
    constant = torch.ones(CONSTANT, 6, dtype=torch.float64)
    kit.backward(mse(models[0](x) + models[1](constant).mean(0), y))
    return 1.0


def weighed_prompts(kit: Any) -> float:
    """The same, with set_weight() of the loss on the second model's hook."""
    torch.manual_seed(0)
    alone: list[nn.Module] = [Model(), Model()]
    models = kit.prepare(*copy.deepcopy(alone))
    constant = torch.ones(CONSTANT, 6, dtype=torch.float64)
    whole, (x, y) = batches(0)
    mse(alone[0](whole[0]) + alone[1](constant).mean(0), whole[1]).backward()  # type: ignore[no-untyped-call]
    loss = mse(models[0](x) + models[1](constant).mean(0), y)
    for hook in kit.hooks:
        hook.set_weight(len(x))
    kit.backward(loss)
    return error_of(kit, alone, models)


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Of the gradient's norm, as a critic's."""
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def gradient_penalty(kit: Any) -> float:
    return Case(kit).same(lambda m, _, x, y: mse(m(x), y) + penalty(m, x + 1))


def penalty_of_others(kit: Any) -> float:
    """Of as many samples on each rank, in the loss of a batch that is not."""
    return Case(kit).same(lambda m, _, x, y: mse(m(x), y) + penalty(m, x[:2]))


def own_numbers(kit: Any) -> float:
    """Micro-batches of two samples, added up: more of them where the batch is larger."""
    case, rank = Case(kit), dist.get_rank()
    own = batches(0, [6, 4])[1]
    parts = list(zip(*(values.split(2) for values in own), strict=True))
    for number, (x, y) in enumerate(parts, 1):
        with kit.no_sync(case.model) if number < (3, 2)[rank] else nullcontext():
            kit.backward(mse(case.model(x), y))
    return 1.0


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean(0)  # type: ignore[no-any-return]


def time_first(kit: Any) -> float:
    """Samples in the second dimension, of batches that a sampler cuts."""
    (model,) = kit.prepare(TimeFirst())
    sampler = UnevenBatchSampler(sum(SPLIT), SPLIT)
    kit.hooks[0].lockstep.sampler = sampler
    next(iter(sampler))
    x, y = batches(0)[1]
    kit.backward(mse(model(x.expand(7, *x.shape)), y))
    return 1.0


def views(kit: Any) -> float:
    """Two views of each sample in one batch."""

    def loss(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = model(torch.cat([x, -x])).chunk(2)
        return mse(first - second, y)

    return Case(kit).same(loss)


def gathered(kit: Any) -> float:
    """A loss over all ranks' outputs, as of contrastive models: the same on each rank, so all count alike."""
    from torch.distributed.nn.functional import all_gather

    def contrast(outputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    case, most = Case(kit), max(SPLIT)
    contrast(case.alone(case.whole[0])).backward()  # type: ignore[no-untyped-call]
    own = case.model(case.own[0])
    every = all_gather(torch.cat([own, own.new_zeros(most - len(own), own.shape[1])]))
    kit.hooks[0].set_weight(1)
    kit.backward(contrast(torch.cat([one[:n] for one, n in zip(every, SPLIT, strict=True)])))
    return case.error()


OF_MODELS: dict[str, Callable[[Any], float]] = {
    "one loss of two models, unlike batches": prompts,
    "the same, set_weight() on both": weighed_prompts,
    "a gradient penalty": gradient_penalty,
    "a gradient penalty of others": penalty_of_others,
    "own accumulation, unlike numbers": own_numbers,
    "samples not first": time_first,
    "two views in a batch": views,
    "a loss over all outputs, set_weight(1)": gathered,
}
