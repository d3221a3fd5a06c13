"""What the ranks of benchmarks/adaptive.py do: train on emulated devices, in virtual time."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyps.solver import Line
from pyps.solver.online.decide import best_split
from pyps.torch import AdaptiveBatch, GradientNoise, Rebalancer, UnevenBatchSampler, weighted_hook


class VirtualTimer:
    """A ComputeTimer of steps that take what this rank's device takes."""

    def __init__(self, cost: Line) -> None:
        self._cost = cost
        self._finished: list[tuple[int | None, float]] = []

    def start(self) -> None:
        pass

    def finish(self, batch: int | None) -> None:
        self._finished.append((batch, self._cost.seconds(batch or 0)))

    def finished(self) -> list[tuple[int | None, float]]:
        finished, self._finished = self._finished, []
        return finished


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def train(chosen: argparse.Namespace) -> list[tuple[int, int, float, float]]:
    """By epoch, until the loss is at the target: samples so far, the batch, virtual seconds, the loss."""
    torch.manual_seed(chosen.seed)
    costs = [Line(pace * chosen.fixed_seconds, pace * chosen.sample_seconds) for pace in chosen.paces]
    inputs, labels = digits()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.rate)
    split = best_split(chosen.batch, costs, [1] * len(costs), [chosen.most] * len(costs))
    sampler = UnevenBatchSampler(len(labels), split, seed=chosen.seed)
    hook = weighted_hook(model, sampler)
    noise, balance = GradientNoise(hook, 0.95), Rebalancer(sampler, hook)
    balance._timer = VirtualTimer(costs[dist.get_rank()])  # type: ignore[assignment]
    options: dict[str, Any] = {"max_batch": chosen.most, "overhead_seconds": chosen.overhead_seconds}
    options |= {"rule": chosen.rule, "least_efficiency": chosen.least_efficiency}
    adaptive = AdaptiveBatch(sampler, noise, balance, optimizer, **options)
    if not chosen.adaptive:  # the same rule for the learning rate of a batch that stays
        adaptive.base_batch = chosen.base_batch
    samples, seconds, found = 0, 0.0, []
    for epoch in range(chosen.epochs):
        sampler.set_epoch(epoch)
        for number, rows in enumerate(sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            noise.step()
            optimizer.step()
            balance.step()
            trained = sampler.round_samples(number)
            assert trained is not None
            samples += trained[0]
            own = sampler.split if trained[0] == sampler.global_batch else split_of(trained[0], costs)
            seconds += max(c.seconds(b) for c, b in zip(costs, own, strict=True)) + chosen.overhead_seconds
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model.module(inputs), labels))
        found.append((samples, sampler.global_batch, seconds, loss))
        if loss <= chosen.target:
            break
        if chosen.adaptive:
            adaptive.epoch()
        elif noise.scale is not None:
            adaptive._scale_rates(sampler.global_batch, noise.scale)
    return found


def split_of(total: int, costs: list[Line]) -> tuple[int, ...]:
    """About the split of an epoch's last round."""
    return best_split(total, costs, [1] * len(costs), [total] * len(costs))


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = argparse.Namespace(**json.loads(sys.argv[2]))
    dist.init_process_group("gloo")
    print(json.dumps(train(options)), flush=True)
    dist.barrier()
    os._exit(0)  # torch's own threads may abort a process while its interpreter is torn down
