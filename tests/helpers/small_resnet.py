"""A small ResNet with BatchNorm, its data and its schedule, for runs that stop, restart and are loaded."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import lr_scheduler

SAMPLES = 48


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.past = nn.Conv2d(width, out, 1, stride, bias=False)
        self.past_norm = nn.BatchNorm2d(out, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return torch.relu(y + self.past_norm(self.past(x)))


def make_resnet() -> nn.Module:
    torch.manual_seed(1)
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=0.2), nn.ReLU()]
    return nn.Sequential(
        *stem, Block(8, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    )


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 3, 8, 8, generator=draws), torch.randint(0, 4, (SAMPLES,), generator=draws)


def make_schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm, down = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), lr_scheduler.CosineAnnealingLR(optimizer, 60)
    return lr_scheduler.SequentialLR(optimizer, [warm, down], [5])


def rates(count: int) -> list[float]:
    """The schedule's learning rate at each of the first positions, by plain torch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    schedule, found = make_schedule(optimizer), []
    for _ in range(count):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found
