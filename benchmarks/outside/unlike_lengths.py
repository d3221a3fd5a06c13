"""Sequences of unlike length among ranks: python benchmarks/outside/unlike_lengths.py [--seeds 20] [--save].

`production` has the micro-batches of a job in production, whose sequences are unlike (traces/bytedance.csv),
on ranks of one speed: as they were, and shared by cost. The other rows draw lengths from a log-normal
distribution, cut off at so many tokens, for a cost whose attention takes half of the time of a sequence of
4,096; a round has 16 samples a rank. Unlike ranks are 1, 2 or 4 times as slow, with attention that is 0.5 to
2 times as slow again. Ranks get samples in the order of the draw, as many as their share, or by cost.

Printed: the slowest rank's time over the mean, the mean over rounds, and the worst; the share of rounds with
a sample that takes longer alone than the mean; and the worst time over the least that any shares could take,
as far as that is known.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from planners import record

from pyps.formats import LengthCost
from pyps.solver.costs import Ints
from pyps.solver.lengths import SampleLengths, shares_by_cost
from pyps.torch.schedule import proportional_split

TRACE = Path(__file__).resolve().parent / "traces" / "bytedance.csv"
RANKS = 8, 16, 32, 64
PER_RANK = 16  # samples of a round
HALF = 4096  # tokens of which attention takes half
SPREADS = (0.6, 2048), (1.0, 2048), (1.0, 8192), (1.4, 8192), (1.4, 32768)  # of the logarithm; the longest
ROUNDS = 2  # of a draw

Found = tuple[float, float, float, bool]  # in order, by cost, that over the bound, whether one is too long


def least_longest(ticks: Ints) -> float:
    """A time below which no shares end: that of the dearest sample where it is fastest, or that of all
    samples in any parts, bounded by prices on the ranks' time (weak duality).
    """
    prices = 1 / ticks.sum(axis=1)
    together = (ticks * (prices / prices.sum())[:, None]).min(axis=0).sum()
    return max(float(ticks.min(axis=0).max()), float(together))


def production() -> Iterator[Found]:
    """The micro-batches of each step, whose seconds are known, shared anew."""
    steps: dict[str, dict[str, list[float]]] = {}
    with open(TRACE, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            steps.setdefault(row["step"], {}).setdefault(row["rank"], []).append(float(row["seconds"]))
    for ranks in steps.values():
        ticks = np.tile(np.rint(1e9 * np.concatenate([*ranks.values()])).astype(np.int64), (len(ranks), 1))
        yield judged(ticks, [len(one) for one in ranks.values()])


def drawn(spread: float, longest: int, ranks: int, unlike: bool, seed: int) -> Iterator[Found]:
    draw = np.random.default_rng(seed)
    count = ranks * PER_RANK
    tokens = np.clip(draw.lognormal(6.0, spread, ROUNDS * count), 16, longest).astype(np.int64)
    known = SampleLengths(tokens, len(tokens))
    factors = draw.uniform(0.5, 2, ranks) if unlike else np.ones(ranks)
    costs = [
        LengthCost(fixed_seconds=1e-4, per_token_seconds=1e-5, per_square_seconds=1e-5 / HALF * f)
        for f in factors
    ]
    speeds = draw.choice([4, 2, 1], ranks).tolist() if unlike else [1] * ranks
    split = proportional_split(round(count * known.mean), tuple(speeds))
    for first in range(0, len(tokens), count):
        worth = [
            known.tokens_worth(cost, np.arange(first, first + count)) / share
            for cost, share in zip(costs, split, strict=True)
        ]
        yield judged(np.rint(2**40 * np.array(worth)).astype(np.int64), proportional_split(count, split))


def judged(ticks: np.ndarray, counts: Sequence[int]) -> Found:
    """ticks: of each sample on each rank. counts: the samples of each rank in order."""
    ranks = len(ticks)
    in_order = slowest(ticks, np.repeat(np.arange(ranks), counts))
    owner = shares_by_cost(ticks, [1] * ranks)
    ends = np.array([row[owner == rank].sum() for rank, row in enumerate(ticks)])
    too_long = ticks.min(axis=0).max() > ends.mean()
    return in_order, slowest(ticks, owner), float(ends.max() / least_longest(ticks)), bool(too_long)


def slowest(ticks: np.ndarray, owner: np.ndarray) -> float:
    """The longest time of a rank over the mean."""
    ends = np.array([row[owner == rank].sum() for rank, row in enumerate(ticks)])
    return float(ends.max() / ends.mean())


def row(name: str, ranks: str, found: Sequence[Found]) -> list[str]:
    before, after, over, too_long = np.array(found, np.float64).T
    fits = after[too_long == 0]
    return [
        name,
        ranks,
        f"{before.mean():.3f}",
        f"{after.mean():.3f}",
        f"{after.max():.3f}",
        f"{too_long.mean():.0%}",
        f"{fits.max():.3f}" if len(fits) else "",
        f"{over.max():.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = [
        ["lengths", "ranks", "in order", "by cost", "worst", "one too long", "worst of others", "over bound"],
        row("production", "4 alike", list(production())),
    ]
    for spread, longest in SPREADS:
        for ranks in RANKS:
            for unlike in (False, True):
                found = [
                    one
                    for seed in range(options.seeds)
                    for one in drawn(spread, longest, ranks, unlike, seed)
                ]
                name = f"spread {spread}, to {longest:,}"
                rows.append(row(name, f"{ranks} {'unlike' if unlike else 'alike'}", found))
    text = f"{record.machine()}. {options.seeds} seeds.\n\n{record.table(rows)}"
    print(text)
    if options.save:
        record.save_table("lengths", text)


if __name__ == "__main__":
    main()
