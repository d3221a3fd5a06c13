"""Plans made from some of the points that others measured, valued on all of them.

    python benchmarks/outside/measured.py [--seeds 20] [--set NAME] [--csv FILE] [--save]

A set is a table of model, device, batch, seconds in curves/, with its source at its head; --csv takes
another one. The planner sees every second size of a curve, or, where a curve has more than 64, the powers of
two. A cluster is two to six devices of one model, and a global batch of a fifth to nine tenths of all that
fits them. Each rival's split is timed on the whole curve (straight between its points, and at the smallest
one's time below it) and compared with the fastest split of the whole curve: 1.00 is the best that can be.

`in band` says how many of the sizes that the planner did not see, and that lie between those that it saw,
lie in the fit's 90 % band.
"""

from __future__ import annotations

import argparse
import csv
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from planners import PLANNERS, Known, Measured, by_speed, even, iteration, plan, polygon, record

from pyps.solver import Table

FOLDER = Path(__file__).resolve().parent / "curves"
SETS = tuple(sorted(path.stem for path in FOLDER.glob("*.csv")))
CLUSTERS = 10  # a seed
LEAST_POINTS = 3  # of a curve: fewer show the planner only one
RIVALS = [*PLANNERS, "proportional", "even"]
HEADING = ["set", "clusters", *RIVALS, "over interpolation", "p90", "interpolation's", "worst", "in band"]
DENSE = 64  # points from which the planner sees the powers of two


@dataclass(frozen=True)
class Curve:
    """A measured device: what the planner sees, what it does not, and the whole curve."""

    seen: Measured
    unseen: Measured
    truth: Table

    @staticmethod
    def of(points: Measured) -> Curve:
        dense = len(points) > DENSE
        shown = {b for k, (b, _) in enumerate(points) if (not b & (b - 1) if dense else k % 2 == 0)}
        seen = tuple(point for point in points if point[0] in shown)
        return Curve(seen, tuple(point for point in points if point[0] not in shown), polygon(points))

    @property
    def largest(self) -> int:
        return self.truth.points[-1][0]

    def seconds(self, batch: int) -> float:
        return self.truth.seconds(batch)

    def in_band(self) -> list[bool]:
        """Return whether each unseen size between the seen ones lies in the fit's band."""
        fit = PLANNERS["pyps"](self.seen).fit
        if fit is None or fit.band is None:
            return []
        at, low, high = (np.array(column) for column in zip(*fit.band, strict=True))
        return [
            bool(np.interp(b, at, low) <= s <= np.interp(b, at, high))
            for b, s in self.unseen
            if at[0] < b < at[-1]
        ]


def read(path: Path) -> list[list[Curve]]:
    """For each model of a table that has two devices or more, their curves."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            device = found.setdefault(row["model"], {}).setdefault(row["device"], {})
            device[int(row["batch"])] = float(row["seconds"])
    models = [
        [Curve.of(tuple(sorted(one.items()))) for one in devices.values() if len(one) >= LEAST_POINTS]
        for devices in found.values()
    ]
    return [curves for curves in models if len(curves) > 1]


def clusters(models: Sequence[Sequence[Curve]], seeds: int) -> Iterator[tuple[list[Curve], int]]:
    for seed in range(seeds):
        luck = np.random.default_rng(seed)
        for _ in range(CLUSTERS):
            known = models[luck.integers(len(models))]
            curves = [known[k] for k in luck.integers(0, len(known), luck.integers(2, 7))]
            yield curves, max(1, int(sum(curve.largest for curve in curves) * luck.uniform(0.2, 0.9)))


def regrets(curves: Sequence[Curve], total: int) -> dict[str, float]:
    """For each rival the iteration's time over the fastest; the even split's is nan where it does not fit."""
    most = [curve.largest for curve in curves]
    best = iteration(curves, plan([Known(curve.truth) for curve in curves], total, most))
    splits = {
        name: plan([planner(curve.seen) for curve in curves], total, most)
        for name, planner in PLANNERS.items()
    }
    splits["proportional"] = by_speed([curve.seen for curve in curves], total, most)
    found = {name: iteration(curves, split) / best for name, split in splits.items()}
    split = even(total, len(curves))
    return found | {"even": iteration(curves, split) / best if (split <= most).all() else float("nan")}


@dataclass(frozen=True)
class SetResult:
    """Each rival's regret in each cluster of a set, and whether each unseen size is in its band."""

    name: str
    regrets: dict[str, np.ndarray]
    in_band: list[bool]

    @property
    def over_interpolation(self) -> float:
        """The mean regret of pyps over interpolation's."""
        return float(self.regrets["pyps"].mean() / self.regrets["interpolation"].mean())

    def row(self) -> list[str]:
        mean = [f"{np.nanmean(one):.3f}" for one in self.regrets.values()]
        p90 = [f"{np.quantile(self.regrets[name], 0.9):.3f}" for name in ("pyps", "interpolation")]
        worst = f"{self.regrets['pyps'].max():.2f}"
        held = f"{np.mean(self.in_band):.0%}" if self.in_band else "-"
        count = str(len(self.regrets["pyps"]))
        return [self.name, count, *mean, f"{self.over_interpolation:.3f}", *p90, worst, held]


@functools.cache
def tried(path: Path, seeds: int) -> SetResult:
    models = read(path)
    found = [regrets(curves, total) for curves, total in clusters(models, seeds)]
    by_name = {name: np.array([one[name] for one in found]) for name in found[0]}
    return SetResult(
        path.stem, by_name, [held for curves in models for one in curves for held in one.in_band()]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--set", choices=SETS)
    parser.add_argument("--csv", type=Path, help="another table of model, device, batch, seconds")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    names = [options.set] if options.set else SETS
    paths = [options.csv] if options.csv else [FOLDER / f"{name}.csv" for name in names]
    found = [tried(path, options.seeds) for path in paths]
    text = (
        f"{record.machine()}. {options.seeds} seeds. Mean time of an iteration over the fastest.\n\n"
        f"{record.table([HEADING, *(one.row() for one in found)])}"
    )
    print(text)
    if options.save:
        record.save_table("outside", text)


if __name__ == "__main__":
    main()
