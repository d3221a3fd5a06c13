"""Run what the ranks of benchmarks/ddp.py do, by name; each prints what it found as one line of JSON."""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from pyps.tasks import TrainingTask, load_task
from pyps.torch import GlobalMean

DEVICE = "pyps0"  # the shaped link's end
WARM_UP = 3


def wide(width: int) -> nn.Module:
    """3 width^2 parameters in matrices: hardly any work for each of them."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def convolutions(width: int) -> nn.Module:
    """Eight layers, 42 width^2 parameters, on images of 32 x 32."""
    sizes = [(3, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2), *[(8, 8, 1)] * 4]
    layers: list[nn.Module] = []
    for number, (before, after, stride) in enumerate(sizes):
        channels = before if number == 0 else before * width // 8
        layers += [nn.Conv2d(channels, after * width // 8, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def task_of(model: str, width: int) -> TrainingTask:
    """One of the two models above, with a batch of this rank's own, or a task by its name."""
    if ":" in model:
        return load_task(model)
    kind, shape = (wide, (width,)) if model == "mlp" else (convolutions, (3, 32, 32))
    draws = torch.Generator().manual_seed(dist.get_rank())

    def make_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(batch, *shape, generator=draws)
        return inputs, torch.randint(10, (batch,), generator=draws)

    return TrainingTask(kind(width), make_batch, nn.functional.cross_entropy)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mean(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return each round's seconds of forward and backward, and of this thread's own work, by way."""
    torch.manual_seed(0)
    device = torch.device(chosen.device)
    task = task_of(chosen.model, chosen.width)
    modules = {name: copy.deepcopy(task.model).to(device) for name in ("plain", "torch", "pyps")}
    models = {name: DistributedDataParallel(module) for name, module in modules.items()}
    models["torch"].register_comm_hook(dist.group.WORLD, allreduce_hook)
    weighed = GlobalMean(models["pyps"])
    inputs, targets = (part.to(device) for part in task.make_batch(chosen.batch))
    names, seconds = list(models), []
    for number in range(chosen.pairs + WARM_UP):
        took = {}
        first = number % len(names)
        for name in names[first:] + names[:first]:
            models[name].zero_grad()
            dist.barrier()
            synchronize(device)
            began, worked = time.perf_counter(), time.thread_time()
            loss = task.loss(models[name](inputs), targets)
            if name == "pyps":
                weighed.backward(loss)
            else:
                loss.backward()  # type: ignore[no-untyped-call]
            synchronize(device)
            took[name] = time.perf_counter() - began, time.thread_time() - worked
            if name == "pyps":
                weighed.end_step()
        seconds.append(took)
    parameters = sum(p.numel() for p in models["plain"].parameters())
    return {"seconds": seconds[WARM_UP:], "parameters": parameters}


def link(chosen: argparse.Namespace) -> dict[str, Any]:
    """By wire, for each seed: the loss after each step, the seconds when, and bytes that left this host."""
    reported: dict[str, Any] = {}
    for wire in ("same", "int8", "int4"):
        reported[wire] = [trained(chosen.steps, wire, seed) for seed in range(chosen.seeds)]
    return reported | {"torch": torchs_own()}


def trained(steps: int, wire: Any, seed: int) -> dict[str, Any]:
    """Uneven batches, 3 to 1, of a teacher's answers."""
    torch.manual_seed(100)
    teacher = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))
    torch.manual_seed(seed)
    hidden = nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()
    ddp = DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(2048, 10)))
    mean = GlobalMean(ddp, wire=wire)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=5e-4)
    draws = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    batch = 12 if dist.get_rank() == 0 else 4
    losses, seconds = [], []
    dist.barrier()
    sent, began = sent_bytes(), time.monotonic()
    for _ in range(steps):
        inputs = torch.randn(batch, 256, generator=draws)
        with torch.no_grad():
            targets = teacher(inputs)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        mean.backward(loss)
        optimizer.step()
        mean.end_step()
        seconds.append(time.monotonic() - began)
        whole = torch.tensor([float(loss.detach()) * batch / 16], dtype=torch.float64)
        dist.all_reduce(whole)
        losses.append(float(whole))
    return {"losses": losses, "seconds": seconds, "bytes": sent_bytes() - sent}


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def torchs_own() -> str:
    """Do what torch's own quantized hook does here."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

    ddp = DistributedDataParallel(copy.deepcopy(nn.Linear(256, 256)))
    ddp.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    try:
        ddp(torch.randn(4, 256)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return "works"


JOBS = {"mean": mean, "link": link}

if __name__ == "__main__":
    torch.set_num_threads(1)
    options = argparse.Namespace(**json.loads(sys.argv[2]))
    dist.init_process_group("nccl" if getattr(options, "device", "cpu") == "cuda" else "gloo")
    print(json.dumps(JOBS[sys.argv[1]](options)), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # torch's own threads may abort a process while its interpreter is torn down
