"""Shared by the scripts here: the digits, a CNN, and emulated devices of unequal speed."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from pyps.profiler.throttle import sleep_until

HELD_OUT = 297
FIXED_SECONDS, SAMPLE_SECONDS = 0.020, 0.002  # a step of the device whose pace is 1


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 images, float32 [1, 8, 8] in 0..1, with labels: (to train on, held out)."""
    found = load_digits()
    images = torch.tensor(found.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def network() -> nn.Module:
    """A CNN so small that four of them leave time over on two cores."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(
        *first, *second, nn.Flatten(), nn.Linear(24 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def accuracy(model: nn.Module, held_out: TensorDataset) -> float:
    images, labels = held_out.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


class EmulatedDevice:
    """Emulates how long this rank's part of a step takes: pace * (20 ms + 2 ms a sample).

    PACES: by rank, separated by commas; without it nothing is emulated. SLOWS_AT: a step from which the
    first rank takes twice as long. The first layer's gradient, which comes last, is held back until the time
    is over, whatever the cores are doing.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        paces = [float(x) for x in os.environ.get("PACES", "").split(",") if x]
        self.pace = paces[dist.get_rank()] if paces else 0.0
        self.slows_at = int(os.environ.get("SLOWS_AT", "0")) if dist.get_rank() == 0 else 0
        self.steps = [time.monotonic()]  # when each began, in seconds
        self.samples = 0
        model.register_forward_pre_hook(self._begin)
        if paces:
            next(model.parameters()).register_hook(lambda _: self._hold())

    def _begin(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if model.training and torch.is_grad_enabled():
            self.samples = len(inputs[0])
            if len(self.steps) == 1:
                self.steps = [time.monotonic()]

    def step(self) -> None:
        """A step is over, and the next one begins."""
        self.steps.append(time.monotonic())

    def _hold(self) -> None:
        slowed = 2.0 if 0 < self.slows_at <= len(self.steps) else 1.0
        seconds = slowed * self.pace * (FIXED_SECONDS + SAMPLE_SECONDS * self.samples)
        sleep_until(round((self.steps[-1] + seconds) * 1e9))

    def print_summary(self, **more: Any) -> None:
        """Print, on the first rank, one line of JSON: the seconds of each step, and `more`."""
        seconds = [round(b - a, 4) for a, b in zip(self.steps, self.steps[1:], strict=False)]
        if dist.get_rank() == 0:
            print(json.dumps({"seconds": seconds, **more}), flush=True)
