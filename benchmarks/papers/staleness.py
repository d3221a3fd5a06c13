"""What there is to gain by bounding staleness: python benchmarks/papers/staleness.py [--docs]

On each cluster with stragglers: ASP, tuned; ASP on its fastest devices alone, tuned; one of these devices by
itself, which knows no staleness, tuned; and ASP with a bound (SaPS with a fixed threshold) at ASP's own step
size, by seed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # record and shaped lie there

from record import machine, table, write_section
from tuning import STUDENT, Course, Tuner, scenario, trial

from pyps.simulate import Scenario

CLUSTERS = ("four", "eight", "sixteen", "heavy")
BOUNDS = (1.0, 1.5, 2.0, 4.0)  # of N
TUNING, SEEDS = (101, 102), tuple(range(1, 16))
ALONE_MOST = 1000  # global batches


@dataclass(frozen=True)
class Timed:
    """A policy's step size, and its seconds and global batches to the loss, by seed."""

    lr: float
    seconds: list[float]
    batches: list[float]

    @property
    def text(self) -> str:
        return f"{statistics.median(self.seconds):.1f} s, {statistics.median(self.batches):.0f}"


def timed(course: Course, cluster: Scenario, policy: str, whole: int, lr: float | None = None) -> Timed:
    """By its own best step size, or a given one; `whole`: samples of the cluster's global batch."""
    at = Tuner(course, cluster, policy, TUNING, math.inf).best()[0] if lr is None else lr
    results = [trial(course, cluster, policy, at, seed, math.inf) for seed in SEEDS]
    seconds = [r.seconds_to(course.target) or math.inf for r in results]
    return Timed(at, seconds, [r.samples / whole for r in results])


def fastest(cluster: Scenario, most: int) -> Scenario:
    """The cluster's fastest devices, at most so many."""
    costs = [w.cost(w.batch) for w in cluster.workers]
    chosen = [w for w, cost in zip(cluster.workers, costs, strict=True) if cost <= 1.01 * min(costs)]
    return replace(cluster, workers=tuple(chosen[:most]))


def ratio(one: Timed, other: Timed) -> str:
    """The other's time over the one's at the same seed: mean and 95 % interval."""
    logs = np.log(other.seconds) - np.log(one.seconds)
    if not np.isfinite(logs).all():
        return "never"
    half = STUDENT[len(logs)] * logs.std(ddof=1) / math.sqrt(len(logs))
    middle, low, high = (float(np.exp(logs.mean() + d)) for d in (0.0, -half, half))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def row(name: str) -> list[str]:
    course = Course(name)
    cluster = scenario(course, planned=False)
    whole, count = cluster.global_batch, len(cluster.workers)
    asp = timed(course, cluster, "asp", whole)
    fast = fastest(cluster, count)
    rest = timed(course, fast, "asp", whole).text if 1 < len(fast.workers) < count else "-"
    alone = timed(replace(course, most=ALONE_MOST), fastest(cluster, 1), "asp", whole)
    bounded = [
        timed(course, cluster, f"saps:threshold=fixed,bound={round(b * count)}", whole, asp.lr)
        for b in BOUNDS
    ]
    return [name, asp.text, rest, alone.text, *(ratio(b, asp) for b in bounded)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CLUSTERS, default=CLUSTERS)
    options = parser.parse_args()
    bounds = [f"ASP over s = {'' if b == 1.0 else f'{b:g} '}N" for b in BOUNDS]
    rows = [["cluster", "ASP", "ASP, fastest alone", "one of them", *bounds]]
    rows += [row(name) for name in options.only]
    text = (
        f"{machine()}. Loss 0.1, {len(SEEDS)} seeds: median seconds and global batches; ASP's time over that "
        f"of a bound by seed, with its 95 % interval (above 1: the bound is faster).\n\n{table(rows)}"
    )
    print(text)
    if options.docs:
        write_section("staleness", text, "papers.md")


if __name__ == "__main__":
    main()
