"""Measure what a pipeline of rounds costs in loss: python benchmarks/pipelined.py [--seeds 5] [--save].

Trains two networks and a small transformer on scikit-learn's digits under `hps`, with 2 to 32 alike workers,
in virtual time, without a pipeline and with two and three steps of each worker under way. Rates are the best
without a pipeline, of a ladder of twos tried with seeds of their own, and half of it. Prints how many times
the training loss without a pipeline, after as many samples, that with one is: medians. A loss is the mean
of the last rounds': at the best rate it goes up and down by more than a pipeline changes it. "int8":
gradients and parameters travel in int8, without error feedback.

--networks, --optimizers, --workers, --depths, --codecs: a part of it; all of it takes hours on a core. A run
that was cut off goes on from bench-out/.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from learning_rate import Perceptron
from numpy.typing import NDArray
from record import Kept, kept_at, machine, save_table, table
from sklearn.datasets import load_digits

from pyps import Hyper
from pyps.formats import Jitter
from pyps.simulate import Objective, Scenario, SimWorker, TorchObjective, simulate
from pyps.store.codec import decode, encode
from pyps.tasks import TrainingTask

Array = NDArray[np.float64]
PAGE = "learning-rate.md"
GLOBAL_BATCH, ROUNDS = 64, 150
EVERY, LAST = 5, 6  # rounds from one look at the loss to the next; how many of the last ones are averaged
LATENCY = {1: 0.0, 2: 0.3, 3: 0.8}  # seconds each way, by depth: a step takes one
WORKERS, DEPTHS, CODECS = (2, 8, 16, 32), (2, 3), ("f32", "int8")
NETWORKS = "MLP", "CNN", "transformer"
OPTIMIZERS = {
    "sgd": Hyper(lr=0.8),
    "momentum": Hyper(lr=0.1, momentum=0.9),
    "adamw": Hyper(lr=0.016, weight_decay=0.01),
}
LADDER = 4.0, 2.0, 1.0, 0.5, 0.25  # times an optimizer's rate
TUNING_SEEDS = 100, 101
BOUND = {"f32": 1.10, "int8": 1.13}  # at half the best rate
BOUND_AT_BEST = 1.25


def objective_of(network: str, seed: int) -> Objective:
    """A network on the digits. The CNN and the transformer normalize by sample, so no batch is special."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    if network == "MLP":
        return Perceptron((64, 32, 10), x, y, seed)
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images, labels = torch.tensor(x).reshape(-1, 1, 8, 8), torch.tensor(y)
    if network == "CNN":
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, 8, 1), (8, 16, 2)):
            conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            layers += [conv, nn.GroupNorm(4, outputs), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    else:
        images = images.reshape(-1, 8, 8)  # a row of pixels is a token
        block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        model = nn.Sequential(nn.Linear(8, 16), block, nn.Flatten(), nn.Linear(128, 10))
    task = TrainingTask(model, lambda count: (images[:count], labels[:count]), nn.functional.cross_entropy)
    return TorchObjective(task, images, labels, seed)


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
class Case:
    """One run. rate: times that of OPTIMIZERS. Without a pipeline the number of workers does not matter."""

    network: str
    optimizer: str
    rate: float
    seed: int
    workers: int = 1
    depth: int = 1
    codec: str = "f32"

    @property
    def name(self) -> str:
        return " ".join(map(str, vars(self).values()))


def trained(case: Case) -> float:
    """The training loss over the last 25 rounds of one run; infinite: it diverged."""
    hyper = OPTIMIZERS[case.optimizer]
    workers = (
        SimWorker(
            f"w{k}",
            GLOBAL_BATCH // case.workers,
            lambda _: 1.0,
            Jitter(sigma=0.05),
            latency=LATENCY[case.depth],
        )
        for k in range(case.workers)
    )
    objective = objective_of(case.network, case.seed)
    with np.errstate(all="ignore"):
        curve = simulate(
            Scenario(tuple(workers)),
            "hps",
            iterations=ROUNDS,
            measure_every=EVERY * GLOBAL_BATCH,
            seed=case.seed,
            objective=Coded(objective) if case.codec == "int8" else objective,
            lr=replace(hyper, lr=case.rate * hyper.lr),
            optimizer=case.optimizer,
            depth=case.depth,
        ).curve
    loss = statistics.mean(loss for *_, loss in curve[-LAST:])
    return loss if math.isfinite(loss) else math.inf


class Runs:
    """The losses of runs, each done once."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def do(self, cases: Sequence[Case]) -> None:
        """Do those that are not there, the longest first."""
        missing = [case for case in cases if self._kept.get(case.name) is None]
        missing.sort(key=lambda case: (-case.workers, case.network == "MLP"))
        with multiprocessing.get_context("spawn").Pool() as pool:
            for case, loss in zip(missing, pool.imap(trained, missing), strict=True):
                self._kept.add(case.name, loss)

    def __getitem__(self, case: Case) -> float:
        return float(self._kept.get(case.name))


def best_rate(runs: Runs, network: str, optimizer: str) -> float:
    """The rate of the ladder with the least loss without a pipeline, by seeds that are not measured with."""

    def loss(rate: float) -> float:
        return statistics.mean(runs[Case(network, optimizer, rate, seed)] for seed in TUNING_SEEDS)

    return min(LADDER, key=loss)


def ratio(runs: Runs, cases: Sequence[Case]) -> float:
    """How many times the loss without a pipeline: the median of seeds."""
    serial = [replace(case, workers=1, depth=1, codec="f32") for case in cases]
    return statistics.median(runs[one] / runs[other] for one, other in zip(cases, serial, strict=True))


def part_of_text(text: str, known: Sequence[str]) -> list[str]:
    """Return those named, with commas between; all where none is."""
    found = text.split(",") if text else list(known)
    if unknown := [name for name in found if name not in known]:
        raise SystemExit(f"found {unknown[0]!r}; expected some of {','.join(known)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    known = {"networks": NETWORKS, "optimizers": tuple(OPTIMIZERS), "codecs": CODECS}
    known |= {"workers": tuple(map(str, WORKERS)), "depths": tuple(map(str, DEPTHS))}
    for name, values in known.items():
        parser.add_argument(f"--{name}", default="", help=f"some of {','.join(values)}")
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args()
    chosen = {name: part_of_text(getattr(options, name), values) for name, values in known.items()}
    problems = [(network, optimizer) for network in chosen["networks"] for optimizer in chosen["optimizers"]]
    runs, seeds = Runs(Kept(kept_at("pipelined"))), range(options.seeds)
    runs.do([Case(*problem, rate, seed) for problem in problems for rate in LADDER for seed in TUNING_SEEDS])
    best = {problem: best_rate(runs, *problem) for problem in problems}
    ways = [(int(depth), codec) for codec in chosen["codecs"] for depth in chosen["depths"]]
    workers = list(map(int, chosen["workers"]))

    def cases(problem: tuple[str, str], share: float, count: int, depth: int, codec: str) -> list[Case]:
        return [Case(*problem, share * best[problem], seed, count, depth, codec) for seed in seeds]

    shares = 0.5, 1.0
    every = [
        c for p in problems for s in shares for n in workers for way in ways for c in cases(p, s, n, *way)
    ]
    runs.do([*every, *{replace(case, workers=1, depth=1, codec="f32"): None for case in every}])
    rows = [
        ["problem", "of the best rate", *(f"{c}, depth {d}, {'/'.join(map(str, workers))}" for d, c in ways)]
    ]
    worst: dict[tuple[float, str], float] = {}
    for problem in problems:
        for share in shares:
            cells = []
            for way in ways:
                found = [ratio(runs, cases(problem, share, count, *way)) for count in workers]
                worst[share, way[1]] = max(worst.get((share, way[1]), 0.0), *found)
                cells.append(" / ".join(f"{one:.2f}" for one in found))
            lr = share * best[problem] * OPTIMIZERS[problem[1]].lr
            rows.append([f"{problem[0]}, {problem[1]} {lr:.3g}", f"{share:g}", *cells])
    closing = []
    for (share, codec), most in sorted(worst.items()):
        bound = BOUND[codec] if share < 1.0 else BOUND_AT_BEST
        verdict = "met" if most <= bound else "**missed**"
        closing.append(
            f"- {verdict}: {codec}, {share:g} of the best rate: {most:.2f} (threshold: <= {bound})"
        )
    text = "\n".join([f"{machine()}, {options.seeds} seeds.\n", table(rows), "", *closing])
    print(text)
    if options.save:
        save_table("pipeline", text, PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
