"""One learning rate under every policy: python benchmarks/learning_rate.py [--seeds 5] [--save].

Trains the script of docs/how-to/train-async.md and three more, one of them a ResNet with batch normalization,
with each policy's default settings, at the rate and momentum that they have under bsp, in virtual time (so
the machine's speed does not matter): planned batches on unlike workers, steps that jitter by 10 %. Prints the
training loss after as many samples, and its ratio to bsp's; where that is above the bound, the largest of
some smaller step sizes that keeps it. --counts: whose samples each policy trains, on the unlike workers with
equal batches.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from record import Kept, machine, save_table, table
from sklearn.datasets import load_digits

from pyps import Hyper
from pyps.formats import Jitter
from pyps.simulate import Objective, Scenario, SimWorker, TorchObjective, simulate
from pyps.store.policies import Policy
from pyps.tasks import TrainingTask
from pyps.worker.data.sampling import indices

Array = NDArray[np.float64]
UNLIKE = 32  # workers with equal batches: four, and 28 that are ten times as slow
BATCHES = {3: (48, 32, 16), 8: (24, 20, 16, 12, 8, 8, 4, 4), UNLIKE: (8,) * UNLIKE}
PAGE = "learning-rate.md"
BOUND, BOUND_UNLIKE = 1.5, 1.05  # of bsp's loss; on unlike workers with equal batches
SMALLER = (2.0, 4.0, 8.0)  # step sizes to try where it is exceeded


class Perceptron:
    """An objective: a ReLU network, on targets by squares or on classes by cross-entropy."""

    def __init__(
        self, sizes: Sequence[int], x: NDArray[np.float32], y: NDArray[np.generic], seed: int
    ) -> None:
        self.sizes, self.x, self.y, self.seed = tuple(sizes), x, y, seed
        shapes = [(a + 1, b) for a, b in pairwise(self.sizes)]
        ends = np.cumsum([0, *(a * b for a, b in shapes)]).tolist()
        self._places = [(slice(*span), shape) for span, shape in zip(pairwise(ends), shapes, strict=True)]

    def start(self) -> Array:
        draw = np.random.default_rng(self.seed)
        layers = [(draw.uniform(-1, 1, (a + 1, b)) / math.sqrt(a)).ravel() for a, b in pairwise(self.sizes)]
        return np.concatenate(layers)

    def gradient(self, w: Array, first: int, count: int) -> tuple[Array, float]:
        rows = indices(first, count, len(self.x), self.seed)
        layers, inputs = self._layers(w), [self.x[rows]]
        for k, layer in enumerate(layers):
            z = inputs[-1] @ layer[:-1] + layer[-1]
            inputs.append(np.maximum(z, 0) if k + 1 < len(layers) else z)
        loss, d = self._loss(inputs[-1], self.y[rows])
        gradient = np.empty(w.size)
        for k in reversed(range(len(layers))):
            place, shape = self._places[k]
            found = gradient[place].reshape(shape)
            found[:-1], found[-1] = inputs[k].T @ d, d.sum(axis=0)
            if k:
                d = (d @ layers[k][:-1].T) * (inputs[k] > 0)
        return gradient, loss

    def loss(self, w: Array) -> float:
        with np.errstate(all="ignore"):
            return self._loss(self.outputs(w, self.x), self.y)[0]

    def outputs(self, w: Array, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Before the softmax, if there is one: (samples, outputs)."""
        h, layers = x, self._layers(w)
        for k, layer in enumerate(layers):
            h = h @ layer[:-1] + layer[-1]
            h = np.maximum(h, 0) if k + 1 < len(layers) else h
        return h

    def _layers(self, w: Array) -> list[NDArray[np.float32]]:
        flat = w.astype(np.float32)
        return [flat[place].reshape(shape) for place, shape in self._places]

    def _loss(self, z: NDArray[np.float32], y: NDArray[np.generic]) -> tuple[float, NDArray[np.float32]]:
        if y.ndim > 1:
            return float(np.mean((z - y) ** 2)), 2 * (z - y) / z.size
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        at = np.arange(len(y)), y
        loss = float(-np.log(p[at] + 1e-30).mean())
        p[at] -= 1
        return loss, p / np.float32(len(y))


@dataclass(frozen=True)
class Problem:
    title: str
    optimizer: str
    hyper: Hyper
    batches: int  # global batches to train

    def objective(self, seed: int) -> Objective:
        if self.title == "ResNet":
            return resnet(seed)
        if self.title == "README":
            draw = np.random.default_rng(0)
            x, y = draw.standard_normal((512, 16)), draw.standard_normal((512, 4))
            return Perceptron((16, 64, 4), x.astype(np.float32), y.astype(np.float32), seed)
        x, y = load_digits(return_X_y=True)
        sizes = (64, 96, 96, 10) if self.optimizer == "momentum" else (64, 32, 10)
        return Perceptron(sizes, (x / 16).astype(np.float32), y, seed)


PROBLEMS = (
    Problem("README", "momentum", Hyper(lr=0.05, momentum=0.9), 400),
    Problem("digits, SGD", "sgd", Hyper(lr=0.3), 250),
    Problem("digits, momentum", "momentum", Hyper(lr=0.05, momentum=0.9), 250),
    Problem("digits, AdamW", "adamw", Hyper(lr=0.003, weight_decay=0.01), 250),
    Problem("ResNet", "momentum", Hyper(lr=0.05, momentum=0.9, weight_decay=5e-4), 60),
)


