"""Measure whether `pyps-plan which` names the right way: python benchmarks/which.py [--clusters 30].

Random clusters: two to eight devices (at most 1.5, 4 or 10 times as slow as the fastest), links on which a
push and a pull take 0.02 to 8 times an iteration's compute, a server whose link is one to many of them, steps
that scatter by 2 to 20 %. Random problems: quadratics and logistic regressions, each with the learning rate
at which synchronous steps take the fewest samples to the target, 20 to 500 global batches; every way trains
at that rate. Each way is run in virtual time until it reaches the target, four times as many samples at most;
ranks of DDP have the gradient of `bsp`, and the pace that the ranking predicts. A problem is drawn three
times, with other data or noise, and a way's time is the median: by luck alone one run of synchronous steps
takes 0.5 to 3 times as many samples as another. All ways have the same luck: a sample's noise is its own,
whoever computes it. The rate is chosen on three other draws, so that no way profits from luck.

Printed for each rule: the time of the way that it chooses over the time of the best way. `which` sees
profiles, links and the batch; `after a pilot` also the losses of the ways that `which` wants tried, each for
the time of a fifth of the synchronous steps.

--real 5: the first two ways over the store of five clusters are run by `pyps run` on emulated devices and
links, and their seconds a sample compared with the ranking's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from prediction import pyps
from record import Kept, machine, save_table, table

from pyps.formats import (
    Cluster,
    Device,
    Jitter,
    Job,
    ModelInfo,
    Point,
    Profile,
    RunTable,
    Simulation,
    WorkerGroup,
)
from pyps.formats.files import write_json
from pyps.native.values import OUTER
from pyps.profiler import point_seconds, select_fit
from pyps.report.report import read_report
from pyps.simulate import Logistic, Quadratic, Result, Scenario, SimWorker, simulate
from pyps.simulate.problem import LocalOptimizer, Objective
from pyps.simulate.which import Ranked, after_pilot, ranked_ways, way_scenario
from pyps.tasks import load_task

SAMPLES = 1000  # of a logistic regression
ABOVE = 0.005  # of the loss that is lost in these steps
STEPS = 20, 500  # of synchronous steps to the target
RATES = tuple(4 / 1.7**k for k in range(12))
MOST = 4  # times the synchronous samples: a way that needs more never gets there
PILOT = 0.2  # of the synchronous steps
LAST = 3  # losses of which a pilot takes the mean
DRAWS = 3  # of each problem
BLOCK = 256  # samples whose noise is drawn at once
# Real runs: small steps, so many times as slow as drawn, on so few devices that the machine keeps up.
REAL_MODEL, SLOWER, MOST_REAL, REAL_ROUNDS = "digits_mlp", 4.0, 4, 40
HERE = Path(__file__).resolve().parent


class PairedQuadratic(Quadratic):
    """A quadratic whose gradients' noise is the mean of their samples' own, so that ways which compute the
    same samples in other parts have the same luck.
    """

    def __init__(self, d: int, noise: float, seed: int) -> None:
        super().__init__(d=d, noise=0.0, seed=seed)
        self.of_sample, self.seed = noise, seed
        self.sums = functools.lru_cache(maxsize=64)(self._sums)

    def gradient(self, w: np.ndarray, first: int, count: int) -> tuple[np.ndarray, float]:
        g, loss = super().gradient(w, first, count)
        at, end = first, first + count
        while at < end:
            block, low = divmod(at, BLOCK)
            high = min(BLOCK, low + end - at)
            sums = self.sums(block)
            g += (sums[high] - sums[low]) * (self.of_sample / count)
            at += high - low
        return g, loss

    def _sums(self, block: int) -> np.ndarray:
        """The sums of the noise of a block's first samples, none to all: [BLOCK + 1, d]."""
        draw = np.random.default_rng([self.seed, block]).standard_normal((BLOCK, len(self.start())))
        return np.concatenate([np.zeros((1, draw.shape[1])), draw.cumsum(axis=0)])


