"""The setting of Ringmaster ASGD's experiments (Maranjyan, Tyurin, Richtarik: ICML 2025).

6,174 workers, of which worker i takes i + |N(0, i)| seconds for a gradient, drawn for each; a quadratic in
1,729 dimensions, and gradients with noise of 0.01 in each coordinate. Step sizes and bounds are tuned on
another seed: by factors of two, as long as the time gets shorter. Each way has a copy, tuned and run with
other seeds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from acceptance import Criterion, Findings
from benchmark_tools import record
from tuning import APART, ENOUGH, Budget, ceiling

from pyps.formats import Jitter
from pyps.simulate import Quadratic, Scenario, SimWorker, simulate

WORKERS, DIMENSIONS, NOISE = 6174, 1729, 0.01
TARGET, LIMIT = 1.0, 6000.0  # of the loss, which is 443 at first; virtual seconds until a run is given up
MEASURE_EVERY = 25  # gradients
DIVERGED = 1e4  # a loss
BOUNDS = (2, 4, 8, 16, 32, 64, 128, 256)
UNKNOWN_NOISE = 4.0  # that SaPS begins with
PATIENCE = 1.25  # a trial ends after this many times the best one's seconds
TUNING_SEED, SEEDS = 101, (1, 2, 3)
MOST_SECONDS = 60.0  # of this machine, for a run

Score = tuple[float, float, float]  # the less the better


@dataclass(frozen=True)
class Way:
    """Policies to choose from, in order of their bound, and the step size of a gradient to begin with."""

    title: str
    policies: tuple[str, ...]
    step: float


@dataclass(frozen=True)
class Outcome:
    """Virtual seconds to the target (infinite: not within the limit), the last loss, and wall seconds."""

    seconds: float
    loss: float
    took: float


def ways(workers: int) -> list[Way]:
    return [
        Way("SaPS", ("saps",), 0.25),
        Way("Ringmaster, R tuned", tuple(f"saps:threshold=fixed,bound={r},late=drop" for r in BOUNDS), 0.25),
        Way("delay-adaptive ASGD", (f"saps:threshold=fixed,bound={workers},late=weigh",), 0.064),
        Way("ASP", ("asp",), 0.0005),
    ]


def cluster(workers: int) -> Scenario:
    return Scenario(
        tuple(
            SimWorker(f"w{i}", 1, lambda _, i=i: float(i), Jitter(half_normal=1.0 / math.sqrt(i)))  # type: ignore[misc]
            for i in range(1, workers + 1)
        )
    )


def bound_of(scenario: Scenario) -> tuple[int, int]:
    """SaPS's m and s for the cluster's mean times: the bound before it knows the noise."""
    scale = math.sqrt(2.0 / math.pi)
    times = np.array([w.cost(w.batch) * (1.0 + scale * w.jitter.half_normal) for w in scenario.workers])
    times.sort()
    rates, counts = np.cumsum(1.0 / times), np.arange(1, len(times) + 1)
    m = int(np.argmin((counts + UNKNOWN_NOISE) / rates))
    return m + 1, math.ceil(1.5 * times[m] * rates[m])


def train(workers: int, policy: str, step: float, seed: int, limit: float) -> Outcome:
    began = time.monotonic()
    with np.errstate(all="ignore"):  # a step size that is too large overflows
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


def score_of(found: Outcome, step: float) -> Score:
    """Seconds, or else the last loss, or where that overflowed the step size: a smaller one may not."""
    loss = found.loss if found.loss < DIVERGED else math.inf
    return found.seconds, loss, step if loss == math.inf else 0.0


def climb(step: float, score: Callable[[float], Score]) -> float:
    """The best step size by factors of two from `step`: half of it and twice of it are no better."""
    for factor in (2.0, 0.5):
        while score(step * factor) < score(step):
            step *= factor
    return step


@dataclass(frozen=True)
class Tuned:
    """A way's best policy and step size on the tuning seed, and a run of them for each other seed."""

    policy: str
    step: float
    outcomes: list[Outcome]


def measure(way: Way, workers: int, limit: float, seeds: tuple[int, ...], apart: int) -> Tuned:
    """apart: what is added to each seed."""
    tried: dict[tuple[str, float], Score] = {}

    def score(policy: str, step: float) -> Score:
        if (policy, step) not in tried:
            seconds = min((seconds for seconds, *_ in tried.values()), default=math.inf)
            found = train(workers, policy, step, TUNING_SEED + apart, min(limit, PATIENCE * seconds))
            tried[policy, step] = score_of(found, step)
        return tried[policy, step]

    step, behind = way.step, 0
    for policy in way.policies:
        before = min(tried.values(), default=(math.inf, math.inf, math.inf))
        step = climb(step, partial(score, policy))
        behind = 0 if score(policy, step) < before else behind + 1
        if behind == ENOUGH:
            break
    policy, step = min(tried, key=lambda one: tried[one])
    return Tuned(policy, step, [train(workers, policy, step, seed + apart, limit) for seed in seeds])


def ringmaster(budget: Budget, _: Path) -> Findings:
    """SaPS as it is by default against ASP and delay-adaptive ASGD in the published setting."""
    workers, limit, seeds = (60, 20.0, (1,)) if budget.quick else (WORKERS, LIMIT, SEEDS)
    scenario, found = cluster(workers), ways(workers)
    each = [(way, workers, limit, seeds, apart) for way in found for apart in (0, APART)]
    with ProcessPoolExecutor(budget.processes, mp_context=get_context("spawn")) as pool:
        measured = list(pool.map(measure, *zip(*each, strict=True)))
    rows = [
        ["way", "policy", "step of a gradient", f"s to loss {TARGET:g}", "last loss", "s of this machine"]
    ]
    for (way, *_, apart), tuned in zip(each, measured, strict=True):
        seconds = _spread([o.seconds for o in tuned.outcomes])
        losses = f"{statistics.median(o.loss for o in tuned.outcomes):.2g}"
        took = _spread([o.took for o in tuned.outcomes])
        title = f"{way.title}, its copy" if apart else way.title
        rows.append([title, f"`{tuned.policy}`", f"{tuned.step:g}", seconds, losses, took])
    m, s = bound_of(scenario)
    about = (
        f"{workers:,} workers, H = {ceiling(scenario):.0f}, {DIMENSIONS:,} dimensions, {len(seeds)} seeds: "
        f"medians and ranges; a run ends after {limit:,.0f} s. "
        f"SaPS's bound for the mean times is {s} at first, made for the {m} fastest."
    )
    pairs = zip(measured[::2], measured[1::2], strict=True)
    outcomes = [one.outcomes + copy.outcomes for one, copy in pairs]
    return Findings([about, record.table(rows)], _criteria(outcomes, found))


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
