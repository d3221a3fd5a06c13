"""How long the exact split takes, with HiGHS on the same 256 workers beside it.

    python benchmarks/solver.py [--runs 15] [--highs-limit 20]

Medians (and the slowest) of interleaved runs on random clusters: lines, lines with a knee, unlike quanta, and
tables of 12 points. HiGHS solves the first once, through PuLP, with no gap allowed, up to the time limit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table as Screen

from pyps.errors import PypsError
from pyps.solver import Costs, Problem, Table, solve
from pyps.solver.checks import milp

SAMPLES_A_WORKER = 64
LIMIT_MS = {256: 5.0, 100_000: 200.0}


def lines(n: int, *, knee: bool = False) -> Problem:
    """Random unlike devices: 1 to 50 ms a step, 0.1 to 5 ms a sample, caps of 96 to 512."""
    luck = np.random.default_rng(n)
    floor = luck.uniform(0.0, 0.1, n) if knee else 0.0
    costs = Costs.lines(luck.uniform(0.001, 0.05, n), luck.uniform(1e-4, 5e-3, n), floor)
    return Problem.of(costs, SAMPLES_A_WORKER * n, cap=luck.integers(96, 513, n))


def quanta(n: int) -> Problem:
    """The same with every other worker in steps of 8."""
    base = lines(n)
    return Problem.of(base.costs, base.global_batch, cap=base.cap, quantum=np.where(np.arange(n) % 2, 8, 1))


def tables(n: int) -> Problem:
    """Measured tables instead of lines."""
    luck = np.random.default_rng(n)
    batches = [1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 256, 512]
    rows = [np.sort(luck.uniform(0.001, 1.0, len(batches))).tolist() for _ in range(n)]
    costs = Costs.stack([Table(tuple(zip(batches, row, strict=True))) for row in rows])
    return Problem.of(costs, SAMPLES_A_WORKER * n)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--highs-limit", type=float, default=20.0, help="seconds; 0: without HiGHS")
    chosen = parser.parse_args(arguments)
    cases: dict[tuple[str, int], Problem] = {
        ("lines", 256): lines(256),
        ("knees", 256): lines(256, knee=True),
        ("quanta 1 and 8", 256): quanta(256),
        ("tables", 256): tables(256),
        ("lines", 100_000): lines(100_000),
        ("knees", 100_000): lines(100_000, knee=True),
    }
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in cases}
    for _ in range(chosen.runs):
        for key, problem in cases.items():
            taken[key].append(_milliseconds(lambda problem=problem: solve(problem)))
    screen = Screen(
        "costs", "workers", "solver", "median ms", "slowest ms", "limit ms", "iteration s", box=None
    )
    for (name, n), problem in cases.items():
        ms = taken[name, n]
        found = solve(problem).iteration_seconds
        screen.add_row(
            name,
            str(n),
            "exact",
            f"{statistics.median(ms):.2f}",
            f"{max(ms):.2f}",
            f"{LIMIT_MS[n]:g}",
            f"{found:.6f}",
        )
    if chosen.highs_limit > 0:
        screen.add_row("lines", "256", "HiGHS", *_highs(cases["lines", 256], chosen.highs_limit))
    Console().print(screen)


def _highs(problem: Problem, limit_seconds: float) -> tuple[str, str, str, str]:
    start = time.perf_counter()
    try:
        _, found = milp(problem, time_limit_seconds=limit_seconds)
        answer = f"{found:.6f}"
    except PypsError as error:
        answer = str(error)
    ms = f"{1000 * (time.perf_counter() - start):.0f}"
    return ms, ms, "", answer


def _milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