@dataclass(frozen=True)
class Problem:
    """Objectives, one by draw, made anew for each run, and the loss to reach: a little above the one after so
    many steps without noise.
    """

    kind: str
    size: int
    noise: float
    steps: int

    def objective(self, draw: int) -> Objective:
        if self.kind == "quadratic":
            return PairedQuadratic(self.size, self.noise, draw)
        return Logistic(samples=SAMPLES, features=self.size, noise=self.noise, seed=draw)

    @functools.cache  # noqa: B019 - of a few problems
    def target(self, draw: int) -> float:
        problem, rate = self.objective(draw), 1.0
        if isinstance(problem, Logistic):
            rate = 4.0 / float(np.linalg.eigvalsh(problem.x.T @ problem.x / SAMPLES)[-1])
        else:
            problem = Quadratic(d=self.size, noise=0.0)
        w = problem.start()
        for _ in range(self.steps):
            w = w - rate * problem.gradient(w, 0, SAMPLES)[0]
        least = problem.loss(w)
        return least + ABOVE * (problem.loss(problem.start()) - least)


@dataclass(frozen=True)
class Case:
    """A cluster with a problem: the best synchronous rate, and the steps that each draw takes at it."""

    cluster: Cluster
    profiles: list[Profile]
    problem: Problem
    rate: float
    steps: list[int]


