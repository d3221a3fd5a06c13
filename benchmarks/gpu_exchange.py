"""Measure what the store costs a worker on a GPU: python benchmarks/gpu_exchange.py [--save].

One worker trains a wide network on one GPU, serially and in a pipeline of two. Its step is compared with
forward and backward alone, and divided into what its records say: compute (with what is left of the
gradient's copy to the host, which overlaps it, or its encoding on the GPU), push (with the copies of
parameters that go back meanwhile) and pull. Rows are f32, a model in bf16, and f32 encoded in int8; SGD with
momentum and AdamW; 25 and 350 million parameters. `over` is what a step takes more than the longer of compute
alone and, in a pipeline, its transfer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from record import machine, save_table, table
from torch import nn

import pyps
from pyps.formats.records import read_run

STEPS, WARM_UP, LAYERS, BATCH = 24, 8, 8, 2048
SPANS = ("compute", "push", "pull")
STEP = {1: "serial", 2: "pipelined"}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
}


@dataclass(frozen=True)
class Case:
    """A row. form: "f32", "bf16" or "int8"."""

    parameters: int
    form: str
    optimizer: str
    depth: int


def network(parameters: int, device: str) -> nn.Module:
    width = round((parameters / LAYERS) ** 0.5)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers).to(device)


def synchronize(device: str) -> float:
    """Wait for the device; the time then."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def alone(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, device: str) -> float:
    """Seconds of forward and backward."""
    for k in range(2 * WARM_UP):
        if k == WARM_UP:
            began = synchronize(device)
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
    model.zero_grad()
    return (synchronize(device) - began) / WARM_UP


def measure(case: Case, device: str, batch: int) -> list[str]:
    """A row of the table: milliseconds."""
    kind = torch.bfloat16 if case.form == "bf16" else torch.float32
    codec = "int8" if case.form == "int8" else "f32"
    model = network(case.parameters, device).to(kind)
    width = next(model.parameters()).shape[1]
    inputs, targets = (torch.randn(2 * batch, width, device=device, dtype=kind) for _ in range(2))
    bare = alone(model, inputs[:batch], targets[:batch], device)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    with tempfile.TemporaryDirectory() as name:
        more: dict[str, Any] = {"run_dir": Path(name), "codec": codec, "depth": case.depth}
        with pyps.join("exchange", 0, batches=[batch], samples=batch * STEPS, policy="asp", **more) as worker:
            worker.attach(model, optimizer)
            began = 0.0
            for x, y in worker.batches((inputs, targets)):
                nn.functional.mse_loss(model(x), y).backward()
                worker.step()
                if worker.steps == WARM_UP:
                    began, first = synchronize(device), worker.steps
            step = (synchronize(device) - began) / (worker.steps - first)
        records = [record for record in read_run(Path(name)) if record.step > WARM_UP]
    spans = [
        statistics.median(sum(b - a for kind, a, b in r.spans if kind == name) for r in records)
        for name in SPANS
    ]
    least = bare if case.depth == 1 else max(bare, spans[1] + spans[2])
    figures = (f"{1e3 * s:.1f}" for s in (bare, step, *spans, step - least))
    return [f"{case.parameters / 1e6:.0f} M", case.form, case.optimizer, STEP[case.depth], *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parameters", type=float, nargs="+", default=[25e6, 350e6])
    parser.add_argument("--forms", nargs="+", default=["f32", "bf16", "int8"])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = product(options.parameters, options.forms, options.optimizers, STEP)
    cases = [Case(int(size), form, optimizer, depth) for size, form, optimizer, depth in chosen]
    heading = ["parameters", "form", "optimizer", "steps", "forward and backward, ms", "step", *SPANS, "over"]
    rows = [heading, *(measure(case, options.device, options.batch) for case in cases)]
    name = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    text = f"{name}, batch {options.batch}. {machine()}.\n\n{table(rows)}"
    print(text)
    if options.save:
        save_table("gpu-exchange", text)


if __name__ == "__main__":
    main()
