"""Networks and data of the tests that train on several ranks, and how far gradients are apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

TOKENS, WORDS, IGNORED = 6, 11, -100
Model = nn.Module


def net(dtype: torch.dtype = torch.float32, width: int = 32) -> Model:
    torch.manual_seed(0)
    layers = nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    return nn.Sequential(*layers).to(DEVICE, dtype)


class Speaker(nn.Module):
    """Tokens [n, TOKENS] -> the mean cross entropy of targets, those that are IGNORED left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.out(torch.tanh(self.embed(words)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def numbers(seed: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a whole round, the same on all ranks; the ranks' parts differ a lot."""
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=draws, dtype=torch.float64)
    targets = (
        torch.randn(count, 4, generator=draws, dtype=torch.float64) + torch.linspace(-2, 2, count)[:, None]
    )
    return inputs.to(DEVICE, dtype), targets.to(DEVICE, dtype)


def words(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts and targets of a round; how many of a row count grows with the row."""
    draws = torch.Generator().manual_seed(seed)
    texts, targets = torch.randint(WORDS, (2, count, TOKENS), generator=draws).unbind()
    counted = torch.linspace(0.1, 1, count)[:, None]
    targets = torch.where(torch.rand(count, TOKENS, generator=draws) < counted, targets, IGNORED)
    return texts.to(DEVICE), targets.to(DEVICE)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten().cpu() for t in tensors])


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    """The relative distance."""
    return float((found - right).norm() / right.norm())


def mine(batches: list[int], group: dist.ProcessGroup) -> slice:
    rank = dist.get_rank(group)
    return slice(sum(batches[:rank]), sum(batches[: rank + 1]))


def square(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)