def drawn(luck: np.random.Generator) -> tuple[Cluster, list[Profile], Problem]:
    count, batch = int(luck.integers(2, 9)), int(luck.choice([32, 64, 128, 256]))
    slope = float(np.exp(luck.uniform(np.log(5e-4), np.log(5e-3))))
    slower = np.exp(luck.uniform(0, np.log(luck.choice([1.5, 4, 10])), count))
    parameters = int(10 ** luck.uniform(5.5, 8))
    compute = slope * batch / float((1 / slower).sum())
    bandwidth = 8 * parameters / (float(np.exp(luck.uniform(np.log(0.02), np.log(8)))) * compute)
    profiles, groups = [], []
    for k, factor in enumerate(slower):
        fixed = slope * factor * batch / count * luck.uniform(0.05, 0.5)
        sizes = sorted({max(1, batch // 16), batch // 4, batch // 2, batch})
        times = {b: (fixed + slope * factor * b) * np.exp(0.03 * luck.standard_normal(5)) for b in sizes}
        points = [Point(batch=b, seconds=[float(s) for s in seconds]) for b, seconds in times.items()]
        model = ModelInfo(name="m", parameters=parameters)
        profiles.append(
            Profile(device=Device(name=f"d{k}"), model=model, points=points, fit=select_fit(points))
        )
        own = bandwidth * float(np.exp(luck.uniform(-0.5, 0.5)))
        groups.append(WorkerGroup(name=f"d{k}", profile=f"d{k}", bandwidth=own, latency=1e-3))
    server = bandwidth * float(luck.choice([1.0, count / 2, 4.0 * count]))
    simulation = Simulation(server_bandwidth=server, jitter=Jitter(sigma=float(luck.uniform(0.02, 0.2))))
    cluster = Cluster(job=Job(global_batch=batch), worker=groups, simulation=simulation)
    steps = int(luck.choice([40, 80, 160]))
    if luck.random() < 0.5:
        noise = float(np.exp(luck.uniform(np.log(0.01), np.log(2))))
        problem = Problem("quadratic", int(luck.choice([30, 100, 300])), noise, steps)
    else:
        size, noise = int(luck.choice([10, 20])), float(luck.choice([1.0, 2.0, 4.0]))
        problem = Problem("logistic", size, noise, steps)
    return cluster, profiles, problem


def cases(count: int, first: int = 0) -> Iterator[tuple[int, Case]]:
    """The first cases that take a usual number of steps, by seed."""
    seed, found = first, 0
    while found < count:
        cluster, profiles, problem = drawn(np.random.default_rng(seed))
        batch = cluster.job.global_batch
        if (rate := best_rate(problem, batch)) is not None:
            tries = [synchronous_steps(problem, draw, batch, rate, STEPS[1]) for draw in range(DRAWS)]
            steps = [one for one in tries if one is not None and one >= STEPS[0]]
            if len(steps) == DRAWS:
                yield seed, Case(cluster, profiles, problem, rate, steps)
                found += 1
        seed += 1


def best_rate(problem: Problem, batch: int) -> float | None:
    """The rate with the fewest synchronous steps to the target in other draws; None: more than is usual."""
    best, least = None, DRAWS * STEPS[1]
    for rate in RATES:
        left = least
        for draw in range(DRAWS, 2 * DRAWS):
            found = synchronous_steps(problem, draw, batch, rate, min(left, STEPS[1]))
            if found is None:
                break
            left -= found
        else:
            best, least = rate, least - left
            continue
        if best is not None and rate < best / 4:
            break
    return best


def synchronous_steps(problem: Problem, draw: int, batch: int, rate: float, most: int) -> int | None:
    """Global batches to the target at a rate; None: `most` or more."""
    objective, target = problem.objective(draw), problem.target(draw)
    w = objective.start()
    for k in range(most - 1):
        w = w - rate * objective.gradient(w, k * batch, batch)[0]
        if not np.isfinite(w).all():
            return None
        if objective.loss(w) <= target:
            return k + 1
    return None


def trained(
    scenario: Scenario, policy: str, case: Case, draw: int, iterations: int, *, depth: Any = 1
) -> Result:
    """A run to the target of a problem's draw."""
    return simulate(
        scenario,
        policy,
        iterations=max(1, iterations),
        objective=case.problem.objective(draw),
        lr=OUTER if scenario.local else case.rate,
        optimizer="momentum" if scenario.local else "sgd",
        local=LocalOptimizer(lr=case.rate) if scenario.local else None,
        target_loss=case.problem.target(draw),
        measure_every=scenario.global_batch,
        depth=depth,
    )


def tried(case: Case) -> dict[str, float]:
    """By rule the chosen way's time over the best way's; the pilot is of the first draw."""
    ranking = ranked_ways(case.cluster, case.profiles, pilot=max(1, round(PILOT * case.steps[0])))
    batch = case.cluster.job.global_batch
    alone = Scenario((SimWorker("one", batch, lambda _: 1.0),))
    seconds, pilots = dict[str, float](), dict[str, float]()
    for way in ranking.ways:
        if way.run is None:
            done = trained(alone, "bsp", case, 0, case.steps[0])
            seconds[way.name] = float(np.median(case.steps)) * batch * way.seconds_per_sample
        else:
            runs = [run_way(case, draw, way) for draw in range(DRAWS)]
            reached = [one.seconds_to(case.problem.target(draw)) for draw, one in enumerate(runs)]
            seconds[way.name] = float(np.median([math.inf if one is None else one for one in reached]))
            done = runs[0]
        pilots[way.name] = at_samples(done, ranking.pilot.get(way.name, 0))
    best = min(seconds.values())
    found = {"which": seconds[ranking.ways[0].name]}
    losses = {name: pilots[name] for name in ranking.pilot}
    found["after a pilot"] = seconds[after_pilot(ranking, losses).name] if losses else found["which"]
    for name in ("bsp", "asp", "hps"):
        found[f"always {name}"] = seconds.get(name, math.inf)
    return {rule: one / best for rule, one in found.items()}


def run_way(case: Case, draw: int, way: Ranked) -> Result:
    assert way.run is not None
    assert way.run.policy is not None
    scenario = way_scenario(case.cluster, case.profiles, way.run)
    most = MOST * case.steps[draw] // (way.run.local_steps or 1)
    return trained(scenario, way.run.policy, case, draw, most, depth=way.run.depth or 1)


def at_samples(done: Result, samples: int) -> float:
    """The loss at so many samples: the mean of the last few measured."""
    losses = [loss for _, at, loss in done.curve if at <= samples][-LAST:]
    return float(np.mean(losses)) if losses else math.inf


def scaled(cluster: Cluster, given: Sequence[Profile]) -> tuple[Cluster, list[Profile]]:
    """The cluster for REAL_MODEL, SLOWER times as slow, without a server that is slower than the links."""
    parameters = sum(p.numel() for p in load_task(REAL_MODEL).model.parameters())
    profiles, groups = [], []
    for profile, group in zip(given, cluster.worker, strict=True):
        points = [
            Point(batch=p.batch, seconds=[SLOWER * x for x in point_seconds(p)]) for p in profile.points
        ]
        model = ModelInfo(name=REAL_MODEL, parameters=parameters)
        profiles.append(Profile(device=profile.device, model=model, points=points, fit=select_fit(points)))
        share = parameters / (profile.model.parameters or parameters) / SLOWER
        bandwidth = share * (group.bandwidth or math.inf)
        groups.append(msgspec.structs.replace(group, profile=f"{group.name}.json", bandwidth=bandwidth))
    simulation = Simulation(jitter=Jitter(sigma=0.001))  # an emulated device's steps hardly scatter
    return Cluster(job=cluster.job, worker=groups, simulation=simulation), profiles


def run_really(cluster: Cluster, profiles: Sequence[Profile]) -> list[tuple[str, float, float]]:
    """The first two ways over the store, each with its predicted and its measured seconds a sample."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder, batch = Path(name), cluster.job.global_batch
        for group, profile in zip(cluster.worker, profiles, strict=True):
            write_json(folder / group.profile, profile)
        for k, way in enumerate([w for w in ranked_ways(cluster, profiles).ways if w.run is not None][:2]):
            text = f"[job]\nglobal_batch = {batch}\n[run]\n"
            defaults = msgspec.to_builtins(RunTable())
            given = msgspec.to_builtins(way.run).items()
            text += "".join(f"{key} = {json.dumps(x)}\n" for key, x in given if x != defaults[key])
            for one in cluster.worker:
                text += f'[[worker]]\nname = "{one.name}"\nprofile = "{one.profile}"\n'
                text += f"bandwidth = {one.bandwidth}\nlatency = {one.latency}\n"
            (folder / "cluster.toml").write_text(text)
            pyps("pyps-plan", folder / "cluster.toml", "-o", folder / "plan.json")
            rounds = REAL_ROUNDS * (way.run.local_steps or 1 if way.run is not None else 1)
            options = ["--plan", folder / "plan.json", "--throttle-from", folder / "cluster.toml"]
            options += ["--samples", rounds * batch, "--run-dir", folder / f"run{k}"]
            pyps("pyps", "run", *options, HERE / "builtin_worker.py", REAL_MODEL, "cpu")
            took = read_report(folder / f"run{k}" / "report.json").iteration_seconds.median
            found.append((way.name, way.seconds_per_sample, took / batch))
    return found


def real_table(count: int, first: int) -> str:
    """The table of the first two ways of each cluster, as run; of few devices, as they share this machine."""
    rows = [
        ["cluster", "devices", "way", "predicted us/sample", "run us/sample", "run / predicted", "second"]
    ]
    drawn_ones = ((seed, *drawn(np.random.default_rng(seed))) for seed in itertools.count(first))
    small = ((seed, cluster, found) for seed, cluster, found, _ in drawn_ones if len(found) <= MOST_REAL)
    for seed, cluster, profiles in itertools.islice(small, count):
        found = run_really(*scaled(cluster, profiles))
        for name, predicted, took in found:
            figures = len(profiles), name, f"{1e6 * predicted:.0f}", f"{1e6 * took:.0f}"
            rows.append(
                [str(seed), *map(str, figures), f"{took / predicted:.3f}", f"{took / found[0][2]:.2f}"]
            )
        print(table(rows), flush=True)
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=30)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--kept", type=Path, help="a file of what was found, for one that goes on")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--real", type=int, metavar="N", help="run the first two ways of N clusters instead")
    options = parser.parse_args()
    if options.real:
        text = f"{machine()}.\n\n{real_table(options.real, options.first)}"
        print(text)
        if options.save:
            save_table("which-real", text)
        return
    np.seterr(all="ignore")  # ways that diverge
    kept, found = Kept(options.kept), []
    for seed, case in cases(options.clusters, options.first):
        if (one := kept.get(str(seed))) is None:
            kept.add(str(seed), one := tried(case))
        found.append(one)
    rows = [["rule", "median", "p90", "worst"]]
    for rule in found[0]:
        times = [one[rule] for one in found]
        middle, late = np.quantile(times, [0.5, 0.9], method="lower")
        rows.append([rule, f"{middle:.2f}", f"{late:.2f}", f"{max(times):.2f}"])
    text = f"{machine()}. {len(found)} clusters.\n\n{table(rows)}"
    print(text)
    if options.save:
        save_table("which", text)


if __name__ == "__main__":
    main()
