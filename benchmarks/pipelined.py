"""Measure what a pipeline of rounds costs in loss: python benchmarks/pipelined.py [--seeds 5] [--save].

Trains four problems under `hps` with four unlike workers in virtual time, without a pipeline and with two and
three steps of each worker under way. Prints the training loss after as many samples without one, and how many
times that it is with one: medians. "int8": gradients and parameters travel in int8, without error feedback;
"as they are": pulls do not look ahead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from learning_rate import PROBLEMS
from numpy.typing import NDArray
from record import machine, save_table, table
from sklearn.datasets import load_digits

from pyps import Hyper
from pyps.formats import Jitter
from pyps.simulate import Objective, Scenario, SimWorker, TorchObjective, simulate
from pyps.store.codec import decode, encode
from pyps.tasks import TrainingTask

Array = NDArray[np.float64]
PAGE = "learning-rate.md"
BATCHES = 24, 20, 12, 8
LATENCY = {1: 0.0, 2: 0.3, 3: 0.8}  # seconds each way, by depth: a step takes one
BOUND = {"f32": 1.05, "int8": 1.08}


def convolutions(seed: int) -> TorchObjective:
    """A small convolutional network with batch normalization on the digits."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 8, 1), (8, 16, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(y)
    task = TrainingTask(model, lambda count: (images[:count], labels[:count]), nn.functional.cross_entropy)
    return TorchObjective(task, images, labels, seed)


@dataclass(frozen=True)
class Trained:
    """Hold what is trained: how often a global batch, and by what."""

    title: str
    make: Callable[[int], Objective]
    optimizer: str
    hyper: Hyper
    batches: int


MOMENTUM, ADAMW = (
    next(p for p in PROBLEMS if p.title == title) for title in ("digits, momentum", "digits, AdamW")
)
TRAINED = (
    Trained("CNN, momentum 0.9", convolutions, "momentum", Hyper(lr=0.05, momentum=0.9), 150),
    Trained("MLP, momentum 0.9", MOMENTUM.objective, "momentum", MOMENTUM.hyper, MOMENTUM.batches),
    Trained("MLP, AdamW 0.003", ADAMW.objective, "adamw", ADAMW.hyper, ADAMW.batches),
    Trained("CNN, AdamW 0.01", convolutions, "adamw", Hyper(lr=0.01, weight_decay=0.01), 150),
)


class Coded:
    """An objective whose parameters and gradients travel in int8."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.start, self.loss = objective.start, objective.loss

    def gradient(self, w: Array, first: int, count: int) -> tuple[Array, float]:
        gradient, loss = self._objective.gradient(coded(w), first, count)
        return coded(gradient), loss


def coded(values: Array) -> Array:
    codes, _ = encode(values.astype(np.float32), "int8")
    return decode(codes, "int8", values.size).astype(np.float64)


@dataclass(frozen=True)
class Way:
    depth: int
    codec: str = "f32"
    policy: str = "hps"


SERIAL = Way(1)
WAYS = (
    *(Way(depth, codec) for codec in BOUND for depth in (2, 3)),
    *(Way(depth, policy="hps:lookahead=false") for depth in (2, 3)),
)


def trained(case: tuple[int, Way, int]) -> float:
    """The training loss at the end of one run."""
    which, way, seed = case
    problem = TRAINED[which]
    workers = (
        SimWorker(f"w{k}", b, lambda _: 1.0, Jitter(sigma=0.05), latency=LATENCY[way.depth])
        for k, b in enumerate(BATCHES)
    )
    objective = problem.make(seed)
    return simulate(
        Scenario(tuple(workers)),
        way.policy,
        iterations=problem.batches,
        measure_every=problem.batches * sum(BATCHES),
        seed=seed,
        objective=Coded(objective) if way.codec == "int8" else objective,
        lr=problem.hyper,
        optimizer=problem.optimizer,
        pipeline=way.depth,
    ).loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args()
    seeds, found = range(options.seeds), range(len(TRAINED))
    cases = [(which, way, seed) for which in found for way in (SERIAL, *WAYS) for seed in seeds]
    with multiprocessing.get_context("spawn").Pool() as pool:
        losses = dict(zip(cases, pool.map(trained, cases, chunksize=1), strict=True))

    def ratio(which: int, way: Way) -> float:
        return statistics.median(losses[which, way, s] / losses[which, SERIAL, s] for s in seeds)

    titles = [f"{'as they are' if 'false' in w.policy else w.codec}, depth {w.depth}" for w in WAYS]
    rows = [["problem", "no pipeline", *titles]]
    for which in found:
        least = statistics.median(losses[which, SERIAL, seed] for seed in seeds)
        cells = [f"{ratio(which, way):.2f}" for way in WAYS]
        rows.append([TRAINED[which].title, f"{least:.3g}", *cells])
    closing = []
    for codec, bound in BOUND.items():
        worst = max(ratio(which, way) for which in found for way in WAYS[:4] if way.codec == codec)
        verdict = "met" if worst <= bound else "**missed**"
        closing.append(f"- {verdict}: worst with {codec}: {worst:.2f} (threshold: <= {bound})")
    text = "\n".join([f"{machine()}, {options.seeds} seeds.\n", table(rows), "", *closing])
    print(text)
    if options.save:
        save_table("pipeline", text, PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
