"""The search by kinds: equal to brute force over all splits, and fast where many workers are alike."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples, sampled

from pyps.errors import Infeasible
from pyps.solver.constrained import ConstrainedProblem, Limit, Resource, evaluate
from pyps.solver.costs import Costs, Floats
from pyps.solver.exact import kinds
from pyps.solver.exact.minmax import Problem, at_index, solve
from pyps.solver.jobs.pareto import pareto_front, within_budget
from pyps.solver.milp.constrained import solve_constrained
from pyps.solver.sync import Sync, SyncKind

SYNCS: list[SyncKind] = ["none", "ring", "tree", "server"]
EXACT = 1e-9  # relative


def random_kinds(seed: int) -> tuple[ConstrainedProblem, Floats]:
    """Up to five workers of one to three kinds with every side constraint but hosts, and their prices."""
    luck = np.random.default_rng(seed)
    like = np.sort(luck.integers(0, int(luck.integers(1, 4)), int(luck.integers(2, 6))))
    n = len(like)
    costs = Costs.lines(
        luck.uniform(0.05, 0.4, 3)[like], luck.uniform(0.02, 0.3, 3)[like], luck.choice([0, 0.5], 3)[like]
    )
    cap = luck.choice([4, 6], 3)[like]
    if luck.random() < 0.3:
        costs, cap = costs.accumulated(np.maximum(cap // 2, 1)), cap
    problem = Problem.of(
        costs,
        int(luck.integers(4, 16)),
        min_batch=luck.choice([1, 1, 3], 3)[like],
        max_batch=cap,
        batch_multiple=luck.choice([1, 1, 2], 3)[like],
        required=(luck.random(3) < 0.15)[like],
    )
    latency, message = luck.choice([0.0, 0.1], 3)[like], luck.choice([0.05, 0.3], 3)[like]
    shares = {"overlap": float(luck.choice([0.0, 0.6, 1.0])), "tail": float(luck.choice([0.0, 0.2, 1.0]))}
    sync = Sync.of(SYNCS[seed % 4], n, latency, message, **shares)
    price = luck.choice([0.0, 0.5, 1.0, 2.0, 3.0], 3)[like]
    limits = [Limit("price_per_hour", price, float(luck.uniform(1, 8)))] * bool(luck.random() < 0.6)
    limits += [Limit("watts", luck.choice([100.0, 250.0], n), 600)] * bool(luck.random() < 0.3)
    link = Resource("link", *_on_link(luck, like), overlaps=bool(luck.random() < 0.5))
    resources = (link,) * bool(luck.random() < 0.5)
    together = tuple(luck.permutation(n)[:2] for _ in range(int(luck.integers(0, 3))))
    return ConstrainedProblem(problem, sync, tuple(limits), resources, together), price


def _on_link(luck: np.random.Generator, like: np.ndarray) -> tuple[np.ndarray, Floats]:  # type: ignore[type-arg]
    members = (luck.random(3) < 0.6)[like]
    return members, np.where(members, luck.choice([0.0, 0.2, 0.4], 3)[like], 0.0)


def splits(constrained: ConstrainedProblem) -> list[tuple[float, np.ndarray]]:  # type: ignore[type-arg]
    """The seconds and the batches of every split that keeps all bounds and ties."""
    problem, found = constrained.problem, []
    sets = [
        [0] * (not must) + [b for b in range(int(low), int(cap) + 1) if b % step == 0]
        for low, cap, step, must in zip(
            problem.min_batch, problem.max_batch, problem.batch_multiple, problem.required, strict=True
        )
    ]
    for split in itertools.product(*sets):
        if sum(split) != problem.global_batch:
            continue
        batches = np.array(split)
        used = batches > 0
        whole = all(used[g].all() or not used[g].any() for g in constrained.together)
        if whole and all(x.need[used].sum() <= x.at_most for x in constrained.limits):
            found.append((evaluate(constrained, batches).longest_seconds, batches))
    return found


@settings(max_examples=examples(20, 80), deadline=None)
@given(st.integers(0, 10**9))
def test_equal_to_brute_force(seed: int) -> None:
    constrained, price = random_kinds(seed)
    every = splits(constrained)
    if not every:
        with pytest.raises(Infeasible):
            solve_constrained(constrained)
        return
    best = min(seconds for seconds, _ in every)
    assert (found := kinds.fastest(constrained)) is not None
    assert found.longest_seconds == pytest.approx(best, rel=EXACT)
    latest = best * 1.2137
    least = min(float(price[b > 0].sum()) for seconds, b in every if seconds <= latest)
    cheap = kinds.cheapest(constrained, price, latest * (1 + EXACT))
    assert cheap is not None
    assert float(price[cheap.batches > 0].sum()) == pytest.approx(least, abs=EXACT)
    assert cheap.longest_seconds <= latest * (1 + EXACT)
    spent = sorted(seconds * float(price[b > 0].sum()) for seconds, b in every)
    budget = spent[len(spent) // 3] * (1 + EXACT)
    within = min(s for s, b in every if s * float(price[b > 0].sum()) <= budget)
    bought = kinds.fastest(constrained, (price, budget))
    assert bought is not None
    assert bought.longest_seconds == pytest.approx(within, rel=EXACT)


def fleet(counts: tuple[int, ...] = (16, 24, 24)) -> tuple[ConstrainedProblem, Floats]:
    """Three kinds of GPU over a ring, and their prices."""
    like = np.repeat(np.arange(3), counts)
    costs = Costs.lines(np.array([0.01, 0.012, 0.02])[like], np.array([8e-4, 1.5e-3, 6e-3])[like])
    problem = Problem.of(costs, 4096, max_batch=np.array([512, 256, 64])[like])
    return ConstrainedProblem(problem, Sync.of("ring", len(like), 1e-5, 0.05)), np.array([4.1, 2.2, 0.53])[
        like
    ]


def boxes(constrained: ConstrainedProblem, most: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The seconds of the optimum, found within so many boxes."""
    monkeypatch.setattr(kinds, "MOST_BOXES", most)
    found = kinds.fastest(constrained)
    assert found is not None
    return found.longest_seconds


