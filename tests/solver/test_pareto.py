"""The Pareto front is that of all splits, by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sampled import sampled

from pyps.errors import Infeasible
from pyps.solver.constrained import ConstrainedProblem, Resource, evaluate
from pyps.solver.costs import Costs
from pyps.solver.exact.minmax import Problem
from pyps.solver.jobs import pareto
from pyps.solver.jobs.pareto import pareto_front, within_budget
from pyps.solver.milp.constrained import solve_constrained
from pyps.solver.sync import Sync, SyncKind

KINDS: list[SyncKind] = ["none", "ring", "server"]


def random_case(seed: int) -> tuple[ConstrainedProblem, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    luck = np.random.default_rng(seed)
    n = int(luck.integers(2, 5))
    costs = Costs.lines(luck.uniform(0.05, 0.4, n), luck.uniform(0.02, 0.3, n))
    problem = Problem.of(costs, int(luck.integers(4, 13)), max_batch=luck.choice([4, 8, 12], n))
    sync = Sync.of(KINDS[seed % 3], n, luck.choice([0.0, 0.1], n), luck.choice([0.05, 0.3], n))
    members = luck.random(n) < 0.7
    ties = (Resource("link", members, np.where(members, 0.2, 0.0)),) if seed % 2 else ()
    return ConstrainedProblem(problem, sync, resources=ties), luck.choice([0.5, 1.0, 2.0, 3.0], n)


@pytest.mark.parametrize("seed", sampled(range(30), *range(10)))
def test_equal_to_brute_force(seed: int) -> None:
    constrained, price = random_case(seed)
    problem = constrained.problem
    points = []
    for split in itertools.product(*(range(int(cap) + 1) for cap in problem.max_batch)):
        if sum(split) == problem.global_batch:
            batches = np.array(split)
            points.append((float(price[batches > 0].sum()), evaluate(constrained, batches).iteration_seconds))
    if not points:
        with pytest.raises(Infeasible):
            list(pareto_front(constrained, price))
        return
    front, best = [], float("inf")
    for hourly, seconds in sorted(points):
        if seconds < best:
            front.append((hourly, seconds))
            best = seconds
    found = [
        (point.price_per_hour, point.solution.iteration_seconds) for point in pareto_front(constrained, price)
    ]
    assert len(found) == len(front)
    for ours, theirs in zip(found[::-1], front, strict=True):
        assert ours == pytest.approx(theirs, abs=3e-6)
    assert found[0][1] == pytest.approx(solve_constrained(constrained).iteration_seconds, abs=3e-6)


def test_the_price_of_samples_follows_from_the_front() -> None:
    problem = Problem.of(Costs.lines([0.1, 0.1], [0.01, 0.02]), 90)
    points = list(pareto_front(ConstrainedProblem(problem, Sync.of("none", 2)), np.array([2.0, 0.5])))
    assert [point.price_per_hour for point in points] == [2.5, 2.0, 0.5]
    fastest = points[0]
    per_sample = fastest.price_per_hour / 3600 * fastest.solution.iteration_seconds / 90
    assert fastest.price_per_million_samples == pytest.approx(1e6 * per_sample)


def test_a_front_of_many_points_is_whole() -> None:
    """One of 120 equal workers up to all of them: each is worth its price."""
    price = np.ones(120)
    problem = Problem.of(Costs.lines([0.001] * 120, [0.01] * 120), 120_000)
    points = pareto_front(ConstrainedProblem(problem, Sync.of("none", 120)), price)
    assert [point.price_per_hour for point in points] == list(range(120, 0, -1))


@pytest.mark.parametrize("seed", sampled(range(12), *range(6)))
def test_a_budget_buys_the_fastest_split_that_it_can(seed: int) -> None:
    constrained, price = random_case(seed)
    problem = constrained.problem
    points = []
    for split in itertools.product(*(range(int(cap) + 1) for cap in problem.max_batch)):
        if sum(split) == problem.global_batch:
            seconds = evaluate(constrained, np.array(split)).iteration_seconds
            hourly = float(price[np.array(split) > 0].sum())
            points.append((seconds, 1e6 * hourly * seconds / 3600 / problem.global_batch))
    if not points:
        return
    costs = sorted(cost for _, cost in points)
    for budget in (costs[len(costs) // 4] * (1 + 1e-5), costs[-1]):
        best = min(seconds for seconds, cost in points if cost <= budget)
        found = within_budget(constrained, price, budget)
        assert found.iteration_seconds == pytest.approx(best, abs=3e-6)
    with pytest.raises(Infeasible) as refusal:
        within_budget(constrained, price, costs[0] * 0.9)
    enough = float(refusal.value.nearest.split()[-1])
    assert enough == pytest.approx(costs[0], rel=1e-4)
    assert within_budget(constrained, price, enough).batches.sum() == problem.global_batch


@pytest.mark.parametrize("searched", [20_000, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_coarse_front_matches_every_choice_to_within_its_step(
    seed: int, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some points, or where a search has no end. Prices are all unlike."""
    monkeypatch.setattr(pareto, "MANY", 1)
    monkeypatch.setattr(pareto, "COARSE", 0.1)
    monkeypatch.setattr("pyps.solver.exact.kinds.MOST_BOXES", searched)
    constrained, _ = random_case(3 * seed)
    problem = constrained.problem
    price = np.random.default_rng(seed).uniform(0.5, 3.0, len(problem.costs))
    points = list(pareto_front(constrained, price))
    times = [point.solution.longest_seconds for point in points]
    prices = [point.price_per_hour for point in points]
    assert times == sorted(times)
    assert all(b <= a * (1 - 1e-5) for a, b in itertools.pairwise(prices))
    for split in itertools.product(*(range(int(cap) + 1) for cap in problem.max_batch)):
        if sum(split) == problem.global_batch:
            hourly = float(price[np.array(split) > 0].sum())
            seconds = evaluate(constrained, np.array(split)).longest_seconds
            assert any(p <= 1.12 * hourly and t <= 1.12 * seconds for p, t in zip(prices, times, strict=True))


def test_a_front_of_unlike_devices_ends_in_coarse_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each costs what its speed is worth, nearly every choice is on the front."""
    monkeypatch.setattr(pareto, "MANY", 5)
    monkeypatch.setattr(pareto, "COARSE", 0.1)
    luck = np.random.default_rng(0)
    costs = Costs.lines(luck.uniform(0.005, 0.02, 8), luck.uniform(1e-4, 2e-3, 8))
    price = luck.uniform(0.9, 1.1, 8) / costs.a
    problem = Problem.of(costs, 500, max_batch=512)
    points = list(pareto_front(ConstrainedProblem(problem, Sync.of("none", 8)), price))
    assert 5 < len(points) < 6 + np.log(price.sum() / price.min()) / 0.1
