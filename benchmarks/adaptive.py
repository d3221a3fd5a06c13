"""A global batch that grows with the gradients' noise, against batches that stay, on an emulated cluster.

    python benchmarks/adaptive.py [--seeds 3] [--save]
    python benchmarks/adaptive.py --adaptdl [--save]    (adaptdl 0.2.11 installed)

Four ranks, all in this process, train on the digits until a loss is reached; time is virtual, that of devices
which take 1, 1.4, 2 and 2.9 times as long. The noise scale is measured as GradientNoise does; AdaptiveBatch's
own rules choose the batch and the learning rate. Batches that stay have the fastest split and the same rule
for the learning rate (AdaScale, from the batch at first). With --save the table goes to
bench-out/. With --adaptdl it is compared with AdaptDL's rule, of its own package, which knows one batch for
all ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import median
from typing import Any

import record
import torch
from torch import nn

from pyps.solver import Line
from pyps.solver.online.decide import Bounds, Split, best_split, round_seconds
from pyps.solver.online.global_batch import BoundedCost, learning_rate_factor, next_split
from pyps.solver.systems.goodput import StatisticalEfficiency
from pyps.torch.schedule import proportional_split, round_sizes
from pyps.worker.data.sampling import permutation

PACES, FIXED_SECONDS, SAMPLE_SECONDS, OVERHEAD_SECONDS = (1.0, 1.4, 2.0, 2.9), 0.020, 0.002, 0.013
COSTS = [Line(pace * FIXED_SECONDS, pace * SAMPLE_SECONDS) for pace in PACES]
FIRST, FIXED, MEMORY = 32, (32, 64, 128, 256, 512), 0.95
TARGET, RATE = 0.08, 0.2
MOST_SAMPLES = 1.05
BOUNDS = [Bounds(most=max(FIXED), required=True) for _ in COSTS]
DEVICES = [BoundedCost(cost, bounds) for cost, bounds in zip(COSTS, BOUNDS, strict=True)]


@dataclass
class Reached:
    """Samples and virtual seconds to the target; the batches on the way."""

    samples: float
    seconds: float
    batches: list[int]


def adaptdl_split(noise: Noise) -> Split:
    """Equal batches of AdaptDL's largest goodput, by the noise and the times that AdaptiveBatch gets, too."""
    from adaptdl.goodput import GoodputFunction  # type: ignore[import-not-found]

    slow, ranks = max(PACES), len(PACES)
    network = OVERHEAD_SECONDS, 1e-9, OVERHEAD_SECONDS, 1e-9
    times = (slow * FIXED_SECONDS, slow * SAMPLE_SECONDS, *network, 1.0)
    variance = max(noise.scale, 1e-9) / FIRST  # of a gradient of FIRST samples, over its square
    goodput = GoodputFunction(times, (1.0, variance), FIRST)
    best = max(range(FIRST // ranks, max(FIXED) // ranks + 1), key=lambda b: float(goodput(1, ranks, b, 0)))
    return [best] * ranks


class Noise:
    """GradientNoise of ranks in one process."""

    def __init__(self) -> None:
        self._noise = self._signal = 0.0

    @property
    def scale(self) -> float:
        return max(self._noise, 0.0) / self._signal if self._signal > 0 else 0.0

    def take(self, own: Split, squares: Sequence[float], square: float) -> None:
        total = sum(own)
        noise = (sum(b * s for b, s in zip(own, squares, strict=True)) - total * square) / (len(own) - 1)
        self._noise = MEMORY * self._noise + (1 - MEMORY) * noise
        self._signal = MEMORY * self._signal + (1 - MEMORY) * (square - noise / total)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; 1 if a threshold is missed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=120, help="at most")
    parser.add_argument("--adaptdl", action="store_true", help="against AdaptDL's rule")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ways: dict[str, dict[str, Any]] = {f"{batch}": {"batch": batch, "least": None} for batch in FIXED}
    ways |= {"adaptive": {"batch": FIRST, "least": 0.0}}
    ways |= {"adaptive, efficiency 0.95": {"batch": FIRST, "least": 0.95}}
    if options.adaptdl:
        first: dict[str, Any] = {"batch": FIRST, "least": 0.0}
        ways = {"AdaptiveBatch": first, "AdaptDL's rule": first | {"adaptdl": True}}
        ways |= {"AdaptDL's rule, batches that fit": first | {"adaptdl": True, "fits": True}}
    found = {
        name: [train(options.epochs, seed, **way) for seed in range(options.seeds)]
        for name, way in ways.items()
    }
    if options.adaptdl:
        rows = record.table(rows_of(found)[0])
        text = f"{rows}\n\nDigits to a loss of {TARGET}, {options.seeds} seeds, medians"
        print(text)
        if options.save:
            record.save_table("adaptdl", f"{text}; {record.machine()}.", "peers.md")
        return 0
    well, text = summary(found, options.seeds)
    print(text, flush=True)
    if options.save:
        record.save_table("adaptive", f"{record.machine()}.\n\n{text}")
    return 0 if well else 1


def train(
    epochs: int, seed: int, batch: int, least: float | None, adaptdl: bool = False, fits: bool = False
) -> Reached:
    """Train to the target. least: the least efficiency of a batch that grows; None for one that stays.
    adaptdl: by its rule. fits: with our split of its batch.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    inputs, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    split: Split = best_split(batch, COSTS, BOUNDS)
    if adaptdl and not fits:
        split = [batch // len(COSTS)] * len(COSTS)
    rate, noise, batches = RATE, Noise(), [batch]
    samples, seconds, before = 0, 0.0, (0, 0.0, inf)
    for epoch in range(epochs):
        order, position = [int(k) for k in permutation(seed, epoch, len(labels))], 0
        for size in round_sizes(len(labels), split):
            own, rows = proportional_split(size, split), order[position : position + size]
            step(model, inputs[rows], labels[rows], own, rate, noise)
            position, samples = position + size, samples + size
            seconds += round_seconds(COSTS, own) + OVERHEAD_SECONDS
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(inputs), labels))
        if loss <= TARGET:
            share = (log(before[2]) - log(TARGET)) / (log(before[2]) - log(loss)) if epoch else 1.0
            then = (old + share * (new - old) for old, new in zip(before, (samples, seconds), strict=False))
            return Reached(next(then), next(then), batches)
        before = samples, seconds, loss
        if least is not None:
            statistical = StatisticalEfficiency(noise.scale, FIRST)
            if adaptdl:
                split = adaptdl_split(noise)
                split = best_split(sum(split), COSTS, BOUNDS) if fits else split
            else:
                split = next_split(split, DEVICES, statistical, max(FIXED), OVERHEAD_SECONDS, least)
            batches += [sum(split)] if sum(split) != batches[-1] else []
        rate = RATE * learning_rate_factor("adascale", FIRST, sum(split), noise.scale)
    return Reached(inf, inf, batches)


def step(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, own: Split, rate: float, noise: Noise
) -> None:
    """One step of SGD on a round's samples, each rank's in turn."""
    parameters = list(model.parameters())
    total, squares, first = [torch.zeros_like(p) for p in parameters], [], 0
    for batch in own:
        part = slice(first, first + batch)
        loss = nn.functional.cross_entropy(model(inputs[part]), labels[part])
        gradients = torch.autograd.grad(loss, parameters)
        squares.append(sum(float(g.double().square().sum()) for g in gradients))
        torch._foreach_add_(total, gradients, alpha=batch / sum(own))
        first += batch
    noise.take(own, squares, sum(float(g.double().square().sum()) for g in total))
    with torch.no_grad():
        torch._foreach_add_(parameters, total, alpha=-rate)


def rows_of(found: dict[str, list[Reached]]) -> tuple[list[list[str]], dict[str, tuple[float, float]]]:
    """The table, and the medians by way: samples, seconds."""
    rows = [["global batch", "samples to the loss", "seconds to it", "batches of the first seed"]]
    middle = {}
    for name, runs in found.items():
        middle[name] = median(run.samples for run in runs), median(run.seconds for run in runs)
        samples, seconds = middle[name]
        rows.append([name, f"{samples:,.0f}", f"{seconds:.1f}", " ".join(map(str, runs[0].batches))])
    return rows, middle


def summary(found: dict[str, list[Reached]], seeds: int) -> tuple[bool, str]:
    rows, middle = rows_of(found)
    fixed = [middle[str(batch)] for batch in FIXED]
    quickest, fewest = min(fixed, key=lambda one: one[1]), min(fixed)[0]
    samples, seconds = middle["adaptive"]
    bounded = middle["adaptive, efficiency 0.95"][0]
    text = (
        f"{record.table(rows)}\n\nDigits to a loss of {TARGET}, {seeds} seeds, medians. The adaptive batch "
        f"takes {seconds / quickest[1]:.2f} of the quickest fixed one's time (threshold: 1) and "
        f"{samples / quickest[0]:.2f} of its samples (threshold: {MOST_SAMPLES}), {samples / fewest:.2f} of "
        f"the fewest of any; with an efficiency of 0.95, {bounded / fewest:.2f} of those."
    )
    return seconds < quickest[1] and samples <= MOST_SAMPLES * quickest[0], text


if __name__ == "__main__":
    sys.exit(main())