def test_a_fleet_takes_few_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, price = fleet()
    limited = replace(ring, limits=(Limit("price_per_hour", price, 70.0),))
    seconds = boxes(limited, 500, monkeypatch)
    for counts in itertools.product(range(1, 17, 5), range(0, 25, 8), range(0, 25, 8)):
        used, hourly = fleet(counts)
        if hourly.sum() <= 70 and int(used.problem.max_batch.sum()) >= 4096:
            assert seconds <= evaluate(used, solve(used.problem).batches).longest_seconds
    tied = replace(ring, together=(np.arange(40),))
    assert boxes(tied, 500, monkeypatch) >= boxes(ring, 500, monkeypatch)


def test_a_front_and_a_budget_of_a_fleet_agree() -> None:
    ring, price = fleet((7, 6, 6))
    points = list(itertools.islice(pareto_front(ring, price), 9))
    assert len(points) == 9
    for point in points[::2]:
        budget = point.price_per_million_samples * (1 + EXACT)
        first = next(p for p in points if p.price_per_million_samples <= budget)
        found = within_budget(ring, price, budget)
        assert found.iteration_seconds == pytest.approx(first.solution.iteration_seconds, rel=1e-6)


def test_a_search_without_an_end_is_left_to_the_milp(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, price = fleet((3, 3, 3))
    limited = replace(
        ring,
        problem=replace(ring.problem, global_batch=600),
        limits=(Limit("price_per_hour", price, 9.0),),
    )
    exact = solve_constrained(limited).longest_seconds
    monkeypatch.setattr(kinds, "MOST_BOXES", 0)
    assert solve_constrained(limited).longest_seconds == pytest.approx(exact, abs=3e-6)


@pytest.mark.parametrize("seed", sampled(range(60), *range(20)))
def test_the_order_of_the_workers_decides_nothing(seed: int) -> None:
    constrained, _ = random_kinds(seed)
    luck, n = np.random.default_rng(seed), len(constrained.problem.costs)
    order = luck.permutation(n)
    place = np.argsort(order)
    turned = replace(
        constrained,
        problem=at_index(constrained.problem, order),
        sync=constrained.sync.take(order),
        limits=tuple(replace(one, need=one.need[order]) for one in constrained.limits),
        resources=tuple(
            replace(one, workers=one.workers[order], transfer_seconds=one.transfer_seconds[order])
            for one in constrained.resources
        ),
        together=tuple(place[group] for group in constrained.together),
    )
    try:
        batches = solve_constrained(constrained).batches
    except Infeasible:
        return
    again = solve_constrained(turned).batches[place]
    for kind in constrained.kinds():
        assert sorted(batches[kind].tolist()) == sorted(again[kind].tolist())


def test_rounding_does_not_send_the_search_round_in_circles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices, used alone, at a power cap or in pairs: a few hundred boxes settle each front."""
    monkeypatch.setattr(kinds, "MOST_BOXES", 500)
    like = np.repeat([0, 1, 2], [4, 4, 2])
    costs = Costs.lines(
        np.array([0.0059, 0.0065, 0.0047])[like], np.array([0.0005, 0.00058, 0.00028])[like], np.zeros(10)
    )
    devices, price = np.array([1.0, 1.0, 2.0])[like], np.array([2.0, 1.4, 4.4])[like]
    for total in range(200, 1000, 40):
        problem = Problem.of(costs, total, max_batch=[256] * 10)
        for budget in (1.4, 2.8, 4.2, 4.8, 5.6, 6.2, 8.0):
            limits = (Limit("devices", devices, 4.0), Limit("price_per_hour", price, budget))
            kinds.fastest(ConstrainedProblem(problem, Sync.of("none", 10), limits))
            goal = ConstrainedProblem(problem, Sync.of("none", 10), limits[:1])
            kinds.cheapest(goal, price, 0.01 * budget)
