"""What one rank of benchmarks/overlap.py does: it prints what it found as one line of JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyps.torch import GlobalMean

WARM_UP = 2  # steps: DDP arranges its buckets in the first
ONE_BUCKET_MB = 1000.0
FORWARD = 1 / 3  # of a step's compute


class _Pause(torch.autograd.Function):
    """Passes values on after a pause, and gradients after another: a device that computes so long."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class Paused(nn.Module):
    """Equal layers of width^2 parameters; each takes its part of `seconds`."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.seconds = 0.0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        each = self.seconds / len(self.layers)
        for layer in self.layers:
            values = _Pause.apply(layer(values), each * FORWARD, each * (1 - FORWARD))
        return values


def main() -> None:
    """Time the all-reduce and steps without it, then the steps of each case; print the medians in seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("chosen")
    chosen = json.loads(parser.parse_args().chosen)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Paused(chosen["layers"], chosen["width"])
    bucket_bytes = chosen["width"] ** 2 * 4
    found: dict[str, Any] = {
        "all_reduce": [
            [size, _all_reduce(size, chosen["steps"])]
            for size in (bucket_bytes, bucket_bytes * chosen["layers"])
        ],
        "alone": [_steps(model, chosen["width"], chosen["steps"], pause) for pause in chosen["pauses"]],
    }
    for overlapped, cases in chosen["seconds"].items():
        cap = bucket_bytes / 2**20 if overlapped == "True" else ONE_BUCKET_MB
        dist._DEFAULT_FIRST_BUCKET_BYTES = int(cap * 2**20)
        ranks = DistributedDataParallel(model, bucket_cap_mb=cap)
        mean = GlobalMean(ranks)
        mine = [seconds[dist.get_rank()] for seconds in cases]
        found[overlapped] = [_steps(ranks, chosen["width"], chosen["steps"], pause, mean) for pause in mine]
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _all_reduce(size: int, count: int) -> float:
    """The median seconds in which so many bytes are reduced."""
    values = torch.zeros(size // 4)
    return _timed(lambda: dist.all_reduce(values), count)


def _steps(model: nn.Module, width: int, count: int, pause: float, mean: GlobalMean | None = None) -> float:
    """The median seconds of a step whose compute pauses for so many."""
    values = torch.randn(1, width)
    getattr(model, "module", model).seconds = pause

    def step() -> None:
        model.zero_grad()
        loss = model(values).mean()
        if mean is None:
            loss.backward()
        else:
            mean.backward(loss)

    return _timed(step, count)


def _timed(call: Callable[[], Any], count: int) -> float:
    """The median seconds of a call that all ranks begin together."""
    took = []
    for _ in range(count + WARM_UP):
        dist.barrier()
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return median(took[WARM_UP:])


if __name__ == "__main__":
    main()
