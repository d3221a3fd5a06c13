"""Training on samples of unlike length, on ranks: what tests compare with one process."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyps.formats import LengthCost, Profile
from pyps.torch import GlobalMean, UnevenBatchSampler, uneven

COUNT, WIDTH, WORDS, BATCH = 60, 5, 7, 18
TOKENS = np.random.default_rng(1).integers(1, 30, COUNT)
COST = LengthCost(fixed_seconds=1.0, per_token_seconds=1.0, per_square_seconds=0.1)


class Net(nn.Module):
    """A word's embedding, and the mean of those before it: words of one sample alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(2 * WIDTH, WORDS)
        self.double()

    def forward(self, texts: list[torch.Tensor]) -> torch.Tensor:
        found = []
        for text in texts:
            own = self.words(text)
            before = own.cumsum(0) / torch.arange(1, len(text) + 1)[:, None]
            found.append(torch.cat([own, before], 1))
        return self.head(torch.cat(found))


def loss(model: nn.Module, samples: list[int]) -> torch.Tensor:
    draws = [torch.Generator().manual_seed(k) for k in samples]
    texts = [
        torch.randint(WORDS, (int(TOKENS[k]) + 1,), generator=d) for k, d in zip(samples, draws, strict=True)
    ]
    return nn.functional.cross_entropy(model([t[:-1] for t in texts]), torch.cat([t[1:] for t in texts]))


def trained(group: dist.ProcessGroup) -> tuple[list[float], list[list[int]]]:
    """An epoch with a split that moves: by round how far the gradient is from one process's, and the samples
    of each rank.
    """
    ranks, each = group.size(), round(TOKENS.mean())
    split = [each * BATCH // ranks] * ranks
    sampler = UnevenBatchSampler(COUNT, split, dist.get_rank(), lengths=TOKENS, cost=COST)
    others = [UnevenBatchSampler(COUNT, split, k, lengths=TOKENS, cost=COST) for k in range(ranks)]
    moved = [split[0] // 2, split[1] + split[0] - split[0] // 2, *split[2:]]
    for one in (sampler, *others):
        one.replan(moved, number=1)
    alone, model = Net(), DistributedDataParallel(Net(), process_group=group)
    mean, far, counts = GlobalMean(model, sampler), [], []
    for own, *parts in zip(sampler, *others, strict=True):
        alone.zero_grad()
        model.zero_grad()
        loss(alone, [k for part in parts for k in part]).backward()
        mean.backward(loss(model, own))
        mean.end_step()
        far.append(_apart(alone, model))
        counts.append([len(part) for part in parts])
    return far, counts


def planned(group: dist.ProcessGroup, profiles: list[Profile]) -> tuple[list[int], list[LengthCost], int]:
    """uneven() with a profile of each rank: the split, the costs that ranks know, and the global batch."""
    model, data = Net(), list(range(COUNT))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profiles[group.rank()]
    *_, step = uneven(model, data, BATCH, optimizer=optimizer, lengths=TOKENS, profile=profile)
    return list(step.sampler.split), list(step.sampler.costs), step.sampler.global_batch


def _apart(alone: nn.Module, model: nn.Module) -> float:
    pairs = list(zip(alone.parameters(), model.parameters(), strict=True))
    apart = sum(float((a.grad - b.grad).square().sum()) for a, b in pairs)
    return (apart / sum(float(a.grad.square().sum()) for a, _ in pairs)) ** 0.5
