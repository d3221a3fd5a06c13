"""Measure what a way to train costs where another is best: python benchmarks/regret.py [--cases 20] [--save].

Random clusters, links and servers as in which.py. Of the problems half are quadratics and logistic
regressions, and half a small network on scikit-learn's digits, each at the rate at which synchronous steps
take the fewest samples to the target. Twelve modes over the store, which is one server, run in virtual time
to the target; the median of three draws of the problem counts. A mode's regret is its time over that of the
best of the twelve. Int8 changes the bytes of a transfer only: gradients travel exactly.

Beside the modes stand rules that choose one: `pyps-plan which`, among its ways over the store, and what the
page advised before. Samples are those of a mode over those of synchronous steps.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
from learning_rate import Perceptron
from record import Kept, machine, save_table, table
from sklearn.datasets import load_digits
from which import DRAWS, MOST, STEPS, Case, Problem, best_rate, drawn, synchronous_steps, trained

from pyps.formats import RunTable
from pyps.simulate import Objective, Scenario, simulate
from pyps.simulate.scenario import planned_scenario
from pyps.simulate.which import ranked_ways, way_scenario
from pyps.solver.plan import make_plan
from pyps.store.policies import policy_named

ROWS, SIZES = 600, (64, 32, 10)  # of the digits; the network's
LOSSES = (0.6, 0.3, 0.1)
FIRST, TRIES = 5000, 10  # seeds for a case, at most
PAGE = "policies.md"
WHICH, ADVICE = "`pyps-plan which`", "r2sp where the link binds, else bsp"


@dataclass(frozen=True)
class Mode:
    """A way over the store. even: equal batches instead of planned ones."""

    run: RunTable
    even: bool = False


def mode(
    policy: str, codec: str = "f32", *, even: bool = False, depth: int = 1, local: int | None = None
) -> Mode:
    run = RunTable(policy=policy, codec=codec, pull_codec=codec, depth=depth, local_steps=local)  # type: ignore[arg-type]
    return Mode(run, even)


MODES = {
    "bsp": mode("bsp"),
    "bsp, int8": mode("bsp", "int8"),
    "quorum, int8": mode("quorum", "int8"),
    "asp, equal batches": mode("asp", even=True),
    "asp, equal batches, int8": mode("asp", "int8", even=True),
    "asp, int8": mode("asp", "int8"),
    "saps, int8": mode("saps", "int8"),
    "r2sp": mode("r2sp"),
    "r2sp, int8": mode("r2sp", "int8"),
    "hps, pipeline, int8": mode("hps", "int8", depth=2),
    "8 local steps, int8": mode("bsp", "int8", local=8),
    "32 local steps, int8": mode("bsp", "int8", local=32),
}


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    return (x[:ROWS] / 16).astype(np.float32), y[:ROWS]


@dataclass(frozen=True)
class Network(Problem):
    """A small network on the digits. noise: the loss to reach."""

    def objective(self, draw: int) -> Objective:
        return Perceptron(SIZES, *digits(), draw)

    def target(self, draw: int) -> float:
        return self.noise


def case_of(seed: int) -> Case | None:
    """The cluster and problem of a seed; None: synchronous steps are not of the usual number."""
    luck = np.random.default_rng(seed)
    cluster, profiles, problem = drawn(luck)
    if seed % 2:
        problem = Network("network", SIZES[1], float(luck.choice(LOSSES)), problem.steps)
    batch = cluster.job.global_batch
    if (rate := best_rate(problem, batch)) is None:
        return None
    tries = [synchronous_steps(problem, draw, batch, rate, STEPS[1]) for draw in range(DRAWS)]
    steps = [one for one in tries if one is not None and one >= STEPS[0]]
    return Case(cluster, profiles, problem, rate, steps) if len(steps) == DRAWS else None


def scenario_of(case: Case, one: Mode) -> Scenario:
    if not one.even:
        return way_scenario(case.cluster, case.profiles, one.run)
    cluster = msgspec.structs.replace(case.cluster, run=one.run)
    profiles = {g.name: p for g, p in zip(cluster.worker, case.profiles, strict=True)}
    plan = make_plan(cluster, case.profiles, policy_named(one.run.policy or "bsp").pace)
    return planned_scenario(cluster, profiles, plan, even=True)


def run(case: Case, scenario: Scenario, way: RunTable) -> tuple[float, float]:
    """Seconds until the target, and samples over those of synchronous steps: medians of the draws."""
    seconds, samples = list[float](), list[float]()
    for draw, steps in enumerate(case.steps):
        most = MOST * steps // (way.local_steps or 1)
        done = trained(scenario, way.policy or "bsp", case, draw, most, depth=way.depths[1])
        reached = done.seconds_to(case.problem.target(draw))
        seconds.append(math.inf if reached is None else reached)
        synchronous = steps * case.cluster.job.global_batch
        samples.append(math.inf if reached is None else done.samples / synchronous)
    return statistics.median(seconds), statistics.median(samples)


def tried(seed: int) -> dict[str, tuple[float, float]]:
    """Seconds and samples of each mode and rule; empty: this seed has no case."""
    np.seterr(all="ignore")  # ways that diverge
    if (case := case_of(seed)) is None:
        return {}
    found = {name: run(case, scenario_of(case, one), one.run) for name, one in MODES.items()}
    ranking = ranked_ways(case.cluster, case.profiles)
    chosen = next(way for way in ranking.ways if way.run is not None)
    assert chosen.run is not None
    found[WHICH] = run(case, way_scenario(case.cluster, case.profiles, chosen.run), chosen.run)
    found[ADVICE] = found["r2sp" if link_binds(case) else "bsp"]
    return found


def link_binds(case: Case) -> bool:
    """Return whether transfers make up more than half of a synchronous step."""
    scenario = scenario_of(case, MODES["bsp"])
    free = replace(scenario, up_bytes=0.0, down_bytes=0.0)
    whole, compute = (simulate(s, "bsp", iterations=20).iteration_seconds for s in (scenario, free))
    return whole > 2 * compute


def rows(found: list[dict[str, tuple[float, float]]]) -> list[list[str]]:
    """A row for each mode and rule, by its regret in the 19th of 20 cases."""
    lines = []
    for name in found[0]:
        regrets = sorted(one[name][0] / min(one[mode][0] for mode in MODES) for one in found)
        samples = sorted(one[name][1] for one in found)
        late = math.ceil(0.95 * len(found)) - 1
        best = sum(one[name][0] <= min(one[mode][0] for mode in MODES) for one in found)
        figures = [statistics.median(regrets), regrets[late], regrets[-1]]
        figures += [statistics.median(samples), samples[late]]
        wins = str(best) if name in MODES else ""
        lines.append((figures[1], [name, *map(shown, figures[:3]), wins, *map(shown, figures[3:])]))
    heading = ["way", "median", "19 of 20", "worst", "best in", "samples, median", "19 of 20"]
    return [heading, *(line for _, line in sorted(lines))]


def shown(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "never"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--first", type=int, default=FIRST, help="the first seed")
    parser.add_argument("--kept", type=Path, help="a file of what was found, for one that goes on")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    kept, seeds = Kept(options.kept), range(options.first, options.first + TRIES * options.cases)

    def found() -> list[dict[str, tuple[float, float]]]:
        return [one for seed in seeds if (one := kept.get(str(seed)))][: options.cases]

    missing = [seed for seed in seeds if kept.get(str(seed)) is None]
    with multiprocessing.get_context("spawn").Pool() as pool:
        for seed, one in zip(missing, pool.imap(tried, missing), strict=True):
            kept.add(str(seed), one)
            if len(found()) == options.cases:
                break
    text = f"{machine()}. {len(found())} cases.\n\n{table(rows(found()))}"
    print(text)
    if options.save:
        save_table("regret", text, PAGE)


if __name__ == "__main__":
    main()
