"""Plans made from half of the points of generated curves, valued on the whole curves.

    python benchmarks/outside/generated.py [--seeds 20] [--family NAME] [--save]
    python benchmarks/outside/generated.py --cliffs [--seeds 20] [--save]

The planner sees every second point of each device's curve. Its split is timed on the whole curve, without the
noise of its points, and compared with the fastest split of the whole curve: 1.00 is the best that can be.
measured.py does this with what others measured; planners.py has the rivals. Families:

    noisy     32 batches, 5 % noise: a line with an efficiency that wanders by some 5 %
    stepped   32 batches, 1 % noise: work comes in tiles of 8, 16 or 32 samples
    kneed     32 batches, 3 % noise: small batches do not fill the device
    tails     32 batches, 2 % noise: above some batch the memory slows every further sample
    sparse    5 batches, each twice the one before, 3 % noise: a knee or a tail, and a wandering efficiency

`waves 5` to `multiples 9` show the planner 5 or 9 batches, evenly on a log scale, with 3 % noise, and one in
thirty takes half as long again: waves about a line, tiles, cliffs (above some batch all takes 1.2 to 1.8
times as long), a cache that is left (a tail), a wandering efficiency, and multiples: batches that are not
multiples of 8 take 1.15 to 1.5 times as long. Of such devices the planner sees the sizes that pyps-profile
measures: round ones, and one of 5 or two of 9 just below.

--cliffs says how good a plan can be that does not know where between two points a cliff is, and knows all
else exactly: the points without noise, the curve on both sides, how high the cliff is. It counts on a cliff
after some share of the gap, and the table has several shares.

A batch that the planner did not see lies within the fit's 90 % band, or not: `in band` counts these.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from planners import PLANNERS, Known, Measured, even, iteration, plan, record

from pyps.errors import Infeasible
from pyps.solver import Cost, Line, Table

CLUSTERS = 10  # a seed
OFF = 0.20  # relative: a prediction further off is counted
POINTS_AND_NOISE = {
    "noisy": (32, 0.05),
    "stepped": (32, 0.01),
    "kneed": (32, 0.03),
    "tails": (32, 0.02),
    "sparse": (5, 0.03),
}
KINDS = ("waves", "tiles", "cliffs", "cache", "wander", "multiples")
SPREAD = {f"{kind} {seen}": seen for kind in KINDS for seen in (5, 9)}
MULTIPLE = 8
SPREAD_NOISE, OUTLIERS, OUTLIER = 0.03, 0.03, 1.5
FAMILIES = (*POINTS_AND_NOISE, *SPREAD)
DENSE = ("noisy", "stepped", "kneed", "tails")
BEHIND, DENSE_MEAN, SPARSE_MEAN, DENSE_OFF, P90 = 0.0, 1.01, 1.03, 0.01, 1.10  # what is promised
BANDS = (0.85, 0.95)
LEVEL = 0.001  # means and quantiles that differ by less are the same


@dataclass(frozen=True)
class Curve:
    """A device: what the planner sees, and the seconds of any batch up to the largest.

    left_out: batches that it does not see. off: how many times longer a batch takes that is no multiple.
    """

    seen: Measured
    left_out: list[int]
    truth: Cost
    off: float = 1.0

    @staticmethod
    def half_seen(points: Sequence[tuple[int, float]], truth: Cost) -> Curve:
        """The planner sees every second point."""
        return Curve(tuple(points[::2]), [batch for batch, _ in points[1::2]], truth)

    @property
    def largest(self) -> int:
        return max(self.seen[-1][0], *self.left_out, 1)

    def seconds(self, batch: int) -> float:
        """The true ones."""
        return self.truth.seconds(batch) * (self.off if batch % MULTIPLE else 1.0)


@dataclass(frozen=True)
class Case:
    """One cluster: for each rival the iteration's time over the fastest; what the planner predicted."""

    over: dict[str, float]
    predicted: float  # the planner's own iteration, over the true one
    misses: list[float]  # relative errors at the points that it did not see
    inside: list[bool]  # whether each of these is within the band


EVEN = "even"
SHARES = 0.0, 0.1, 0.2, 0.3, 0.5


