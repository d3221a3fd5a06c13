"""Sequences of unlike length among ranks: python benchmarks/outside/lengths.py [--seeds 20] [--save].

`production` has the micro-batches of a job in production, whose sequences are unlike (traces/bytedance.csv),
on ranks of one speed: as they were, and shared by cost, as many to each rank. The other rows draw lengths
from a log-normal distribution, cut off at 4,096 tokens, for a cost whose attention takes half of the longest
sequence's time; ranks get samples by their speed, in the order of the draw, or shared by cost with the same
numbers of samples. Printed: the slowest rank's time over the mean, the mean over steps, and the worst step.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from planners import record

from pyps.solver.lengths import LengthCost, shares_by_cost
from pyps.torch.schedule import proportional_split

TRACE = Path(__file__).resolve().parent / "traces" / "bytedance.csv"
LONGEST = 4096
COST = LengthCost(1e-3, 1e-5, 1e-5 / LONGEST)
CLUSTERS = {
    "8 alike, 128 samples": ((1.0,) * 8, 128),
    "4 and 4 half as fast, 96": ((1.0,) * 4 + (0.5,) * 4, 96),
    "1, 2 and 4 times as slow, 64": ((1.0, 1.0, 0.5, 0.25), 64),
    "8 alike, 32 samples": ((1.0,) * 8, 32),
}


def production() -> Iterator[list[list[float]]]:
    """The seconds of each rank's micro-batches, by step."""
    steps: dict[str, dict[str, list[float]]] = {}
    with open(TRACE, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            steps.setdefault(row["step"], {}).setdefault(row["rank"], []).append(float(row["seconds"]))
    yield from (list(ranks.values()) for ranks in steps.values())


def slowest(shares: Sequence[Sequence[int]], costs: np.ndarray, speeds: Sequence[float]) -> float:
    """The longest time of a rank over the mean."""
    seconds = np.array([costs[list(one)].sum() for one in shares]) / np.array(speeds)
    return float(seconds.max() / seconds.mean())


def tried(costs: np.ndarray, counts: Sequence[int], speeds: Sequence[float]) -> tuple[float, float]:
    """The slowest over the mean: in order, and shared by cost."""
    ends = np.cumsum(counts)
    in_order = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    by_cost = shares_by_cost(costs, speeds, counts)
    return slowest(in_order, costs, speeds), slowest(by_cost, costs, speeds)


def row(name: str, found: Sequence[tuple[float, float]]) -> list[str]:
    before, after = np.array(found).T
    return [name, str(len(found)), f"{before.mean():.3f}", f"{after.mean():.3f}", f"{after.max():.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    real = [
        tried(np.concatenate(ranks), [len(one) for one in ranks], [1.0] * len(ranks))
        for ranks in production()
    ]
    rows = [["samples", "steps", "in order", "by cost", "worst step"], row("production", real)]
    for name, (speeds, total) in CLUSTERS.items():
        found = []
        for seed in range(options.seeds):
            draw = np.random.default_rng(seed).lognormal(6.0, 1.0, total)
            counts = proportional_split(total, tuple(round(100 * s) for s in speeds))
            found.append(tried(COST.seconds(np.clip(draw, 16, LONGEST)), counts, speeds))
        rows.append(row(name, found))
    text = f"{record.machine()}. {options.seeds} seeds.\n\n{record.table(rows)}"
    print(text)
    if options.save:
        record.save_table("lengths", text)


if __name__ == "__main__":
    main()
