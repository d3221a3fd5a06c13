"""How long the exact split takes, how that grows with the workers, and HiGHS and CBC on the same ones.

    python benchmarks/solver.py [--runs 9] [--rival-limit 20] [--most-workers 100000] [--save]

Random clusters, 64 samples a worker: interleaved runs of every case, then each rival once a size by PuLP
with no gap allowed, until it passes the limit in seconds (0: none). With --save all goes to bench-out/.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from record import kept_at, machine, milliseconds, save_table, seconds_of, table

from pyps.errors import PypsError
from pyps.formats import (
    Cluster,
    Device,
    Fit,
    Job,
    Memory,
    ModelInfo,
    Point,
    Profile,
    Sharding,
    SyncCost,
    WorkerGroup,
)
from pyps.solver import Costs, Problem, Table, solve
from pyps.solver.exact.minmax import times
from pyps.solver.exact.subset import solve_subset
from pyps.solver.milp.model import SolverName, minmax_milp
from pyps.solver.plan import make_plan
from pyps.solver.sync import Sync, SyncKind

SAMPLES_A_WORKER = 64
SIZES = (4, 16, 64, 256, 1_000, 10_000, 100_000)
RIVALS: tuple[SolverName, ...] = ("HiGHS", "CBC")
MARKERS = {"exact": ("o", "-"), "exact, ring": ("s", "-"), "HiGHS": ("^", "--"), "CBC": ("v", ":")}


@dataclass(frozen=True)
class Case:
    """One instance: what it is, how many workers, the call that solves it, and the bar in milliseconds."""

    name: str
    workers: int
    call: Callable[[], object]
    bar: float | None = None


def lines(n: int, *, knee: bool = False) -> Problem:
    """Random unlike devices: 1 to 50 ms a step, 0.1 to 5 ms a sample, caps of 96 to 512."""
    luck = np.random.default_rng(n)
    floor = luck.uniform(0.0, 0.1, n) if knee else 0.0
    costs = Costs.lines(luck.uniform(0.001, 0.05, n), luck.uniform(1e-4, 5e-3, n), floor)
    return Problem.of(costs, SAMPLES_A_WORKER * n, max_batch=luck.integers(96, 513, n))


def quanta(n: int, steps: Sequence[int] = (1, 8)) -> Problem:
    """The same in unlike steps, worker after worker."""
    base = lines(n)
    return Problem.of(
        base.costs, base.global_batch, max_batch=base.max_batch, batch_multiple=np.resize(steps, n)
    )


def tables(n: int) -> Problem:
    """Measured tables instead of lines."""
    luck = np.random.default_rng(n)
    batches = [1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 256, 512]
    rows = [np.sort(luck.uniform(0.001, 1.0, len(batches))).tolist() for _ in range(n)]
    costs = Costs.stack([Table(tuple(zip(batches, row, strict=True))) for row in rows])
    return Problem.of(costs, SAMPLES_A_WORKER * n)


def links(kind: SyncKind, n: int, slower: float = 1.0) -> Sync:
    """10 to 100 us of latency, 0.1 to 1 ms for the model, or `slower` times that."""
    luck = np.random.default_rng(n + 1)
    return Sync.of(kind, n, luck.uniform(1e-5, 1e-4, n), slower * luck.uniform(1e-4, 1e-3, n))


def split(name: str, n: int, problem: Problem, bar: float | None = None) -> Case:
    return Case(name, n, lambda: solve(problem), bar)


def subset(kind: SyncKind, n: int, bar: float | None = None, slower: float = 1.0) -> Case:
    """Quanta of 1, 8 and 16, and a choice of workers."""
    problem, sync = quanta(n, (1, 8, 16)), links(kind, n, slower)
    name = f"quanta and a {kind}" + (f", links {slower:g} times slower" if slower != 1 else "")
    return Case(name, n, lambda: solve_subset(problem, sync), bar)


def with_minima(n: int, bar: float) -> Case:
    """Quanta of 1, 8 and 16, and a quarter of the workers with a minimum of 32."""
    base = quanta(n, (1, 8, 16))
    problem = Problem.of(
        base.costs,
        base.global_batch,
        min_batch=np.resize([1, 1, 1, 32], n),
        max_batch=base.max_batch,
        batch_multiple=base.batch_multiple,
    )
    return Case("quanta and minima", n, lambda: solve(problem), bar)


def in_shares(n: int, bar: float) -> Case:
    """A whole plan of n unlike cards whose samples take unlike memory: batches and shares of 4 billion."""
    luck = np.random.default_rng(n)
    groups, profiles = [], []
    for k, budget in enumerate(luck.choice([12, 24, 40, 80], n).tolist()):
        groups.append(WorkerGroup(name=f"g{k}", profile=f"p{k}", bandwidth=1e9))
        fit = Fit(
            kind="affine",
            fixed_seconds=0.01,
            per_sample_seconds=float(luck.uniform(0.005, 0.05)),
            trusted_min_batch=1,
            trusted_max_batch=512,
        )
        sample = float(luck.choice([0.3, 0.5, 0.8])) * 1e9
        memory = Memory(fixed_bytes=65 * 10**9, bytes_per_sample=sample, budget_bytes=budget * 2**30)
        model = ModelInfo(name="m", parameters=4 * 10**9, optimizer="AdamW")
        profiles.append(
            Profile(
                device=Device(name="d"),
                model=model,
                points=[Point(batch=1, seconds=1.0)],
                fit=fit,
                memory=memory,
            )
        )
    sharding = Sharding(stage=3, shares="memory")
    cluster = Cluster(
        job=Job(global_batch=30 * n), worker=groups, sync=SyncCost(kind="ring"), sharding=sharding
    )
    return Case("plan, shares by memory", n, lambda: make_plan(cluster, profiles), bar)


def cases() -> list[Case]:
    """The table of times and bars."""
    return [
        split("lines", 256, lines(256)),
        split("knees", 256, lines(256, knee=True)),
        split("quanta 1 and 8", 256, quanta(256)),
        split("tables", 256, tables(256)),
        *(subset(kind, 1000, 1000.0) for kind in ("ring", "tree", "server")),
        *(subset(kind, 10_000, 5000.0) for kind in ("ring", "tree", "server")),
        subset("ring", 10_000, 5000.0, slower=100.0),
        with_minima(10_000, 5000.0),
        *(in_shares(n, 1000.0) for n in (256, 4096)),
        split("lines", 100_000, lines(100_000), 100.0),
        split("knees", 100_000, lines(100_000, knee=True), 100.0),
    ]  # fmt: skip


def measure(some: list[Case], runs: int) -> list[tuple[list[float], list[float]]]:
    """Seconds of each case, interleaved: by the clock, and of the processor, which others stretch less."""
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in some]
    for _ in range(runs):
        for (wall, cpu), case in zip(times, some, strict=True):
            begin = time.process_time()
            wall.append(seconds_of(case.call))
            cpu.append(time.process_time() - begin)
    return times


def growth(runs: int, limit: float, sizes: Sequence[int]) -> dict[str, list[tuple[int, float]]]:
    """Seconds by the number of workers: ours, the choice of workers with a ring, and the rivals."""
    exact = [split("lines", n, lines(n)) for n in sizes]
    ring = [subset("ring", n) for n in sizes if n <= 10_000]
    found = {
        name: [
            (c.workers, statistics.median(wall))
            for c, (wall, _) in zip(some, measure(some, runs), strict=True)
        ]
        for name, some in (("exact", exact), ("exact, ring", ring))
    }
    for rival in RIVALS if limit else ():
        found[rival] = []
        for n in sizes:
            seconds = seconds_of(lambda rival=rival, n=n: _by_rival(lines(n), rival, limit))
            found[rival].append((n, seconds))
            if seconds >= limit:
                break
    return found


def _by_rival(problem: Problem, rival: SolverName, limit: float) -> None:
    try:
        milp = minmax_milp(problem)
        milp.minimise(milp.t, rival, limit)
    except PypsError as error:
        print(f"{len(problem.costs)} workers, {rival}: {error}")
        return
    theirs = float(times(problem.costs, milp.batches()).max())
    ours = solve(problem).iteration_seconds
    if abs(theirs - ours) > 1e-5 * ours:
        raise SystemExit(f"{rival} finds {theirs} s, we {ours} s")


def growth_rows(found: dict[str, list[tuple[int, float]]]) -> list[list[str]]:
    """One row a size, a column a solver."""
    rows = [["workers", *(f"{name}, ms" for name in found)]]
    for n, _ in found["exact"]:
        times = [dict(points).get(n) for points in found.values()]
        rows.append([f"{n:,}", *("" if t is None else f"{1e3 * t:,.1f}" for t in times)])
    return rows


def draw(found: dict[str, list[tuple[int, float]]]) -> None:
    """Log-log: time against the number of workers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in found.items():
        marker, line = MARKERS[name]
        sizes, times = zip(*points, strict=True)
        axes.loglog(
            sizes, [1e3 * t for t in times], marker=marker, linestyle=line, color="black",
            markerfacecolor="white" if name in RIVALS else "black", label=name,
        )  # fmt: skip
    axes.set(xlabel="workers", ylabel="time to the optimum (ms)")
    axes.grid(color="0.9")
    axes.legend(frameon=False)
    figure.savefig(kept_at("solver.png"), dpi=120)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--rival-limit", type=float, default=20.0, help="seconds; 0: no rivals")
    parser.add_argument("--most-workers", type=int, default=SIZES[-1], help="leave out larger cases")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    some = [case for case in cases() if case.workers <= options.most_workers]
    rows = [["case", "workers", "ms (range)", "CPU ms", "bar, ms"]]
    for case, (wall, cpu) in zip(some, measure(some, options.runs), strict=True):
        bar = f"< {case.bar:g}" if case.bar else ""
        rows.append(
            [case.name, f"{case.workers:,}", milliseconds(wall), f"{1e3 * statistics.median(cpu):.1f}", bar]
        )
    sizes = [n for n in SIZES if n <= options.most_workers]
    found = growth(options.runs, options.rival_limit, sizes)
    text = f"{machine()}.\n\n{table(rows)}\n\n{table(growth_rows(found))}"
    print(text)
    if options.save:
        save_table("solver", text)
        draw(found)


if __name__ == "__main__":
    main()