def all_but_the_place(curve: Curve, share: float) -> Known:
    """The truth of a curve of cliffs, but the cliff after this share of the gap in which it is."""
    batch = np.arange(1, curve.largest + 1)
    seconds = np.array([curve.truth.seconds(int(b)) for b in batch])
    late = slice(len(batch) // 4, None)  # no cliff is earlier
    last = len(batch) // 4 + int(np.argmax(np.diff(seconds[late])))  # place of the last batch below the cliff
    low = max(b for b, _ in curve.seen if b <= batch[last])
    high = min([b for b, _ in curve.seen if b > batch[last]], default=curve.largest)
    factor = seconds[last + 1] / (2 * seconds[last] - seconds[last - 1])
    line = np.where(batch > batch[last], seconds / factor, seconds)
    return Known(_table(batch, np.where(batch > low + share * (high - 1 - low), factor, 1.0) * line))


# ---- curves ----


def generated(family: str, luck: np.random.Generator) -> Curve:
    """A device of a family: its points carry noise, its truth does not."""
    largest = int(2 ** luck.uniform(6, 9))
    slope = float(np.exp(luck.uniform(np.log(2e-4), np.log(5e-3))))
    fixed = slope * largest * luck.uniform(0.02, 0.5)
    batch = np.arange(1, largest + 1)
    seconds = fixed + slope * batch
    count, noise = POINTS_AND_NOISE[family]
    kind = luck.choice(["kneed", "tails"]) if family == "sparse" else family
    if kind == "stepped":
        tile = int(luck.choice([8, 16, 32]))
        seconds = fixed + slope * tile * np.ceil(batch / tile)
    if kind == "kneed":
        seconds = np.maximum(seconds, seconds[int(largest * luck.uniform(0.1, 0.5))])
    if kind == "tails":
        start = largest * luck.uniform(0.4, 0.8)
        seconds = seconds + slope * luck.uniform(0.5, 2.0) * np.maximum(0, batch - start)
    if family in ("noisy", "sparse"):
        seconds = np.maximum.accumulate(seconds * _wandering(batch, luck))
    spaced = np.linspace(1, largest, count) if family in DENSE else largest / 2.0 ** np.arange(count)[::-1]
    chosen = np.unique(spaced.round().astype(int))
    times = seconds[chosen - 1] * np.exp(noise * luck.standard_normal(len(chosen)))
    points = [(int(b), float(t)) for b, t in zip(chosen, times, strict=True)]
    return Curve.half_seen(points, _table(batch, seconds))


def spread(family: str, luck: np.random.Generator) -> Curve:
    """A device of a family whose every second point is one of 5 or 9 on a log scale."""
    largest = int(2 ** luck.uniform(6, 9))
    slope = float(np.exp(luck.uniform(np.log(2e-4), np.log(5e-3))))
    batch = np.arange(1, largest + 1)
    work, kind = batch.astype(float), family.split()[0]
    if kind == "waves":
        length = largest / luck.uniform(3, 10)
        work = batch + 0.7 * length / (2 * np.pi) * np.sin(2 * np.pi * batch / length)
    if kind == "tiles":
        tile = int(luck.choice([8, 16, 32]))
        work = tile * np.ceil(batch / tile)
    if kind == "cache":
        work = batch + luck.uniform(0.3, 1.5) * np.maximum(0, batch - largest * luck.uniform(0.2, 0.6))
    seconds = slope * (largest * luck.uniform(0.02, 0.5) + work)
    if kind == "cliffs":
        seconds = seconds * np.where(batch > largest * luck.uniform(0.3, 0.8), luck.uniform(1.2, 1.8), 1.0)
    if kind == "wander":
        seconds = np.maximum.accumulate(seconds * _wandering(batch, luck))
    spaced = np.geomspace(largest / 2 ** min(6, SPREAD[family] - 1), largest, 2 * SPREAD[family] - 1)
    chosen, off = np.unique(spaced.round().astype(int)), 1.0
    left_out = chosen[1::2].tolist()
    chosen = chosen[::2]
    if kind == "multiples":
        off = float(luck.uniform(1.15, 1.5))
        chosen, left_out = _round_sizes(largest, SPREAD[family])
        seconds = np.where(batch % MULTIPLE, off, 1.0) * seconds
    noise = np.exp(SPREAD_NOISE * luck.standard_normal(len(chosen)))
    times = seconds[chosen - 1] * noise * np.where(luck.random(len(chosen)) < OUTLIERS, OUTLIER, 1.0)
    points = [(int(b), float(t)) for b, t in zip(chosen, times, strict=True)]
    smooth = np.where(batch % MULTIPLE, seconds / off, seconds)
    return Curve(tuple(points), left_out, _table(batch, smooth), off)


def _round_sizes(largest: int, count: int) -> tuple[np.ndarray, list[int]]:
    """Return as many sizes as pyps-profile's rule makes, and the multiples in the middle between them."""
    below = 1 if count < 7 else 2
    spaced = np.geomspace(largest / 2 ** min(6, count - 1), largest, count - below)
    on = np.unique(np.maximum(MULTIPLE, spaced // MULTIPLE * MULTIPLE).astype(int))
    between = (on[1:] + on[:-1]) // 2 // MULTIPLE * MULTIPLE
    sizes = [*on, *(size - 1 for size in on[-1 - below : -1])]
    return np.unique(sizes), sorted(set(between.tolist()) - set(on.tolist()))


def _table(batch: np.ndarray, seconds: np.ndarray) -> Table:
    return Table(tuple((int(b), float(t)) for b, t in zip(batch, seconds, strict=True)))


def _wandering(batch: np.ndarray, luck: np.random.Generator) -> np.ndarray:
    """An efficiency that changes smoothly with the logarithm of the batch, by some 5 %."""
    phases, at = luck.uniform(0, 2 * np.pi, 3), np.log2(batch)
    waves = [0.05 / k * np.sin(2 * np.pi * at * k / 5 + p) for k, p in enumerate(phases, 1)]
    return np.exp(np.sum(waves, axis=0))


# ---- plans ----


def fastest(curves: Sequence[Curve], total: int, most: Sequence[int]) -> float:
    """The iteration of the best split. Each device either keeps to multiples, or has all batches at the
    longer times: the best of all choices.
    """
    found = []
    for choice in itertools.product(*[(True, False) if curve.off > 1 else (False,) for curve in curves]):
        known = [
            Known(curve.truth, MULTIPLE) if on else Known(longer(curve.truth, curve.off))
            for curve, on in zip(curves, choice, strict=True)
        ]
        with contextlib.suppress(Infeasible):
            found.append(iteration(curves, plan(known, total, most)))
    return min(found)


@functools.cache
def longer(cost: Cost, factor: float) -> Cost:
    """A cost with every time longer."""
    if factor == 1 or isinstance(cost, Line):
        return cost
    return Table(tuple((b, factor * s) for b, s in cost.points))


def case(curves: Sequence[Curve], total: int) -> Case:
    """Plan a cluster by every rival."""
    most = [curve.largest for curve in curves]
    best = fastest(curves, total, most)
    known = {name: [planner(curve.seen) for curve in curves] for name, planner in PLANNERS.items()}
    splits = {name: plan(one, total, most) for name, one in known.items()}
    equal = even(total, len(curves))
    splits[EVEN] = np.minimum(equal, most)
    over = {name: iteration(curves, split) / best for name, split in splits.items()}
    if (equal > most).any():
        over[EVEN] = float("nan")
    misses, inside = [], []
    for one, curve in zip(known["pyps"], curves, strict=True):
        band = one.fit.band if one.fit is not None else None
        for batch in curve.left_out:
            if batch % one.multiple == 0:
                misses.append(one.cost.seconds(batch) / curve.seconds(batch) - 1)
                if band:
                    inside.append(within(band, batch, curve.seconds(batch)))
    mine = [one.cost for one in known["pyps"]]
    return Case(over, iteration(mine, splits["pyps"]) / iteration(curves, splits["pyps"]), misses, inside)


def within(band: Sequence[tuple[int, float, float]], batch: int, seconds: float) -> bool:
    """Return whether a band, straight between its batches, holds a time."""
    at = [b for b, _, _ in band]
    low, high = (float(np.interp(batch, at, [one[k] for one in band])) for k in (1, 2))
    return low <= seconds <= high


def cases(family: str, seeds: int) -> list[Case]:
    return [case(curves, total) for curves, total in clusters(family, seeds)]


def clusters(family: str, seeds: int) -> Iterator[tuple[list[Curve], int]]:
    """Two to six devices, and a global batch of a fifth to nine tenths of all that fits them."""
    for seed in range(seeds):
        luck = np.random.default_rng(seed)
        make = spread if family in SPREAD else generated
        known = [make(family, luck) for _ in range(8)]
        for _ in range(CLUSTERS):
            curves = [known[k] for k in luck.integers(0, len(known), luck.integers(2, 7))]
            total = int(sum(curve.largest for curve in curves) * luck.uniform(0.2, 0.9))
            if any(curve.off > 1 for curve in curves):  # as people choose it for such devices
                total = max(1, total // MULTIPLE) * MULTIPLE
            yield curves, total


# ---- what it came to ----


def means(found: Sequence[Case]) -> dict[str, float]:
    return {name: float(np.nanmean([one.over[name] for one in found])) for name in found[0].over}


def shortfalls(family: str, found: Sequence[Case]) -> list[str]:
    """Return what was promised for a family and is not kept."""
    mean = means(found)
    mine, best = mean["pyps"], mean["interpolation"]
    p90, best90 = (quantile90(found, name) for name in ("pyps", "interpolation"))
    off = float(np.mean([abs(one.predicted - 1) > OFF for one in found]))
    short = []
    if mine > best + BEHIND + LEVEL:
        short.append(f"mean {mine:.3f}, interpolation's {best:.3f}")
    if p90 > best90 + BEHIND + LEVEL:
        short.append(f"p90 {p90:.3f}, interpolation's {best90:.3f}")
    if mine > (limit := DENSE_MEAN if family in DENSE else SPARSE_MEAN):
        short.append(f"mean {mine:.3f}, promised {limit}")
    if p90 > P90:
        short.append(f"p90 {p90:.3f}, promised {P90}")
    if family in DENSE and off > DENSE_OFF:
        short.append(f"{off:.1%} of the predictions off by more than {OFF:.0%}")
    if not BANDS[0] <= (held := held_by_bands(found)) <= BANDS[1]:
        short.append(f"bands hold {held:.0%}, promised {BANDS[0]:.0%} to {BANDS[1]:.0%}")
    return [f"{family}: {line}" for line in short]


def quantile90(found: Sequence[Case], name: str) -> float:
    return float(np.quantile([one.over[name] for one in found], 0.9))


def held_by_bands(found: Sequence[Case]) -> float:
    return float(np.mean([inside for one in found for inside in one.inside]))


def row(family: str, found: Sequence[Case]) -> list[str]:
    mine = [one.over["pyps"] for one in found]
    off = np.mean([abs(one.predicted - 1) > OFF for one in found])
    points = np.mean([abs(miss) > OFF for one in found for miss in one.misses])
    cells = [family, str(len(found)), *(f"{mean:.3f}" for mean in means(found).values())]
    tails = [f"{quantile90(found, name):.3f}" for name in ("pyps", "interpolation")]
    return [*cells, *tails, f"{max(mine):.2f}", f"{off:.1%}", f"{points:.1%}", f"{held_by_bands(found):.0%}"]


def without_the_place(seeds: int) -> str:
    """The table of plans that know all of a cliff but its place."""
    rows = [["curves", "clusters", "pyps", "interpolation", *(f"{share:.0%}" for share in SHARES)]]
    for family in ("cliffs 5", "cliffs 9"):
        found = []
        for curves, total in clusters(family, seeds):
            most = [curve.largest for curve in curves]
            best = fastest(curves, total, most)
            known = [
                [planner(curve.seen) for curve in curves]
                for planner in (PLANNERS["pyps"], PLANNERS["interpolation"])
            ]
            known += [[all_but_the_place(curve, share) for curve in curves] for share in SHARES]
            found.append([iteration(curves, plan(one, total, most)) / best for one in known])
        rows.append([family, str(len(found)), *(f"{mean:.3f}" for mean in np.mean(found, axis=0))])
    return record.table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--cliffs", action="store_true", help="plans that know all of a cliff but its place")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.cliffs:
        text = f"{record.machine()}. {options.seeds} seeds.\n\n{without_the_place(options.seeds)}"
        print(text)
        if options.save:
            record.save_table("outside-cliffs", text)
        return
    tails = ["p90", "interpolation's", "worst", "plans off", "points off", "in band"]
    heading = ["curves", "clusters", *PLANNERS, EVEN, *tails]
    rows, short = [heading], []
    for family in [options.family] if options.family else FAMILIES:
        found = cases(family, options.seeds)
        rows.append(row(family, found))
        short += shortfalls(family, found)
    text = (
        f"{record.machine()}. {options.seeds} seeds. Mean time of an iteration over the fastest. Plans and "
        f"points off: predicted wrong by more than {OFF:.0%}, of planned iterations and of batches left "
        "out.\n\n"
        f"{record.table(rows)}\n\n" + ("; ".join(short) if short else "All that is promised is kept.")
    )
    print(text)
    if options.save:
        record.save_table("outside-generated", text)
    sys.exit(bool(short))


if __name__ == "__main__":
    main()
