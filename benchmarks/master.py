"""Parameters kept as bf16: what they cost in memory, and whether training is the same.

    python benchmarks/master.py [--seeds 5] [--epochs 40] [--parameters 4000000] [--save]

Trains digits with stores that keep fp32, and bf16 rounded at random, and with torch's optimizers whose
parameters are rounded to the nearest bf16 after each step. Each optimizer, two rates; the rate falls to
zero along a cosine. Prints the training loss at the end; every seed has its own weights and order of samples,
the same for all three. Memory is that of stores of so many parameters.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from record import machine, save_table, table
from sklearn.datasets import load_digits
from torch import nn

from pyps import Hyper, Store
from pyps.native.values import Agreement

BATCH = 48
RATES = {"sgd": (0.05, 0.2), "momentum": (0.005, 0.02), "adamw": (1e-4, 1e-3)}
KEPT = ("f32", "bf16", "nearest")
WIDTHS = (64, 256, 256, 10)


class Digits:
    """The network and data of one seed; every call of `steps` brings the same batches."""

    def __init__(self, seed: int, epochs: int) -> None:
        self.seed, self.epochs = seed, epochs
        images, labels = load_digits(return_X_y=True)
        self.x, self.y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
        torch.manual_seed(seed)
        layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
        self.model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self.initial = {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}

    def steps(self) -> Iterator[tuple[float, torch.Tensor, torch.Tensor]]:
        """A factor of the rate, and a batch."""
        order, steps = np.random.default_rng(self.seed), len(self.y) // BATCH
        for epoch in range(self.epochs):
            rows = order.permutation(len(self.y))
            for step in range(steps):
                done = (epoch * steps + step) / (self.epochs * steps)
                chosen = rows[step * BATCH : (step + 1) * BATCH]
                yield (1 + math.cos(math.pi * done)) / 2, self.x[chosen], self.y[chosen]

    def loss(self) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.model(self.x), self.y))


def in_store(digits: Digits, optimizer: str, rate: float, master: str) -> float:
    """The loss after training through a store."""
    options = {"batches": [BATCH], "policy": "asp", "optimizer": optimizer, "master": master}
    seed = Agreement(seed=digits.seed)
    with Store.create(f"bench-{os.getpid()}", digits.initial, agreement=seed, **options) as store:
        store.join()
        flat, _ = store.pull()
        views = {name: torch.from_numpy(view) for name, view in store.views(flat).items()}
        for name, parameter in digits.model.named_parameters():
            parameter.data = views[name]
        for factor, x, y in digits.steps():
            store.start()
            staging = store.stage()
            digits.model.zero_grad()
            nn.functional.cross_entropy(digits.model(x), y).backward()
            for name, parameter in digits.model.named_parameters():
                staging[name][:] = parameter.grad
            hyper = Hyper(lr=rate * factor, momentum=0.9, weight_decay=0.01)
            store.exchange(staging, BATCH, hyper, flat)
        store.pull(flat, strict=True)
        return digits.loss()


def to_nearest(digits: Digits, optimizer: str, rate: float) -> float:
    """The loss after training with torch, rounding parameters to the nearest bf16."""
    parameters = list(digits.model.parameters())
    for name, parameter in digits.model.named_parameters():
        parameter.data = torch.from_numpy(digits.initial[name].copy()).bfloat16().float()
    if optimizer == "adamw":
        chosen: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    else:
        momentum = 0.9 if optimizer == "momentum" else 0.0
        chosen = torch.optim.SGD(parameters, lr=rate, momentum=momentum, weight_decay=0.01)
    for factor, x, y in digits.steps():
        chosen.param_groups[0]["lr"] = rate * factor
        chosen.zero_grad()
        nn.functional.cross_entropy(digits.model(x), y).backward()
        chosen.step()
        for parameter in parameters:
            parameter.data = parameter.data.bfloat16().float()
    return digits.loss()


def losses(optimizer: str, rate: float, seeds: int, epochs: int) -> dict[str, list[float]]:
    """By how parameters are kept, a loss for each seed."""
    found: dict[str, list[float]] = {kept: [] for kept in KEPT}
    for seed in range(seeds):
        for kept in KEPT:
            digits = Digits(seed, epochs)
            nearest = kept == "nearest"
            loss = to_nearest(digits, optimizer, rate) if nearest else in_store(digits, optimizer, rate, kept)
            found[kept].append(loss)
    return found


def ratio(found: list[float], to: list[float]) -> str:
    """The median of the seeds' ratios, with the range."""
    ratios = sorted(a / b for a, b in zip(found, to, strict=True))
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"


def memory(parameters: int) -> list[list[str]]:
    """Bytes a parameter of a segment whose one worker has pushed: chunks, spares and a gradient."""
    rows = [["bytes a parameter", "f32", "bf16"]]
    name, folder = f"bench-{os.getpid()}", os.environ.get("PYPS_SHM_DIR", "/dev/shm")
    sizes = {"staging_buffers": 1, "max_participants": 2, "snapshot_spares": 1}
    for optimizer in RATES:
        rows.append([optimizer])
        for master in KEPT[:2]:
            options = {"batches": [1], "policy": "asp", "optimizer": optimizer, "master": master} | sizes
            with Store.create(name, {"w": np.zeros(parameters, np.float32)}, **options) as store:
                store.join()
                store.start()
                store.push(store.stage(), 1, Hyper(lr=0.0))
                used = os.stat(f"{folder}/pyps-{name}").st_blocks * 512
                rows[-1].append(f"{used / parameters:.2f}")
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--parameters", type=int, default=4_000_000)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["optimizer, rate", "f32, loss", "bf16 over f32", "to nearest over f32"]]
    for optimizer, rates in RATES.items():
        for rate in rates:
            found = losses(optimizer, rate, options.seeds, options.epochs)
            middle = f"{statistics.median(found['f32']):.3g}"
            ratios = (ratio(found[kept], found["f32"]) for kept in KEPT[1:])
            rows.append([f"{optimizer}, {rate:g}", middle, *ratios])
            print(*rows[-1], sep="  ", flush=True)
    how = f"{options.seeds} seeds, {options.epochs} epochs"
    text = f"{machine()}; {how}.\n\n{table(rows)}\n\n{table(memory(options.parameters))}"
    print(text)
    if options.save:
        save_table("master", text)


if __name__ == "__main__":
    main()
