"""How even R2SP's gaps are, by workers and jitter, and how even any policy could make them:
python benchmarks/papers/gaps.py [--save]

A ring of N workers whose order is fixed: between two pushes of one lie N gaps, and they are at least as long
as its step. `least_variation` is the smallest variation of such gaps with a mean cycle of 1.07 T if all step
times are known in advance (a quadratic program), so no policy can be below it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import cvxpy as cp
import numpy as np
from benchmark_tools import record
from numpy.typing import NDArray

from pyps.formats import Jitter
from pyps.simulate import Scenario, SimWorker, simulate

MAX_VARIATION, MAX_CYCLE = 0.15, 1.07
STEP_SECONDS, CYCLES, SEEDS, WARM = 0.4, 400, 5, 4  # warm: cycles until the measured step is known
AHEAD = 1500  # steps known in advance
KINDS = {
    "uniform within 10 %": Jitter(spread=0.1),
    "lognormal, standard deviation 10 %": Jitter(sigma=0.1),
}


def measured(seconds: Sequence[float], jitter: Jitter, seed: int) -> tuple[float, float]:
    """The gaps' coefficient of variation, and a mean cycle over the slowest's mean step."""
    workers = tuple(SimWorker(f"w{k}", 8, lambda _, t=t: t, jitter) for k, t in enumerate(seconds))  # type: ignore[misc]
    result = simulate(Scenario(workers), "r2sp", iterations=CYCLES, seed=seed, timeline=True)
    gaps = np.diff([at for _, at in result.pushed_at])[WARM * len(workers) : -len(workers)]
    return float(gaps.std() / gaps.mean()), float(gaps.mean() * len(workers) / max(seconds))


def least_variation(count: int, jitter: Jitter, seed: int) -> float:
    """The smallest coefficient of variation that any policy could reach with a mean cycle of 1.07 steps."""
    draw = np.random.default_rng(seed)
    steps: NDArray[np.float64] = np.exp(jitter.sigma * draw.standard_normal(AHEAD) - 0.5 * jitter.sigma**2)
    steps = steps * draw.uniform(1.0 - jitter.spread, 1.0 + jitter.spread, AHEAD)
    gaps, mean = cp.Variable(AHEAD + count), MAX_CYCLE / count
    total = cp.cumsum(gaps)
    rules = [total[count:] - total[:-count] >= steps, gaps >= 0, cp.sum(gaps) == mean * (AHEAD + count)]
    cp.Problem(cp.Minimize(cp.sum_squares(gaps - mean)), rules).solve(solver=cp.CLARABEL)
    return float(gaps.value.std() / mean)


def row(name: str, seconds: Sequence[float], jitter: Jitter) -> list[str]:
    variation, cycle = (
        statistics.fmean(values)
        for values in zip(*(measured(seconds, jitter, seed) for seed in range(SEEDS)), strict=True)
    )
    alike = len(set(seconds)) == 1
    limit = (
        statistics.fmean(least_variation(len(seconds), jitter, s) for s in range(SEEDS))
        if alike
        else float("nan")
    )
    met = variation <= MAX_VARIATION and cycle <= MAX_CYCLE
    figures = [f"{variation:.3f}", f"{cycle:.3f}", f"{limit:.3f}" if alike else "-"]
    return [name, str(len(seconds)), *figures, "yes" if met else "no"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = [["jitter", "workers", "gaps vary by", "cycle / T", "no policy below", "both met"]]
    for name, jitter in KINDS.items():
        rows += [row(name, [STEP_SECONDS] * count, jitter) for count in range(2, 9)]
        unlike = [STEP_SECONDS * (0.5 + 0.5 * (k + 1) / 8) for k in range(8)]
        rows.append(row(f"{name}; steps of 0.56 to 1 T", unlike, jitter))
    text = f"{record.machine()}. {SEEDS} seeds of {CYCLES} cycles, slack 1.\n\n{record.table(rows)}"
    print(text)
    if options.save:
        record.save_table("gaps", text, "papers.md")


if __name__ == "__main__":
    main()
