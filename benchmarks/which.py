"""Measure whether `pyps-plan which` names the right way: python benchmarks/which.py [--clusters 30] [--save].

Random clusters: two to eight devices (at most 1.5, 4 or 10 times as slow as the fastest), links on which a
push and a pull take 0.02 to 8 times an iteration's compute, a server whose link is one to many of them, steps
that scatter by 2 to 20 %. Random problems: quadratics and logistic regressions, each with the learning rate
at which synchronous steps take the fewest samples to the target, 20 to 500 global batches; every way trains
at that rate. Each way is run in virtual time until it reaches the target, four times as many samples at most;
ranks of DDP have the gradient of `bsp`, and the pace that the ranking predicts.

Printed for each rule: the time of the way that it chooses over the time of the best way. `which` sees
profiles, links and the batch; `after a pilot` also the losses of the ways that `which` wants tried, each for
the time of a fifth of the synchronous steps.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from record import Kept, machine, save_table, table

from pyps.formats import Cluster, Device, Jitter, Job, ModelInfo, Point, Profile, Simulation, WorkerGroup
from pyps.native.values import OUTER
from pyps.profiler import select_fit
from pyps.simulate import Logistic, Quadratic, Result, Scenario, SimWorker, simulate
from pyps.simulate.problem import LocalOptimizer, Objective
from pyps.simulate.which import Ranked, after_pilot, ranked_ways, way_scenario

SAMPLES = 1000  # of a logistic regression
ABOVE = 0.005  # of the loss that is lost in these steps
STEPS = 20, 500  # of synchronous steps to the target
RATES = tuple(4 / 1.7**k for k in range(12))
MOST = 4  # times the synchronous samples: a way that needs more never gets there
PILOT = 0.2  # of the synchronous steps
LAST = 3  # losses of which a pilot takes the mean


@dataclass(frozen=True)
class Problem:
    """An objective, made anew for each run, and the loss to reach: a little above the one after so many steps
    without noise.
    """

    kind: str
    size: int
    noise: float
    steps: int

    def objective(self) -> Objective:
        if self.kind == "quadratic":
            return Quadratic(d=self.size, noise=self.noise)
        return Logistic(samples=SAMPLES, features=self.size, noise=self.noise)

    @functools.cache  # noqa: B019 - of a few problems
    def target(self) -> float:
        problem, rate = self.objective(), 1.0
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
    """A cluster with a problem: the best synchronous rate, and the steps that it takes."""

    cluster: Cluster
    profiles: list[Profile]
    problem: Problem
    rate: float
    steps: int


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


def cases(count: int) -> Iterator[tuple[int, Case]]:
    """The first cases that take a usual number of steps, by seed."""
    seed = found = 0
    while found < count:
        cluster, profiles, problem = drawn(np.random.default_rng(seed))
        best = best_rate(problem, cluster.job.global_batch)
        if best is not None and STEPS[0] <= best[0]:
            yield seed, Case(cluster, profiles, problem, best[1], best[0])
            found += 1
        seed += 1


def best_rate(problem: Problem, batch: int) -> tuple[int, float] | None:
    """The fewest synchronous steps to the target, and the rate; None: more than is usual at every rate."""
    best: tuple[int, float] | None = None
    for rate in RATES:
        steps = synchronous_steps(problem, batch, rate, best[0] if best is not None else STEPS[1])
        if steps is not None:
            best = steps, rate
        elif best is not None and rate < best[1] / 4:
            break
    return best


def synchronous_steps(problem: Problem, batch: int, rate: float, most: int) -> int | None:
    """Global batches to the target at a rate; None: `most` or more."""
    objective, target = problem.objective(), problem.target()
    w = objective.start()
    for k in range(most - 1):
        w = w - rate * objective.gradient(w, k * batch, batch)[0]
        if not np.isfinite(w).all():
            return None
        if objective.loss(w) <= target:
            return k + 1
    return None


def trained(
    scenario: Scenario, policy: str, problem: Problem, rate: float, iterations: int, *, piped: bool = False
) -> Result:
    """A run to the problem's target."""
    return simulate(
        scenario,
        policy,
        iterations=max(1, iterations),
        objective=problem.objective(),
        lr=OUTER if scenario.local else rate,
        optimizer="momentum" if scenario.local else "sgd",
        local=LocalOptimizer(lr=rate) if scenario.local else None,
        target_loss=problem.target(),
        measure_every=scenario.global_batch,
        pipeline=piped,
    )


def tried(case: Case) -> dict[str, float]:
    """By rule the chosen way's time over the best way's."""
    ranking = ranked_ways(case.cluster, case.profiles, pilot=max(1, round(PILOT * case.steps)))
    batch = case.cluster.job.global_batch
    alone = Scenario((SimWorker("one", batch, lambda _: 1.0),))
    exact = trained(alone, "bsp", case.problem, case.rate, case.steps)
    seconds, pilots = dict[str, float](), dict[str, float]()
    for way in ranking.ways:
        done = exact if way.run is None else run_way(case, way)
        pilots[way.name] = at_samples(done, ranking.pilot.get(way.name, 0))
        reached = done.seconds_to(case.problem.target())
        if way.run is None:
            seconds[way.name] = case.steps * batch * way.seconds_per_sample
        else:
            seconds[way.name] = math.inf if reached is None else reached
    best = min(seconds.values())
    found = {"which": seconds[ranking.ways[0].name]}
    losses = {name: pilots[name] for name in ranking.pilot}
    found["after a pilot"] = seconds[after_pilot(ranking, losses).name] if losses else found["which"]
    for name in ("bsp", "asp", "hps"):
        found[f"always {name}"] = seconds.get(name, math.inf)
    return {rule: one / best for rule, one in found.items()}


def run_way(case: Case, way: Ranked) -> Result:
    assert way.run is not None
    assert way.run.policy is not None
    scenario = way_scenario(case.cluster, case.profiles, way.run)
    most = MOST * case.steps // (way.run.local_steps or 1)
    piped = bool(way.run.pipeline)
    return trained(scenario, way.run.policy, case.problem, case.rate, most, piped=piped)


def at_samples(done: Result, samples: int) -> float:
    """The loss at so many samples: the mean of the last few measured."""
    losses = [loss for _, at, loss in done.curve if at <= samples][-LAST:]
    return float(np.mean(losses)) if losses else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=30)
    parser.add_argument("--kept", type=Path, help="a file of what was found, for one that goes on")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    np.seterr(all="ignore")  # ways that diverge
    kept, found = Kept(options.kept), []
    for seed, case in cases(options.clusters):
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
