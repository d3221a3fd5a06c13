"""HiGHS and cvxpy, which know nothing of the exact solver, agree with it; the duals say what binds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sampled import sampled

from pyps.errors import Infeasible, PypsError
from pyps.solver.constrained import ConstrainedProblem
from pyps.solver.costs import Cost, Costs, Ints, Line, Table
from pyps.solver.exact.minmax import Problem, solve, times
from pyps.solver.milp.checks import ShadowPrices, agreement, shadow_prices
from pyps.solver.milp.model import minmax_milp
from pyps.solver.milp.relaxed import relaxed_seconds
from pyps.solver.sync import Sync

TOLERANCE = 1e-6  # HiGHS and Clarabel meet constraints to about this


def random_problem(seed: int, *, tables: bool = True) -> Problem:
    luck = np.random.default_rng(seed)
    n = int(luck.integers(2, 6))
    costs: list[Cost] = []
    for _ in range(n):
        kind = luck.integers(3 if tables else 2)
        c, a = float(luck.uniform(0.01, 0.5)), float(luck.uniform(0.001, 0.1))
        if kind == 2:
            batches = sorted({int(b) for b in luck.integers(1, 60, 5)})
            times = sorted(luck.uniform(0.05, 2.0, len(batches)).tolist())
            costs.append(Table(tuple(zip(batches, times, strict=True))))
        else:
            costs.append(Line(c, a, float(luck.uniform(0, 0.5)) if kind else 0.0))
    stacked = Costs.stack(costs)
    if luck.random() < 0.3:
        stacked = stacked.accumulated(luck.choice([7, 16], n))
    if luck.random() < 0.3:
        stacked = replace(stacked, transfer=luck.choice([0.0, 0.2, 0.7], n))
    return Problem.of(
        stacked,
        int(luck.integers(5, 120)),
        min_batch=luck.choice([1, 4, 20], n),
        max_batch=luck.choice([30, 80, 200], n),
        batch_multiple=luck.choice([1, 2, 4], n),
        required=luck.random(n) < 0.2,
    )


def alone(problem: Problem) -> ConstrainedProblem:
    """Without synchronisation or ties."""
    return ConstrainedProblem(problem, Sync.of("none", len(problem.costs)))


def by_highs(problem: Problem) -> Ints | None:
    """HiGHS' batches; None if it finds no split."""
    try:
        milp = minmax_milp(problem)
    except Infeasible:
        return None
    return milp.batches() if milp.minimise(milp.t) else None


@pytest.mark.parametrize("seed", sampled(range(30), *range(10)))
def test_highs_agrees(seed: int) -> None:
    problem = random_problem(seed)
    try:
        exact = solve(problem)
    except Infeasible:
        assert by_highs(problem) is None
        return
    batches = by_highs(problem)
    assert batches is not None
    assert batches.sum() == problem.global_batch
    theirs = float(times(problem.costs, batches).max())
    assert exact.iteration_seconds <= theirs <= exact.iteration_seconds * (1 + TOLERANCE)
    assert "same optimum" in agreement(alone(problem), exact.batches.tolist())


def test_a_split_that_is_not_optimal_is_found_out() -> None:
    problem = Problem.of(Costs.lines([0.1, 0.1], [0.01, 0.02]), 90)
    with pytest.raises(PypsError, match="disagrees"):
        agreement(alone(problem), [45, 45])


def test_a_split_of_a_coarse_search_may_be_off_by_its_step() -> None:
    problem = Problem.of(Costs.lines([0.1, 0.1], [0.01, 0.02]), 900)
    said = agreement(alone(problem), [601, 299], 0.01)
    assert "HiGHS finds 6.1 s, the plan takes 6.11 s" in said
    assert "same optimum" in agreement(alone(problem), [600, 300], 0.01)
    for split, coarse in (([601, 299], 0.0), ([620, 280], 0.01)):
        with pytest.raises(PypsError, match="disagrees"):
            agreement(alone(problem), split, coarse)


@pytest.mark.parametrize("seed", range(8))
def test_the_relaxation_of_cvxpy_is_ours(seed: int) -> None:
    luck = np.random.default_rng(seed)
    n = int(luck.integers(2, 8))
    problem = Problem.of(
        Costs.lines(luck.uniform(0, 0.1, n), luck.uniform(0.001, 0.1, n)),
        200 * n,
        max_batch=luck.choice([150, 400, 2000], n),
        required=True,
    )
    try:
        exact = solve(problem)
    except Infeasible:
        pytest.fail("the seeds are chosen such that all are feasible")
    theirs = shadow_prices(problem, exact.batches.tolist())
    bound = relaxed_seconds(problem, exact.iteration_seconds)
    assert theirs.iteration_seconds == pytest.approx(bound, rel=TOLERANCE)
    assert theirs.share.sum() == pytest.approx(1.0, rel=1e-4)


def test_prices_tell_what_a_change_is_worth() -> None:
    costs = Costs.lines([0.1, 0.1, 0.1], [0.01, 0.02, 0.04])
    capped = Problem.of(costs, 300, max_batch=[50, 500, 500])
    priced = shadow_prices(capped, solve(capped).batches.tolist())
    one_more = shadow_prices(Problem.of(costs, 301, max_batch=[50, 500, 500]), [50, 200, 51])
    wider = shadow_prices(Problem.of(costs, 300, max_batch=[51, 500, 500]), [51, 200, 49])
    assert one_more.iteration_seconds - priced.iteration_seconds == pytest.approx(priced.per_sample, rel=1e-3)
    assert priced.iteration_seconds - wider.iteration_seconds == pytest.approx(priced.max_batch[0], rel=1e-3)
    assert priced.share[0] == pytest.approx(0.0, abs=1e-6)
    assert priced.max_batch[1] == pytest.approx(0.0, abs=1e-6)


def test_tables_are_priced_by_their_lower_hull() -> None:
    problem = Problem.of(Costs.stack([Table(((10, 1.0), (20, 1.2), (40, 3.0))), Line(0.1, 0.1)]), 40)
    exact = solve(problem)
    assert shadow_prices(problem, exact.batches.tolist()).iteration_seconds <= exact.iteration_seconds * (
        1 + TOLERANCE
    )


def test_a_price_is_what_one_more_sample_costs_also_of_a_worker_that_has_all() -> None:
    costs = Costs.lines([0.02235, 0.0665, 0.0665], [0.000143, 0.000359, 0.000359])

    def priced(batch: int) -> ShadowPrices:
        problem = Problem.of(costs, batch, max_batch=[128] * 3)
        return shadow_prices(problem, solve(problem).batches.tolist())

    assert solve(Problem.of(costs, 96, max_batch=[128] * 3)).batches.tolist() == [96, 0, 0]
    assert priced(96).per_sample == pytest.approx(0.000143, rel=1e-3)
    assert priced(96).max_batch.tolist() == [0, 0, 0]
    for full in (128, 130):  # one more sample takes a jump, which no price says
        assert priced(full).per_sample == 0.0
        assert priced(full).max_batch.tolist() == [0, 0, 0]
    assert priced(160).per_sample == pytest.approx(0.000359 / 2, rel=1e-3)
