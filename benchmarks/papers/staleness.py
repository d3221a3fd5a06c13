"""How much a bound on staleness gains: python benchmarks/papers/staleness.py [--save]

On each cluster with stragglers: ASP, tuned; ASP on its fastest devices alone, tuned; one of these devices
without the others, which has no staleness, tuned; and ASP with a bound (SaPS with a fixed threshold) at ASP's
own step size, by seed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass, replace

import numpy as np
from benchmark_tools import record
from tuning import Trial, Tuner, TuningScenario, cluster_of, mean_interval

from pyps.simulate import Scenario

CLUSTERS = ("four", "eight", "sixteen", "heavy")
BOUNDS = (1.0, 1.5, 2.0, 4.0)  # of N
TUNING, SEEDS = (101, 102), tuple(range(1, 16))
ALONE_MAX_BATCHES = 1000


@dataclass(frozen=True)
class Timed:
    """A policy's step size, and its seconds and global batches to the loss, by seed."""

    lr: float
    seconds: list[float]
    batches: list[float]

    @property
    def text(self) -> str:
        return f"{statistics.median(self.seconds):.1f} s, {statistics.median(self.batches):.0f}"


def timed(trial: Trial, global_batch: int, lr: float | None = None) -> Timed:
    """A trial by seed, with its own best step size or a given one; global_batch: of the whole cluster."""
    step_size = Tuner(trial, TUNING).best()[0] if lr is None else lr
    runs = [trial.run(step_size, seed) for seed in SEEDS]
    seconds = [run.seconds_to(trial.scenario.target) or math.inf for run in runs]
    return Timed(step_size, seconds, [run.samples / global_batch for run in runs])


def fastest(cluster: Scenario, count: int) -> Scenario:
    """The cluster's fastest devices, at most `count` of them."""
    costs = [w.cost(w.batch) for w in cluster.workers]
    chosen = [w for w, cost in zip(cluster.workers, costs, strict=True) if cost <= 1.01 * min(costs)]
    return replace(cluster, workers=tuple(chosen[:count]))


def ratio(one: Timed, other: Timed) -> str:
    """The other's time over the one's at the same seed: mean and 95 % interval."""
    logs = np.log(other.seconds) - np.log(one.seconds)
    if not np.isfinite(logs).all():
        return "never"
    low, high = mean_interval(logs)
    return f"{math.exp(logs.mean()):.2f} ({low:.2f} to {high:.2f})"


def row(name: str) -> list[str]:
    scenario = TuningScenario(name)
    cluster = cluster_of(scenario, planned=False)
    whole, count = cluster.global_batch, len(cluster.workers)
    asp = timed(Trial(scenario, cluster, "asp"), whole)
    fast = fastest(cluster, count)
    rest = timed(Trial(scenario, fast, "asp"), whole).text if 1 < len(fast.workers) < count else "-"
    longer = replace(scenario, max_batches=ALONE_MAX_BATCHES)
    alone = timed(Trial(longer, fastest(cluster, 1), "asp"), whole)
    policies = (f"saps:threshold=fixed,bound={round(b * count)}" for b in BOUNDS)
    bounded = [timed(Trial(scenario, cluster, policy), whole, asp.lr) for policy in policies]
    return [name, asp.text, rest, alone.text, *(ratio(b, asp) for b in bounded)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CLUSTERS, default=CLUSTERS)
    options = parser.parse_args()
    bounds = [f"ASP over s = {'' if b == 1.0 else f'{b:g} '}N" for b in BOUNDS]
    rows = [["cluster", "ASP", "ASP, fastest alone", "one of them", *bounds]]
    rows += [row(name) for name in options.only]
    figures = (
        "median seconds and global batches; ASP's time over that of a bound by seed, with its 95 % interval"
    )
    legend = f"Loss 0.1, {len(SEEDS)} seeds: {figures} (above 1: the bound is faster)."
    text = f"{record.machine()}. {legend}\n\n{record.table(rows)}"
    print(text)
    if options.save:
        record.save_table("staleness", text, "papers.md")


if __name__ == "__main__":
    main()
