"""Time to a loss, for each competitor with its best step size and its best variant, over several seeds.

Time is virtual, gradients are real. Tuning: a policy's first variant is trained to the loss with step sizes
on a coarse grid, the next ones with the step size that was best so far; from there factors of four, two and
the square root of two are tried up and down for as long as the time gets shorter. A step size counts by its
median over seeds that the results do not use. The variants of a competitor are a ladder: it is climbed until
two in a row are no better, so that the one chosen lies inside what was tried, or at an end that the policy
itself has. Shares of the global batch are tried in both directions from the best one so far.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import rivals
from digits_mlp import Digits
from scipy.stats import t

from pyps import Hyper
from pyps.formats import Jitter
from pyps.simulate import Objective, Result, Scenario, SimWorker, scenario_of, simulate

ROOT64 = "root64"
CLUSTERS = Path(__file__).resolve().parents[1] / "clusters"
GRID = (1.0, 4.0, 16.0)  # step sizes for a whole global batch
FINER = (4.0, 2.0, math.sqrt(2.0))
MEASURE_EVERY = 256  # samples between two measurements of the loss, or a global batch if that is less
ENOUGH = 2  # variants in a row that are no better than the best: the ladder ends
PATIENCE = 1.25  # a trial ends after this many times the best one's seconds
APART = 1000  # between a competitor's seeds and its copy's


@dataclass(frozen=True)
class Learner:
    """Hold what is trained, and how: the rate of `hyper` is the unit of step sizes. objective: by seed."""

    title: str
    objective: Callable[[int], Objective]
    hyper: Hyper
    optimizer: str


@cache
def digits(seed: int) -> Digits:
    return Digits(seed)


TANH = Learner("a tanh network, SGD", digits, Hyper(lr=1.0), "sgd")


@dataclass(frozen=True)
class TuningScenario:
    """Where competitors are compared: a cluster file, and the loss to reach.

    max_batches: global batches after which a training counts as never reaching the loss. link: whether
    transfers take time. learner: what learns there.
    """

    cluster: str
    target: float = 0.1
    max_batches: int = 300
    link: bool = True
    learner: Learner = TANH

    @property
    def title(self) -> str:
        learner = "" if self.learner == TANH else f", {self.learner.title}"
        return f"{self.cluster}{learner}{'' if self.link else ', no link'}"


@dataclass(frozen=True)
class Competitor:
    """A title, the variants of a policy to choose from, and whether batches are the plan's or equal.

    variants: in order of their number, as far as the policy has others that differ. shares: each variant is
    tried with such parts of the global batch too (policy@share), in this order. ends: variants beyond which
    the policy is another one or none; a `k` of all workers but one is such an end by itself.
    """

    title: str
    variants: tuple[str, ...]
    planned: bool = False
    shares: tuple[float, ...] = ()
    ends: tuple[str, ...] = ()

    def ladder(self, workers: int) -> tuple[str, ...]:
        """The variants that this many workers can have: `k` is less, up to all but one of them."""
        named = [(v, v.partition(":k=")[2]) for v in self.variants]
        able = tuple(v for v, k in named if not k or int(k) < workers)
        last = f"{self.variants[0].partition('=')[0]}={workers - 1}"
        return able if len(able) == len(named) or last in able else (*able, last)

    def rungs(self, variant: str) -> tuple[str, ...]:
        """The variant with each share of the global batch."""
        return tuple(variant if share == 1.0 else f"{variant}@{share:g}" for share in self.shares or (1.0,))

    def place(self, policy: str, workers: int) -> str:
        """Where a policy lies in what can be tried: "inside", at a "natural end", or at an "edge"."""
        ladder, variant = self.ladder(workers), policy.partition("@")[0]
        rungs = self.rungs(variant)
        ends = {*self.ends, f"{variant.partition(':')[0]}:k={workers - 1}"}
        inner = [
            len(steps) == 1 or one in ends or 0 < steps.index(one) < len(steps) - 1
            for steps, one in ((ladder, variant), (rungs, policy))
        ]
        if not all(inner):
            return "edge"
        return "natural end" if len(ladder) > 1 and variant in ends else "inside"


@dataclass(frozen=True)
class Budget:
    """Seeds of the results and of the tuning, and how many processes share the work.

    quick: only the first variants, for a few global batches, to a loss that is reached at once. kept: where
    results are kept, and taken from if they are there; None: nowhere. clusters: only these; none: all.
    """

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    tuning: tuple[int, ...] = (101, 102)
    processes: int = 2
    quick: bool = False
    kept: Path | None = None
    clusters: tuple[str, ...] = ()

    def among(self, names: Sequence[str], quick: str) -> tuple[str, ...]:
        """The clusters of a part that are asked for. quick: the one of a quick budget."""
        if self.quick:
            return (quick,)
        return tuple(name for name in names if not self.clusters or name in self.clusters)

    def of_copies(self) -> Budget:
        """Return the budget with other seeds for both, as many."""
        seeds, tuning = (tuple(APART + seed for seed in some) for some in (self.seeds, self.tuning))
        return replace(self, seeds=seeds, tuning=tuning)


@dataclass(frozen=True, eq=False)
class TuningResult:
    """A competitor's chosen variant and step size (in the learner's unit), the number of trials for them, and
    its runs by seed.

    copy: the same competitor, tuned and timed with other seeds; its runs are the second half of `runs`.
    """

    scenario: TuningScenario
    competitor: Competitor
    policy: str
    lr: float
    trials: int
    global_batch: int
    runs: tuple[Result, ...]
    copy: TuningResult | None = None

    @property
    def halves(self) -> tuple[float, float]:
        """The geometric means of the competitor's and of its copy's seconds; where a run never reaches
        the loss, their medians.
        """
        half = len(self.runs) // 2
        middle = statistics.geometric_mean if max(self.seconds) < math.inf else statistics.median
        return middle(self.seconds[:half]), middle(self.seconds[half:])

    @property
    def place(self) -> str:
        """Where the chosen variant lies in what can be tried: see Competitor."""
        workers = cluster_of(self.scenario, planned=False).workers
        return self.competitor.place(self.policy, len(workers))

    @property
    def seconds(self) -> list[float]:
        """Seconds to the loss, by seed; infinite: never."""
        return [r.seconds_to(self.scenario.target) or math.inf for r in self.runs]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the geometric mean over seeds."""
        logs = np.log(self.seconds)
        return mean_interval(logs) if np.isfinite(logs).all() else (min(self.seconds), max(self.seconds))

    @property
    def mean(self) -> float:
        """The geometric mean over seeds; infinite where one never reaches the loss."""
        return float(np.exp(np.mean(np.log(self.seconds))))

    def median_of(self, figure: str) -> float:
        """The median over seeds of an attribute of the runs."""
        return statistics.median(getattr(r, figure) for r in self.runs)


