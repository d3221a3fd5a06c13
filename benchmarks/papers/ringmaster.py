"""The setting of Ringmaster ASGD's experiments (Maranjyan, Tyurin, Richtarik: ICML 2025).

6,174 workers, of which worker i takes i + |N(0, i)| seconds for a gradient, drawn for each; a quadratic in
1,729 dimensions, and gradients with noise of 0.01 in each coordinate. Step sizes are tuned on another seed.
"""

from __future__ import annotations

import math
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from acceptance import Criterion, Findings
from benchmark_tools import record
from tuning import Budget, ceiling

from pyps.formats import Jitter
from pyps.simulate import Quadratic, Scenario, SimWorker, simulate
from pyps.store.policies import SaPS

WORKERS, DIMENSIONS, NOISE = 6174, 1729, 0.01
TARGET, LIMIT = 1.0, 6000.0  # of the loss, which is 443 at first; virtual seconds until a run is given up
MEASURE_EVERY = 25  # gradients
TUNING_SEED, SEEDS = 101, (1, 2, 3)
MOST_SECONDS = 60.0  # of this machine, for a run


@dataclass(frozen=True)
class Way:
    """A policy, and the step sizes of a gradient to choose from."""

    title: str
    policy: str
    steps: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """Virtual seconds to the target (infinite: not within the limit), the last loss, and wall seconds."""

    seconds: float
    loss: float
    took: float


def ways(workers: int) -> list[Way]:
    return [
        Way("SaPS", "saps", (0.125, 0.25, 0.5)),
        Way("delay-adaptive ASGD", f"saps:threshold=fixed,bound={workers},late=weigh", (0.004, 0.008, 0.016)),
        Way("ASP", "asp", (0.00025, 0.0005, 0.001)),
    ]


def cluster(workers: int) -> Scenario:
    return Scenario(
        tuple(
            SimWorker(f"w{i}", 1, lambda _, i=i: float(i), Jitter(half_normal=1.0 / math.sqrt(i)))  # type: ignore[misc]
            for i in range(1, workers + 1)
        )
    )


def bound_of(scenario: Scenario) -> tuple[int, int]:
    """SaPS's m and s for the cluster's mean times: the bound that it should find."""
    scale = math.sqrt(2.0 / math.pi)
    times = np.array([w.cost(w.batch) * (1.0 + scale * w.jitter.half_normal) for w in scenario.workers])
    times.sort()
    rates, counts = np.cumsum(1.0 / times), np.arange(1, len(times) + 1)
    m = int(np.argmin((counts + SaPS().noise) / rates))
    return m + 1, math.ceil(1.5 * times[m] * rates[m])


def train(workers: int, policy: str, step: float, seed: int, limit: float) -> Outcome:
    began = time.monotonic()
    result = simulate(
        cluster(workers),
        policy,
        iterations=1_000_000,
        seed=seed,
        objective=Quadratic(DIMENSIONS, NOISE, seed),
        lr=step * workers,
        target_loss=TARGET,
        seconds=limit,
        measure_every=MEASURE_EVERY,
    )
    return Outcome(result.seconds_to(TARGET) or math.inf, result.loss, time.monotonic() - began)


def measure(way: Way, workers: int, limit: float, seeds: tuple[int, ...]) -> tuple[float, list[Outcome]]:
    """The best step size on the tuning seed, and a run of it for each other seed."""
    tried = {step: train(workers, way.policy, step, TUNING_SEED, limit) for step in way.steps}
    best = min(tried, key=lambda step: (tried[step].seconds, tried[step].loss))
    return best, [train(workers, way.policy, best, seed, limit) for seed in seeds]


def ringmaster(budget: Budget, _: Path) -> Findings:
    """SaPS as it is by default against ASP and delay-adaptive ASGD in the published setting."""
    workers, limit, seeds = (60, 20.0, (1,)) if budget.quick else (WORKERS, LIMIT, SEEDS)
    scenario, found = cluster(workers), ways(workers)
    with ProcessPoolExecutor(budget.processes, mp_context=get_context("spawn")) as pool:
        measured = list(
            pool.map(measure, found, *([value] * len(found) for value in (workers, limit, seeds)))
        )
    rows = [
        ["way", "policy", "step of a gradient", f"s to loss {TARGET:g}", "last loss", "s of this machine"]
    ]
    for way, (step, outcomes) in zip(found, measured, strict=True):
        cells = [way.title, f"`{way.policy}`", f"{step:g}", _spread([o.seconds for o in outcomes])]
        losses = f"{statistics.median(o.loss for o in outcomes):.2g}"
        rows.append([*cells, losses, _spread([o.took for o in outcomes])])
    m, s = bound_of(scenario)
    about = (
        f"{workers:,} workers, H = {ceiling(scenario):.0f}, {DIMENSIONS:,} dimensions, {len(seeds)} seeds: "
        f"medians and ranges; a run ends after {limit:,.0f} s. "
        f"SaPS's bound for the mean times is {s}, made for the {m} fastest."
    )
    return Findings([about, record.table(rows)], _criteria([outcomes for _, outcomes in measured], found))


def _spread(values: list[float]) -> str:
    if math.isinf(statistics.median(values)):
        return "never"
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _criteria(outcomes: list[list[Outcome]], found: list[Way]) -> list[Criterion]:
    slowest = max(o.seconds for o in outcomes[0])
    criteria = []
    for way, rivals in zip(found[1:], outcomes[1:], strict=True):
        least = min(o.seconds for o in rivals) / slowest
        figure = f"{way.title}'s shortest time over SaPS's longest"
        criteria.append(Criterion(figure, f"{least:.1f}", "> 1", least > 1.0))
    took = max(o.took for several in outcomes for o in several)
    limit = f"<= {MOST_SECONDS:g}"
    return [
        *criteria,
        Criterion("longest run on this machine, s", f"{took:.0f}", limit, took <= MOST_SECONDS),
    ]
