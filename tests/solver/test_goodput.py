"""Goodput: equal to trying every batch, within the gap that is promised."""

from __future__ import annotations

import numpy as np
import pytest
from sampled import sampled

from pyps.errors import Infeasible
from pyps.solver.constrained import ConstrainedProblem
from pyps.solver.costs import Costs
from pyps.solver.exact.minmax import Problem
from pyps.solver.milp.constrained import solve_constrained
from pyps.solver.sync import Sync, SyncKind
from pyps.solver.systems.goodput import GAP, StatisticalEfficiency, best_batch

KINDS: list[SyncKind] = ["none", "ring", "server"]


def goodput(constrained: ConstrainedProblem, worth: StatisticalEfficiency, batch: int) -> float:
    problem = constrained.problem
    at = Problem(
        problem.costs, batch, problem.min_batch, problem.max_batch, problem.batch_multiple, problem.required
    )
    try:
        seconds = solve_constrained(ConstrainedProblem(at, constrained.sync)).iteration_seconds
    except Infeasible:
        return 0.0
    return batch / seconds * (worth.noise_scale + worth.base_batch) / (worth.noise_scale + batch)


@pytest.mark.parametrize("seed", sampled(range(12), 0, 4, 9))
def test_no_batch_is_better_by_more_than_the_gap(seed: int) -> None:
    luck = np.random.default_rng(seed)
    n = int(luck.integers(1, 5))
    costs = Costs.lines(luck.uniform(0.0, 0.4, n), luck.uniform(0.001, 0.1, n))
    problem = Problem.of(costs, 1, max_batch=luck.choice([40, 90], n), batch_multiple=luck.choice([1, 4]))
    constrained = ConstrainedProblem(problem, Sync.of(KINDS[seed % 3], n, 0.01, luck.choice([0.05, 0.3], n)))
    worth = StatisticalEfficiency(float(luck.choice([5.0, 50.0, 5000.0])), 16)
    batch, split = best_batch(constrained, worth)
    best = max(goodput(constrained, worth, b) for b in range(1, int(problem.max_batch.sum()) + 1))
    assert split.batches.sum() == batch
    assert goodput(constrained, worth, batch) >= best / (1 + GAP)


def test_no_cap_is_needed() -> None:
    constrained = ConstrainedProblem(Problem.of(Costs.lines([0.1], [0.001]), 1), Sync.of("none", 1))
    batch, _ = best_batch(constrained, StatisticalEfficiency(400.0, 32))
    # B / (c + a B) / (phi + B) is largest at sqrt(c phi / a)
    assert batch == pytest.approx((0.1 * 400 / 0.001) ** 0.5, rel=0.1)
    assert goodput(constrained, StatisticalEfficiency(400.0, 32), batch) >= goodput(
        constrained, StatisticalEfficiency(400.0, 32), 200
    ) / (1 + GAP)


def test_a_sample_is_worth_one_at_the_base_batch() -> None:
    worth = StatisticalEfficiency(1000.0, 64)
    assert worth.efficiency(64) == 1.0
    assert worth.efficiency(10**9) == pytest.approx(0.0, abs=1e-5)


def test_nothing_to_choose_from_is_refused() -> None:
    problem = Problem.of(Costs.lines([0.1], [0.001]), 1, max_batch=3, min_batch=5)
    with pytest.raises(Infeasible, match="no global batch"):
        best_batch(ConstrainedProblem(problem, Sync.of("none", 1)), StatisticalEfficiency(10.0, 8))


def test_batches_that_are_all_too_large_are_refused() -> None:
    problem = Problem.of(Costs.lines([0.1], [0.001]), 32, batch_multiple=32)
    with pytest.raises(Infeasible, match="no global batch up to 16"):
        best_batch(ConstrainedProblem(problem, Sync.of("none", 1)), StatisticalEfficiency(10.0, 8), 16)
