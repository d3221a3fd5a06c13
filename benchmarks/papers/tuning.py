"""Who is first at a loss: each way to train with the step size and the numbers that suit it best, over seeds.

Time is virtual, gradients are real. Tuning: for each of a policy's variants the loss is trained to with step
sizes on a coarse grid, and from the best one on by factors of two and of the square root of two, up and down,
for as long as that gets better. What counts is the median over seeds that the race itself does not use.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from digits_mlp import Digits

from pyps.simulate import Result, Scenario, scenario_of, simulate

CLUSTERS = Path(__file__).resolve().parents[1] / "clusters"
GRID = (1.0, 4.0, 16.0)  # step sizes for a whole global batch
FINER = (4.0, 2.0, math.sqrt(2.0))
PATIENCE = 1.25  # a trial is given up when it takes so many times as long as the best one
STUDENT = {2: 12.706, 3: 4.303, 5: 2.776, 7: 2.447, 15: 2.145}  # t of 95 %, by the number of values


@dataclass(frozen=True)
class Course:
    """Where: a cluster file, the loss to reach, and after how many global batches it counts as never.

    `link`: whether transfers take time.
    """

    cluster: str
    target: float = 0.1
    most: int = 300
    link: bool = True


@dataclass(frozen=True)
class Entry:
    """Who: a title, the variants of a policy to choose from, and whether batches are the plan's or equal."""

    title: str
    variants: tuple[str, ...]
    planned: bool = False


@dataclass(frozen=True)
class Effort:
    """Seeds of the race and of the tuning, and how many processes share the work.

    `quick`: only the first variants, for a few global batches, to a loss that is reached at once.
    """

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    tuning: tuple[int, ...] = (101, 102)
    processes: int = 2
    quick: bool = False


@dataclass(frozen=True, eq=False)
class Standing:
    """What came of an entry: the variant and step size chosen by so many trials, and the results by seed."""

    course: Course
    entry: Entry
    policy: str
    lr: float
    trials: int
    global_batch: int
    results: tuple[Result, ...]

    @property
    def seconds(self) -> list[float]:
        """To the loss, by seed; infinite: never."""
        return [r.seconds_to(self.course.target) or math.inf for r in self.results]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %, for the geometric mean over seeds."""
        logs = np.log(self.seconds)
        if len(logs) not in STUDENT or not np.isfinite(logs).all():
            return min(self.seconds), max(self.seconds)
        half = STUDENT[len(logs)] * logs.std(ddof=1) / math.sqrt(len(logs))
        return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))

    def middle(self, what: str) -> float:
        """The median of a figure of the results."""
        return statistics.median(getattr(r, what) for r in self.results)


def ahead(one: Standing, other: Standing) -> bool:
    """Whether the one's 95 % interval ends before the other's begins."""
    return one.interval[1] < other.interval[0]


def by_seed(other: Standing, one: Standing) -> tuple[float, float]:
    """The 95 % interval of the other's time over the one's at the same seed."""
    ratios = np.log(other.seconds) - np.log(one.seconds)
    if len(ratios) not in STUDENT or not np.isfinite(ratios).all():
        return 0.0, math.inf
    half = STUDENT[len(ratios)] * ratios.std(ddof=1) / math.sqrt(len(ratios))
    return float(np.exp(ratios.mean() - half)), float(np.exp(ratios.mean() + half))


@cache
def digits(seed: int) -> Digits:
    return Digits(seed)


def scenario(course: Course, *, planned: bool) -> Scenario:
    """The cluster with the plan's batches or equal ones."""
    made = scenario_of(CLUSTERS / f"{course.cluster}.toml", even=not planned)
    return made if course.link else replace(made, up_bytes=0.0, down_bytes=0.0, server_bandwidth=math.inf)


def trial(course: Course, cluster: Scenario, policy: str, lr: float, seed: int, limit: float) -> Result:
    """One training, given up after `limit` seconds."""
    with np.errstate(all="ignore"):  # a step size that is too large is found to be so
        return simulate(
            cluster, policy, iterations=course.most, seed=seed, learning=digits(seed), lr=lr,
            target_loss=course.target, seconds=limit,
        )  # fmt: skip


class Tuner:
    """The best step size of one policy on one course; `limit`: seconds after which a trial is given up."""

    def __init__(
        self, course: Course, cluster: Scenario, policy: str, seeds: Sequence[int], limit: float
    ) -> None:
        self._course, self._cluster, self._policy, self._seeds = course, cluster, policy, seeds
        self._limit = limit
        self.found: dict[int, float] = {}  # half the powers of two -> seconds

    def best(self) -> tuple[float, float]:
        """The step size, and seconds."""
        here = min(GRID, key=self._seconds)
        for factor in FINER if self._seconds(here) < math.inf else ():
            here = self._climb(here, factor)
        return here, self._seconds(here)

    def _climb(self, here: float, factor: float) -> float:
        for step in (factor, 1.0 / factor):
            moved = False
            while self._seconds(here * step) < self._seconds(here):
                here, moved = here * step, True
            if moved:
                break
        return here

    def _seconds(self, lr: float) -> float:
        key = round(2 * math.log2(lr))
        if key not in self.found:
            limit = PATIENCE * min([self._limit, *self.found.values()])
            times = []
            for seed in self._seeds:
                result = trial(self._course, self._cluster, self._policy, lr, seed, limit)
                times.append(result.seconds_to(self._course.target) or math.inf)
            self.found[key] = statistics.median(times)
        return self.found[key]


def enter(course: Course, entry: Entry, effort: Effort) -> Standing:
    """Tune an entry, then let it race."""
    if effort.quick:
        course, entry = replace(course, most=8, target=2.3), replace(entry, variants=entry.variants[:1])
    cluster = scenario(course, planned=entry.planned)
    chosen, lr, best, trials = entry.variants[0], GRID[0], math.inf, 0
    for policy in entry.variants:
        tuner = Tuner(course, cluster, policy, effort.tuning, best)
        at, seconds = tuner.best()
        trials += len(tuner.found) * len(effort.tuning)
        if seconds < best:
            chosen, lr, best = policy, at, seconds
    results = tuple(trial(course, cluster, chosen, lr, seed, math.inf) for seed in effort.seeds)
    return Standing(course, entry, chosen, lr, trials, cluster.global_batch, results)


def race(starts: Iterable[tuple[Course, Entry]], effort: Effort) -> list[Standing]:
    """Everybody on their courses, on some processes at once."""
    courses, entries = zip(*starts, strict=True)
    if effort.processes == 1:
        return [enter(course, entry, effort) for course, entry in zip(courses, entries, strict=True)]
    with ProcessPoolExecutor(effort.processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(enter, courses, entries, [effort] * len(courses)))
