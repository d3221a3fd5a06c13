"""A worker's steps over a bus, on a device that is emulated: python benchmarks/bus.py [--save].

The device computes by sleeping, so that the processor is free as a GPU's host is, and within a step it
waits for no host; its memory is the host's, and a thread each way copies as fast as the bus. The worker has
the threads that `pyps run` gives it: all. Bounds: a serial step takes its compute and 1.2 times what
gradients and parameters take on the bus; a step of a pipeline 1.05 times the longer of compute and the
transfer at the store, which it records. Rounds are interleaved; medians with range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulated_bus import Emulated
from record import machine, milliseconds, others_share, save_table, seconds_of, table
from torch import nn

import pyps
from pyps.formats.records import read_run
from pyps.profiler.throttle import sleep_until
from pyps.run.spec import cores
from pyps.worker.device import binding

LAYERS, WARM_UP = 8, 3
OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
SERIAL, PIPELINED = 1.2, 1.05  # the bounds


class Device:
    """Computes one layer after another: within a step its host has given it all of them in time."""

    def __init__(self) -> None:
        self._free_at = 0  # by the monotonic clock, in ns

    def begin(self) -> None:
        """A step begins, no earlier than now."""
        self._free_at = max(self._free_at, time.monotonic_ns())

    def compute(self, seconds: float) -> None:
        self._free_at += round(1e9 * seconds)
        sleep_until(self._free_at)


class Computed(torch.autograd.Function):
    """Takes its time, and has the same gradient each time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Layer) -> Any:
        ctx.layer = layer
        layer.device.compute(layer.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        layer = ctx.layer
        layer.device.compute(2 * layer.seconds)
        return outputs[0], layer.gradient.view_as(layer.gradient).detach(), None


class Layer(nn.Module):
    """One of `parameters`, whose forward takes `seconds` and its backward twice as long."""

    def __init__(self, device: Device, parameters: int, seconds: float, kind: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters, dtype=kind))
        self.device, self.gradient, self.seconds = device, torch.randn(parameters).to(kind), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Computed.apply(x, self.weight, self)
        return found


def network(parameters: int, compute: float, kind: torch.dtype) -> nn.Module:
    device = Device()
    layers = (Layer(device, parameters // LAYERS, compute / 3 / LAYERS, kind) for _ in range(LAYERS))
    model = nn.Sequential(*layers)
    model.register_forward_pre_hook(lambda *_: device.begin())
    return model


def alone(model: nn.Module, steps: int) -> list[float]:
    """Seconds of each step without a store."""
    x, times = torch.ones(1, 1, requires_grad=True), []
    for _ in range(steps):
        began = time.perf_counter()
        model.zero_grad()
        model(x).sum().backward()
        times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def worked(
    model: nn.Module, optimizer: str, depth: int, options: argparse.Namespace, steps: int
) -> tuple[list[float], float]:
    """Seconds of each step of a worker, and of a transfer at the store."""
    times: list[float] = []
    binding.bus_of = lambda _: Emulated(options.rate * 1e9)
    with tempfile.TemporaryDirectory() as name:
        more: dict[str, Any] = {"policy": "asp", "depth": depth, "run_dir": Path(name)}
        with pyps.join(f"bus-{os.getpid()}", 0, batches=[1], samples=steps, **more) as worker:
            worker.attach(model, OPTIMIZERS[optimizer](model.parameters(), lr=1e-3))
            worker.store.set_threads(options.threads)
            began = time.perf_counter()
            for (x,) in worker.batches((torch.ones(8, 1),)):
                times.append(time.perf_counter() - began)
                began = time.perf_counter()
                model(x.requires_grad_()).sum().backward()
                worker.step()
        records = read_run(Path(name))
    transfers = [sum(b - a for kind, a, b in r.spans if kind in ("push", "pull")) for r in records]
    return times[WARM_UP + 1 :], statistics.median(transfers[WARM_UP:])


def memcpy_rate() -> float:
    """Bytes a second that one thread copies."""
    one, two = np.ones(1 << 25, np.float32), np.zeros(1 << 25, np.float32)
    return one.nbytes / min(seconds_of(lambda: np.copyto(two, one)) for _ in range(8))


def rows_of(options: argparse.Namespace, kind: str, optimizer: str) -> list[list[str]]:
    """Return the rows of both ways to step."""
    parameters, compute = int(options.parameters), options.compute / 1e3
    way = parameters * TYPES[kind].itemsize / options.rate / 1e9  # one way
    steps = options.steps + WARM_UP + 1
    found: dict[int, list[float]] = {1: [], 2: []}
    device: list[float] = []
    for _ in range(options.rounds):
        model = network(parameters, compute, TYPES[kind])
        device += alone(model, steps)
        for depth, times in found.items():
            more, transfer = worked(model, optimizer, depth, options, steps)
            times += more
    base = statistics.median(device)
    bounds = {1: base + SERIAL * 2 * way, 2: PIPELINED * max(base, transfer)}
    return [
        [
            f"{parameters / 1e6:.0f} M, {kind}, {optimizer}",
            "serial" if depth == 1 else "pipelined",
            milliseconds(device),
            f"{2e3 * way:.1f}",
            f"{1e3 * transfer:.1f}" if depth == 2 else "",
            milliseconds(times),
            f"{1e3 * bounds[depth]:.1f}",
        ]
        for depth, times in found.items()
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=25e6)
    parser.add_argument("--compute", type=float, default=60.0, help="milliseconds of a step")
    parser.add_argument("--rate", type=float, default=12.0, help="GB/s of the bus, each way")
    parser.add_argument("--threads", type=int, default=cores(), help="of the worker")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["model", "steps", "compute, ms", "bus, both ways", "transfer", "step, ms", "bound"]]
    with others_share() as others:
        for kind in options.types:
            for optimizer in options.optimizers:
                rows += rows_of(options, kind, optimizer)
    speed = f"a bus of {options.rate:g} GB/s each way; one thread copies {memcpy_rate() / 1e9:.1f} GB/s"
    speed += f"; {options.threads} threads"
    text = f"{machine()}, others {others[0]:.0%}; {speed}.\n\n{table(rows)}"
    print(text)
    if options.save:
        save_table("bus", text)


if __name__ == "__main__":
    main()
