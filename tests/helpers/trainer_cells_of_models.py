"""Features in which a loss comes from several models, from gradients, or from unlike passes, as trainer_cells
tries them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
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
    """Return a penalty of the gradient's norm, as a critic's."""
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def gradient_penalty(kit: Any) -> float:
    return Case(kit).same(lambda m, _, x, y: mse(m(x), y) + penalty(m, x + 1))


def penalty_of_others(kit: Any) -> float:
    """Return a penalty of as many samples on each rank, in the loss of a batch that is not."""
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


def time_first_without_sampler(kit: Any) -> float:
    """The same of batches that no sampler cuts; of an epoch's first round, all ranks have them."""
    (model,) = kit.prepare(TimeFirst())
    x, y = batches(0)[1]
    kit.backward(mse(model(x.expand(7, *x.shape)), y))
    return 1.0


class Graphs(nn.Module):
    """Nodes, and the graph of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, nodes: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        nodes = self.layer(nodes)
        return nodes.new_zeros(int(of[-1]) + 1, 3).index_add(0, of, nodes)


def graphs(kit: Any) -> float:
    """A loss by graphs of unlike numbers of nodes."""
    (model,) = kit.prepare(Graphs())
    x, y = batches(0)[1]
    of = torch.arange(len(x)) // 2 if dist.get_rank() else torch.arange(len(x)) // 3
    kit.backward(mse(model(x, of), y[: int(of[-1]) + 1]))
    return 1.0


class Texts(nn.Module):
    """[n, words] -> [n, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(10, 6).double(), nn.Linear(6, 3).double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(words).sum(1))  # type: ignore[no-any-return]


def padded(kit: Any) -> float:
    """Texts that each rank pads to its longest one, each with a class: these are samples first."""
    torch.manual_seed(0)
    alone = Texts()
    (model,) = kit.prepare(copy.deepcopy(alone))
    texts = [torch.randint(10, (rows, length)) for rows, length in zip(SPLIT, (5, 8), strict=True)]
    whole, (_, y) = batches(0)[0][1], batches(0)[1]
    mse(torch.cat([alone(part) for part in texts]), whole).backward()  # type: ignore[no-untyped-call]
    kit.backward(mse(model(texts[dist.get_rank()]), y))
    return error_of(kit, [alone], [model])


def twice(kit: Any) -> float:
    """A loss in parts, each with a backward() through the same forward pass."""
    case = Case(kit)
    found = case.alone(case.whole[0])
    (mse(found, case.whole[1]) + found.square().mean()).backward()  # type: ignore[no-untyped-call]
    for number, (x, y) in enumerate(kit.hooks[0].accumulate(case.own, 2)):
        found = case.model(x)
        if number == 0:
            kit.backward(mse(found, y), retain_graph=True)
            kit.backward(found.square().mean())
        else:
            kit.backward(mse(found, y) + found.square().mean())
    return case.error()


def after_no_sync(kit: Any) -> float:
    """The same with the second backward() after no_sync(), where nothing reduces it."""
    case = Case(kit)
    with kit.no_sync(case.model):
        found = case.model(case.own[0])
        kit.backward(mse(found, case.own[1]), retain_graph=True)
    kit.backward(found.square().mean())
    return 1.0


def dropped(kit: Any) -> float:
    """A micro-batch in no_sync() whose gradients are set to zero: it is no part of the round."""
    case = Case(kit, reduction="sum")
    with kit.no_sync(case.model):
        kit.backward(mse(case.model(case.own[0]), case.own[1], reduction="sum"))
    case.model.zero_grad()
    (mse(case.alone(case.whole[0]), case.whole[1], reduction="sum") / sum(SPLIT)).backward()  # type: ignore[no-untyped-call]
    kit.backward(mse(case.model(case.own[0]), case.own[1], reduction="sum"))
    return case.error()


def shares(kit: Any) -> float:
    """Two forwards of unlike batches in one loss, each with its share."""
    case = Case(kit)
    mse(case.alone(case.whole[0]), case.whole[1]).backward()  # type: ignore[no-untyped-call]
    rows = len(case.own[0])
    losses = []
    for part in (slice(0, 1), slice(1, rows)):
        x, y = case.own[0][part], case.own[1][part]
        losses.append(mse(case.model(x), y) * kit.hooks[0].share(len(x), rows))
    kit.backward(sum(losses))
    return case.error()


def views(kit: Any) -> float:
    """Two views of each sample in one batch."""

    def loss(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = model(torch.cat([x, -x])).chunk(2)
        return mse(first - second, y)

    return Case(kit).same(loss)


def gathered(kit: Any, said: bool = False) -> float:
    """A loss over all ranks' outputs, as of contrastive models: the same on each rank, so all count alike."""
    from torch.distributed.nn.functional import all_gather

    def contrast(outputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    case, most = Case(kit), max(SPLIT)
    contrast(case.alone(case.whole[0])).backward()  # type: ignore[no-untyped-call]
    own = case.model(case.own[0])
    every = all_gather(torch.cat([own, own.new_zeros(most - len(own), own.shape[1])]))
    if said:
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
    "the same, no sampler": time_first_without_sampler,
    "graphs, each many rows": graphs,
    "texts padded by rank": padded,
    "two views in a batch": views,
    "backward() twice, a micro-batch": twice,
    "a loss over all ranks' outputs": gathered,
    "the same, set_weight(1)": partial(gathered, said=True),
}
OF_NO_SYNC: dict[str, Callable[[Any], float]] = {
    "backward() again after no_sync()": after_no_sync,
    "zero_grad() after no_sync()": dropped,
    "two forwards, each its share": shares,
}