def mean_interval(logs: np.ndarray) -> tuple[float, float]:
    """The 95 % interval (Student's t) of the geometric mean of values with these logarithms."""
    half = float(t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return math.exp(logs.mean() - half), math.exp(logs.mean() + half)


def ratio_interval(other: TuningResult, one: TuningResult) -> tuple[float, float]:
    """The 95 % interval of the other's time over the one's at the same seed."""
    with np.errstate(invalid="ignore"):
        logs = np.log(other.seconds) - np.log(one.seconds)
    return mean_interval(logs) if np.isfinite(logs).all() else (0.0, math.inf)


@cache
def cluster_of(scenario: TuningScenario, *, planned: bool) -> Scenario:
    """The simulated cluster, with the plan's batches or equal ones."""
    if scenario.cluster == ROOT64:
        return root64()
    made = scenario_of(CLUSTERS / f"{scenario.cluster}.toml", even=not planned)
    if scenario.link:
        return made
    return replace(made, up_bytes=0.0, down_bytes=0.0, server_bandwidth=math.inf)


def smaller(cluster: Scenario, share: float, *, planned: bool) -> Scenario:
    """With so much of the global batch. planned: each sample goes to the worker that ends soonest with it;
    otherwise all have as many.
    """
    workers, total = cluster.workers, round(share * cluster.global_batch)
    counts = [total // len(workers) + (k < total % len(workers)) for k in range(len(workers))]
    if planned:
        counts = [0] * len(workers)
        for _ in range(total):
            ends = [w.cost(n + 1) for w, n in zip(workers, counts, strict=True)]
            counts[ends.index(min(ends))] += 1
    pairs = zip(workers, counts, strict=True)
    return replace(cluster, workers=tuple(replace(w, batch=n) for w, n in pairs if n), schedule=None)


def root64() -> Scenario:
    """Worker i of 0 .. 63 takes 1 + sqrt(i) + |N(0, sqrt(i))| of the other clusters' units, drawn anew."""
    workers = []
    for i in range(64):
        root = math.sqrt(i)
        jitter = Jitter(half_normal=root / (1.0 + root))
        workers.append(SimWorker(f"w{i}", 16, lambda b, r=root: (1.0 + r) * (0.02 + 0.005 * b), jitter))  # type: ignore[misc]
    return Scenario(tuple(workers))


def ceiling(cluster: Scenario) -> float:
    """The most that bounding staleness can gain over ASP: H = (N / rho) / T_1.

    T_i: mean seconds of worker i's steps, T_1 the least. rho: the sum of 1 / T_i.
    """
    times = [
        w.cost(w.batch) * (1.0 + w.jitter.half_normal * math.sqrt(2.0 / math.pi)) for w in cluster.workers
    ]
    return len(times) / sum(1.0 / t for t in times) / min(times)


@dataclass(frozen=True)
class Trial:
    """One policy on one scenario, for any step size, seed and limit."""

    scenario: TuningScenario
    cluster: Scenario
    policy: str
    planned: bool = True

    def run(self, lr: float, seed: int, limit: float = math.inf) -> Result:
        """Train once, and stop after `limit` seconds."""
        policy, _, share = self.policy.partition("@")
        cluster = self.cluster
        if share:
            cluster = smaller(cluster, float(share), planned=self.planned)
        most = self.scenario.max_batches * self.cluster.global_batch // cluster.global_batch
        options = {"iterations": most, "seed": seed, "seconds": limit}
        learner = self.scenario.learner
        train = rivals.train if policy.partition(":")[0] in rivals.NAMES else simulate
        with np.errstate(all="ignore"):  # a step size that is too large overflows
            return train(
                cluster,
                policy,
                objective=learner.objective(seed),
                lr=replace(learner.hyper, lr=learner.hyper.lr * lr),
                optimizer=learner.optimizer,
                target_loss=self.scenario.target,
                measure_every=min(MEASURE_EVERY, self.cluster.global_batch),
                **options,
            )

    def seconds(self, lr: float, seed: int, limit: float = math.inf) -> float:
        """Seconds to the loss; infinite: not within the limit."""
        return self.run(lr, seed, limit).seconds_to(self.scenario.target) or math.inf


class Tuner:
    """Finds the best step size of a trial. limit: seconds after which the tuner gives a training up. start: a
    step size that was good for something like it; None: the grid.
    """

    def __init__(
        self, trial: Trial, seeds: Sequence[int], limit: float = math.inf, start: float | None = None
    ) -> None:
        self._trial, self._seeds, self._limit, self._start = trial, seeds, limit, start
        self.found: dict[int, float] = {}  # half the powers of two -> seconds
        self.trials = 0

    def best(self) -> tuple[float, float]:
        """The best step size, and its median seconds."""
        start = self._start
        here = start or min(GRID, key=self._seconds)
        if start and self._seconds(start) == math.inf:
            here = min(start / 2.0, 2.0 * start, key=self._seconds)
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
            self.found[key] = self._median(lr, limit)
        return self.found[key]

    def _median(self, lr: float, limit: float) -> float:
        """Over the seeds, and over no more of them than it takes to know that it is infinite."""
        times: list[float] = []
        for seed in self._seeds:
            times.append(self._trial.seconds(lr, seed, limit))
            self.trials += 1
            if 2 * times.count(math.inf) >= len(self._seeds):
                return math.inf
        return statistics.median(times)


class Search:
    """The best policy and step size that were found so far."""

    def __init__(self, scenario: TuningScenario, competitor: Competitor, seeds: Sequence[int]) -> None:
        self._scenario, self._competitor, self._seeds = scenario, competitor, seeds
        self.cluster = cluster_of(scenario, planned=competitor.planned)
        self.best, self.trials = (math.inf, GRID[0], self._trial(competitor.variants[0])), 0

    def run(self) -> None:
        """Climb the ladder of variants, and for each of them that of its shares."""
        self._climb(self._competitor.ladder(len(self.cluster.workers)), self._shares)

    def _trial(self, policy: str) -> Trial:
        return Trial(self._scenario, self.cluster, policy, self._competitor.planned)

    def _climb(self, rungs: Sequence[str], seconds: Callable[[str, float], float]) -> float:
        """Until ENOUGH in a row are no better than the best of these rungs. Returns its seconds."""
        best, behind = math.inf, 0
        for rung in rungs:
            found = seconds(rung, best)
            behind = 0 if found < best else behind + 1
            best = min(best, found)
            if behind == ENOUGH and best < math.inf:
                break
        return best

    def _shares(self, variant: str, best: float) -> float:
        """The variant's seconds with the best share: from that of the best so far, up and down."""
        rungs = self._competitor.rungs(variant)
        here = rungs.index(variant)
        if best < math.inf:
            here = self._competitor.rungs(self.best[2].policy.partition("@")[0]).index(self.best[2].policy)
        found = self._tune(rungs[here], best)
        for step in (1, -1):
            at = here + step
            while 0 <= at < len(rungs) and (moved := self._tune(rungs[at], min(best, found))) < found:
                found, at = moved, at + step
            if at != here + step:
                break
        return found

    def _tune(self, policy: str, best: float) -> float:
        """Its median seconds with its best step size; infinite: it takes longer than the best."""
        trial = self._trial(policy)
        tuner = Tuner(trial, self._seeds, best, self.best[1] if self.best[0] < math.inf else None)
        step_size, seconds = tuner.best()
        self.trials += tuner.trials
        if seconds < self.best[0]:
            self.best = seconds, step_size, trial
        return seconds


def tune(scenario: TuningScenario, competitor: Competitor, budget: Budget) -> TuningResult:
    """Choose a competitor's variant and step size, then train with them once for each seed."""
    if budget.quick:
        scenario = replace(scenario, max_batches=8, target=2.2)
        competitor = replace(competitor, variants=competitor.variants[:1], shares=())
    search = Search(scenario, competitor, budget.tuning)
    search.run()
    _, lr, chosen = search.best
    runs = tuple(chosen.run(lr, seed) for seed in budget.seeds)
    whole = search.cluster.global_batch
    return TuningResult(scenario, competitor, chosen.policy, lr, search.trials, whole, runs)


def tuned(scenario: TuningScenario, competitor: Competitor, budget: Budget) -> TuningResult:
    """Return what `tune` finds, or what an earlier call kept."""
    if budget.kept is None:
        return tune(scenario, competitor, budget)
    asked = repr(
        (scenario.title, scenario.target, scenario.max_batches, competitor, budget.seeds, budget.tuning)
    )
    file = budget.kept / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.tuned"
    if file.exists():
        found: TuningResult = pickle.loads(file.read_bytes())
        return found
    made = tune(scenario, competitor, budget)
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(made))
    part.rename(file)
    return made


def tune_all(pairs: Iterable[tuple[TuningScenario, Competitor]], budget: Budget) -> list[TuningResult]:
    """Tune each competitor on its scenario, in several processes at once."""
    return _tune_all([(*pair, budget) for pair in pairs], budget.processes)


def tune_with_copies(
    pairs: Iterable[tuple[TuningScenario, Competitor]], budget: Budget
) -> list[TuningResult]:
    """Tune each competitor and its copy: results have the runs of both."""
    each = [(*pair, some) for pair in pairs for some in (budget, budget.of_copies())]
    found = _tune_all(each, budget.processes)
    return [
        replace(one, runs=one.runs + copy.runs, trials=one.trials + copy.trials, copy=copy)
        for one, copy in zip(found[::2], found[1::2], strict=True)
    ]


def _tune_all(
    each: Sequence[tuple[TuningScenario, Competitor, Budget]], processes: int
) -> list[TuningResult]:
    columns = list(zip(*each, strict=True))
    if processes == 1:
        return list(map(tuned, *columns))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(tuned, *columns))
