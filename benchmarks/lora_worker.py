"""What the processes of benchmarks/lora_link.py do: a rank of DDP, or a worker of the store.

DDP's device is emulated: a pass is held back before its backward pass and in it, block by block, so that what
is reduced early goes while later blocks compute. The store's workers are throttled by `pyps run`. Both read
LR; workers also OUTER, the rate and Nesterov's momentum of the store's SGD, where they take local steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from lora_model import documentation, loss_of, model_of, trained
from torch.nn.parallel import DistributedDataParallel

import pyps
from pyps.profiler.throttle import sleep_until
from pyps.torch import GlobalMean
from pyps.worker.sampling import indices

FORWARD = 1 / 3  # of a pass's time


class Device:
    """Makes each pass last as long as on the emulated device; loading and the optimizer's step count."""

    def __init__(self, blocks: Any, seconds: float) -> None:
        self._began, self._seconds = 0.0, seconds
        for number, block in enumerate(reversed(blocks), 1):
            block.register_forward_hook(self._watch(FORWARD + (1 - FORWARD) * number / len(blocks)))

    def begin(self) -> None:
        self._began = time.monotonic()

    def _watch(self, share: float) -> Any:
        def held_back(_: Any) -> None:
            sleep_until(round((self._began + share * self._seconds) * 1e9))

        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if first.requires_grad:
                first.register_hook(held_back)

        return hook


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=float(os.environ["LR"]), weight_decay=0.0)


def every_step(
    batches: list[int],
    sample_seconds: list[float],
    samples: int,
    every: int,
    seed: int,
    full: bool = False,
    wire: str = "",
) -> None:
    """A rank of DDP; plain without a wire. Rank 0 prints [seconds, samples, held-out loss], about every so
    many samples, the seconds that a step takes and the parameters that travel, as JSON. Ends the process.
    """
    dist.init_process_group("gloo")
    rank, whole = dist.get_rank(), sum(batches)
    training, held_out = documentation()
    model = model_of(seed, full)
    optimizer = adamw(model)
    ddp = DistributedDataParallel(model)
    mean = GlobalMean(ddp, wire=wire) if wire else None  # type: ignore[arg-type]
    blocks = [m for m in model.modules() if type(m).__name__ == "GPT2Block"]
    device = Device(blocks, sample_seconds[rank] * batches[rank])
    kept = []
    dist.barrier()
    start = time.monotonic()
    for first in range(0, samples, whole):
        device.begin()
        place = first + sum(batches[:rank])
        rows = training[torch.from_numpy(indices(place, batches[rank], len(training), seed))]
        optimizer.zero_grad()
        loss = loss_of(ddp, rows)
        if mean is None:
            loss.backward()
        else:
            mean.backward(loss)
        optimizer.step()
        if rank == 0 and (first + whole) // every > first // every:
            now = [p.detach().clone() for p in trained(model)]
            kept.append((time.monotonic() - start, first + whole, now))
    seconds = (time.monotonic() - start) * whole / samples
    dist.destroy_process_group()
    if rank == 0:
        curve = []
        with torch.no_grad():
            for at, done, values in kept:
                for parameter, value in zip(trained(model), values, strict=True):
                    parameter.copy_(value)
                curve.append((at, done, float(loss_of(model, held_out))))
        travel = sum(p.numel() for p in trained(model))
        print(json.dumps({"curve": curve, "step_seconds": seconds, "travel": travel}), flush=True)
    os._exit(0)  # torch may wait for ever, or abort, while DDP and its threads are torn down


def through_the_store(seed: int) -> None:
    """A worker, with local steps or a push each step, as planned."""
    training, _ = documentation()
    model = model_of(seed)
    optimizer = adamw(model)
    with pyps.join() as worker:
        more = {}
        if worker.settings.local_steps:
            lr, momentum = json.loads(os.environ["OUTER"])
            more["outer"] = torch.optim.SGD(trained(model), lr=lr, momentum=momentum, nesterov=momentum > 0)
        worker.attach(model, optimizer, **more)
        for (rows,) in worker.batches((training,)):
            loss = loss_of(model, rows)
            loss.backward()
            worker.step(loss)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        every_step(**json.loads(sys.argv[1]))
    through_the_store(int(os.environ["MODEL_SEED"]))