def resnet(seed: int) -> TorchObjective:
    """Two residual blocks with batch normalization on the digits; its loss is one of batch statistics."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.way = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu(self.way(x) + self.short(x))

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    model = nn.Sequential(Block(1, 8, 1), Block(8, 16, 2), *ends)
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(y)
    task = TrainingTask(model, lambda count: (images[:count], labels[:count]), nn.functional.cross_entropy)
    return TorchObjective(task, images, labels, seed)


def cluster(count: int) -> Scenario:
    """Unlike workers with the batches that a plan gives them: all steps take one second, and jitter. With
    equal batches those of the slow take ten.
    """
    jitter = Jitter(sigma=0.1)
    times = [10.0 if count == UNLIKE and k >= 4 else 1.0 for k in range(count)]
    return Scenario(
        tuple(
            SimWorker(f"w{k}", b, lambda _, t=t: t, jitter)  # type: ignore[misc]
            for k, (b, t) in enumerate(zip(BATCHES[count], times, strict=True))
        )
    )


def trained(case: tuple[Problem, int, str, int]) -> float:
    """The training loss at the end; not finite: it diverged."""
    problem, count, policy, seed = case
    with np.errstate(all="ignore"):
        result = simulate(
            cluster(count),
            policy,
            iterations=problem.batches,
            measure_every=problem.batches * sum(BATCHES[count]),
            seed=seed,
            objective=problem.objective(seed),
            lr=problem.hyper,
            optimizer=problem.optimizer,
        )
    return result.loss


def smaller(case: tuple[Problem, int, str, int], seeds: Sequence[int], most: float) -> str:
    """The first smaller step size whose median loss is at most that."""
    problem, count, policy, _ = case
    for factor in SMALLER:
        hyper = replace(problem.hyper, lr=problem.hyper.lr / factor)
        losses = [trained((replace(problem, hyper=hyper), count, policy, seed)) for seed in seeds]
        if statistics.median(losses) <= most:
            return f"{hyper.lr:.2g} does"
    return f"down to {problem.hyper.lr / SMALLER[-1]:.2g} none does"


def counts(policies: Sequence[str], batches: int) -> str:
    """A table: by policy, the fast workers' share of all samples, and the least of a worker over the most."""
    rows = [["policy", "four fast workers", "least over most"]]
    for policy in policies:
        samples = [rank.samples for rank in simulate(cluster(UNLIKE), policy, iterations=batches).ranks]
        least, share = min(samples) / max(samples), sum(samples[:4]) / sum(samples)
        rows.append([f"`{policy}`", f"{100 * share:.1f} %", f"{least:.2f}"])
    return f"{machine()}, {batches} global batches.\n\n{table(rows)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[3, 8], choices=sorted(BATCHES))
    parser.add_argument("--policies", nargs="+", default=[*Policy.known, "asp:lookahead=false"])
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    parser.add_argument("--counts", action="store_true", help="whose samples are trained, instead of losses")
    parser.add_argument("--keep", type=Path, help="a file of what was trained, to go on with when cut off")
    options = parser.parse_args()
    if options.counts:
        text = counts([*Policy.known, "saps:late=drop"], batches=100)
        print(text)
        if options.save:
            save_table("counts", text, PAGE)
        return 0
    seeds, bound = range(options.seeds), BOUND_UNLIKE if options.workers == [UNLIKE] else BOUND
    kinds = [(p, n) for p in PROBLEMS for n in options.workers if n != UNLIKE or "digits" in p.title]
    cases = [(p, n, policy, seed) for p, n in kinds for policy in options.policies for seed in seeds]
    names, kept = {case: f"{case[0].title}, {case[1:]}" for case in cases}, Kept(options.keep)
    missing = [case for case in cases if kept.get(names[case]) is None]
    with multiprocessing.get_context("spawn").Pool() as pool:
        for case, loss in zip(missing, pool.imap(trained, missing), strict=True):
            kept.add(names[case], loss)
    losses = {case: kept.get(names[case]) for case in cases}
    rows = [["policy", *(f"{p.title}, {n}" for p, n in kinds)]]
    worst, spread, late = 0.0, "", []
    for policy in options.policies:
        cells = []
        for p, n in kinds:
            found = [losses[p, n, policy, seed] / losses[p, n, "bsp", seed] for seed in seeds]
            ratio = statistics.median(found) if np.isfinite(found).all() else math.inf
            if policy in Policy.known:
                if ratio > worst:
                    worst = ratio
                    spread = f"`{policy}`, {p.title}, {n}: {min(found):.2f} to {max(found):.2f} by seed"
                if ratio > bound:
                    least = statistics.median(losses[p, n, "bsp", seed] for seed in seeds)
                    rate = smaller((p, n, policy, 0), seeds, bound * least)
                    late.append(f"- `{policy}`, {p.title}, {n} workers: {ratio:.2f}; lr {rate}")
            loss = statistics.median(losses[p, n, policy, seed] for seed in seeds)
            cells.append(f"{loss:.3g} ({ratio:.2f})")
        rows.append([f"`{policy}`", *cells])
    verdict = "met" if not late else "**missed**"
    closing = (
        f"- {verdict}: worst loss over that of `bsp`, by default, {options.seeds} seeds: {worst:.2f} "
        f"({spread}; threshold: <= {bound})"
    )
    text = "\n".join([f"{machine()}.\n", table(rows), "", closing, *late])
    print(text)
    if options.save:
        save_table("unlike" if options.workers == [UNLIKE] else "losses", text, PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
