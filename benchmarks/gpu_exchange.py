"""What the store costs a worker on a GPU: python benchmarks/gpu_exchange.py [--docs].

One worker trains a wide network on one GPU. Its step is compared with forward and backward alone, and divided
into what its records say: pull (with the copy to the GPU), compute (with the gradient's copy to the host,
which overlaps it, or its encoding on the GPU) and push.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from record import machine, table, write_section
from torch import nn

import pyps
from pyps.formats.records import read_run

STEPS, WARM_UP, LAYERS, BATCH = 24, 8, 8, 2048
SPANS = ("pull", "compute", "push")


def network(parameters: int, device: str) -> nn.Module:
    width = round((parameters / LAYERS) ** 0.5)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers).to(device)


def synchronize(device: str) -> float:
    """Wait for the device; the time then."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(codec: str, parameters: int, device: str, batch: int) -> list[str]:
    """A row of the table: milliseconds."""
    model = network(parameters, device)
    width = next(model.parameters()).shape[1]
    inputs, targets = (torch.randn(2 * batch, width, device=device) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    with tempfile.TemporaryDirectory() as name:
        folder, samples = Path(name), batch * STEPS
        with pyps.join(
            "exchange", 0, batches=[batch], samples=samples, run_dir=folder, codec=codec
        ) as worker:
            worker.attach(model, optimizer)
            began = 0.0
            for x, y in worker.batches((inputs, targets)):
                nn.functional.mse_loss(model(x), y).backward()
                worker.step()
                if worker.steps == WARM_UP:
                    began = synchronize(device)
            step = (synchronize(device) - began) / (STEPS - WARM_UP)
        records = [record for record in read_run(folder) if record.step > WARM_UP]
    spans = [
        statistics.median(sum(b - a for kind, a, b in r.spans if kind == name) for r in records)
        for name in SPANS
    ]
    began = synchronize(device)
    for _ in range(WARM_UP):
        model.zero_grad()
        nn.functional.mse_loss(model(inputs[:batch]), targets[:batch]).backward()
    alone = (synchronize(device) - began) / WARM_UP
    return [f"{parameters / 1e6:.0f} M", codec, *(f"{1e3 * s:.1f}" for s in (alone, step, *spans))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parameters", type=float, default=25e6)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = int(options.parameters), options.device, options.batch
    heading = ["parameters", "codec", "forward and backward, ms", "step", *SPANS]
    rows = [heading, *(measure(codec, *chosen) for codec in ("f32", "int8"))]
    name = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    text = f"{name}, batch {options.batch}. {machine()}.\n\n{table(rows)}"
    print(text)
    if options.docs:
        write_section("gpu-exchange", text)


if __name__ == "__main__":
    main()
