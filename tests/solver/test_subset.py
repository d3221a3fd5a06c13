"""Subset choice with a synchronisation cost: equal to brute force, and fast enough to be used."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples, sampled

from pyps.errors import Infeasible
from pyps.solver.costs import Cost, Costs, Line, Table
from pyps.solver.exact import subset
from pyps.solver.exact.cardinality import within_count
from pyps.solver.exact.minmax import Problem, at_index, rounded, solve, times, within_total
from pyps.solver.exact.subset import solve_subset
from pyps.solver.milp.relaxed import subset_bound
from pyps.solver.sync import Sync, SyncKind

thorough = settings(derandomize=True, deadline=None, max_examples=examples(37, 250))


def random_problem(seed: int) -> tuple[Problem, Sync]:
    luck = np.random.default_rng(seed)
    n = int(luck.integers(1, 6))
    costs: list[Cost] = []
    for _ in range(n):
        if luck.random() < 0.25:
            batches = sorted({int(b) for b in luck.integers(1, 20, 4)})
            costs.append(
                Table(tuple(zip(batches, sorted(luck.uniform(0.1, 2, len(batches)).tolist()), strict=True)))
            )
        else:
            costs.append(
                Line(
                    float(luck.uniform(0, 1)), float(luck.uniform(0.05, 0.5)), float(luck.choice([0.0, 1.0]))
                )
            )
    stacked = Costs.stack(costs)
    cap = luck.choice([4, 8, 16], n)
    if luck.random() < 0.3:
        stacked, cap = stacked.accumulated(np.maximum(cap, 1)), cap * luck.integers(1, 3, n)
    problem = Problem.of(
        stacked,
        int(luck.integers(1, 25)),
        min_batch=luck.choice([1, 1, 3, 6], n),
        max_batch=cap,
        batch_multiple=luck.choice([1, 2, 3], n),
        required=luck.random(n) < 0.15,
    )
    kinds: list[SyncKind] = ["none", "ring", "tree", "server"]
    sync = Sync.of(kinds[seed % 4], n, luck.choice([0.0, 0.1, 0.5], n), luck.choice([0.1, 0.4, 2.0], n))
    return problem, sync


def splits(problem: Problem) -> list[tuple[int, ...]]:
    """Every split that keeps the bounds: the definition, not the method."""
    sets = []
    for k in range(len(problem.costs)):
        one = problem.costs.take(np.array([k]))
        low, cap, multiple = (
            int(x[k]) for x in (problem.min_batch, problem.max_batch, problem.batch_multiple)
        )
        used = [b for b in range(max(low, 1), min(cap, problem.global_batch) + 1) if b % multiple == 0]
        used = [b for b in used if math.isfinite(one.seconds(np.array([b]))[0])]
        sets.append(used if problem.required[k] else [0, *used])
    return [split for split in itertools.product(*sets) if sum(split) == problem.global_batch]


@pytest.mark.parametrize("seed", sampled(range(240), *range(60)))
def test_equal_to_brute_force(seed: int) -> None:
    problem, sync = random_problem(seed)
    every = splits(problem)
    values = [float(times(problem.costs, np.array(split)).max()) + sync.seconds(split) for split in every]
    if not values:
        with pytest.raises(Infeasible):
            solve_subset(problem, sync)
        return
    found = solve_subset(problem, sync)
    assert found.iteration_seconds == pytest.approx(min(values), rel=1e-14)
    assert subset_bound(problem, sync, found.iteration_seconds) <= min(values)
    assert tuple(found.batches) in every
    assert found.iteration_seconds == found.seconds.max() + sync.seconds(found.batches)


def test_links_that_differ_by_a_rounding_alone_are_told_apart() -> None:
    luck = np.random.default_rng(1)
    n = 8
    problem = Problem.of(Costs.lines(luck.uniform(0.01, 0.1, n), luck.uniform(0.1, 0.5, n)), 40)
    message = [0.3, math.nextafter(0.3, 1), 0.1 + 0.2, 0.1 * 3, 0.3, 0.3, 0.3, math.nextafter(0.3, 0)]
    found = solve_subset(problem, Sync.of("server", n, 0.0, message))
    alike = solve_subset(problem, Sync.of("server", n, 0.0, 0.3))
    assert found.iteration_seconds == pytest.approx(alike.iteration_seconds, rel=1e-14)


@pytest.mark.parametrize("seed", sampled(range(12), *range(6)))
def test_exact_without_the_good_first_solutions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    luck = np.random.default_rng(seed)
    n = int(luck.integers(5, 9))
    problem = Problem.of(
        Costs.lines(luck.uniform(0.01, 0.1, n), luck.uniform(0.1, 0.5, n)),
        40,
        min_batch=luck.choice([1, 1, 3], n),
        required=luck.random(n) < 0.1,
    )
    kind: SyncKind = "ring" if seed % 4 == 0 else "tree"
    shares = {"overlap": 0.6, "tail": 0.2} if seed % 3 == 0 else {}
    sync = Sync.of(kind, n, luck.uniform(0.0, 0.1, n), luck.uniform(0.0, 0.3, n), **shares)
    best = math.inf
    for used in map(np.array, itertools.product([False, True], repeat=n)):
        if used.any() and not (problem.required & ~used).any():
            chosen = at_index(problem, np.flatnonzero(used))
            chosen = replace(chosen, required=np.ones(len(chosen.costs), bool))
            with contextlib.suppress(Infeasible):
                best = min(best, sync.end(solve(chosen).iteration_seconds, sync.seconds(used)))
    monkeypatch.setattr(subset.SubsetSearch, "explore", lambda self: None)
    assert solve_subset(problem, sync).iteration_seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("kind", ["ring", "tree", "server"])
@pytest.mark.parametrize("scale", [1, 100])
def test_no_count_and_link_is_missed(kind: SyncKind, scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    luck = np.random.default_rng(scale)
    n = 20
    problem = Problem.of(
        Costs.lines(luck.uniform(0.001, 0.05, n), luck.uniform(1e-4, 5e-3, n)),
        64 * n,
        max_batch=luck.integers(96, 513, n),
        batch_multiple=luck.choice([1, 8, 16], n),
        min_batch=luck.choice([1, 32], n),
    )
    sync = Sync.of(kind, n, luck.uniform(1e-4, 1e-3, n), scale * luck.uniform(1e-4, 1e-3, n))
    monkeypatch.setattr(subset.SubsetSearch, "explore", lambda self: None)
    found = solve_subset(problem, sync)
    every = subset.SubsetSearch(
        within_total(rounded(problem)), sync, replace(found, iteration_seconds=math.inf)
    )
    for count in range(1, n + 1):
        for seconds in sync.by_link(count):
            every.consider(count, float(seconds))
    assert found.iteration_seconds == pytest.approx(every.best_seconds, rel=1e-12)


@thorough
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 12), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 24),
    st.integers(1, 5),
)
def test_fewest_equals_brute_force(rows: list[tuple[int, int, int, bool]], total: int, count: int) -> None:
    multiple = np.array([row[0] for row in rows])
    low = -(-np.array([row[1] for row in rows]) // multiple) * multiple
    most = np.array([row[2] for row in rows]) // multiple * multiple
    required = np.array([row[3] for row in rows])
    most = np.where(required, np.maximum(most, low), np.where(most < low, 0, most))
    problem = Problem.of(
        Costs.lines(np.ones(len(rows)), 1.0), total, min_batch=low, batch_multiple=multiple, required=required
    )
    sets = [
        ([] if r else [0]) + list(range(lo, hi + 1, q))
        for q, lo, hi, r in zip(multiple, low, most, required, strict=True)
    ]
    possible = any(
        sum(split) == total and sum(b > 0 for b in split) <= count for split in itertools.product(*sets)
    )
    found = within_count(problem, most, count)
    assert (found is not None) == possible
    if found is not None:
        assert len(found) <= count
        assert set(np.flatnonzero(required)) <= set(found)


def permuted(problem: Problem, sync: Sync, order: list[int]) -> tuple[Problem, Sync]:
    """The same workers in another order."""
    at = np.array(order)
    return at_index(problem, at), Sync(sync.kind, sync.latency_seconds[at], sync.message_seconds[at])


@pytest.mark.parametrize("seed", sampled(range(60), *range(20)))
def test_the_order_of_the_workers_and_the_unit_of_time_do_not_matter(seed: int) -> None:
    problem, sync = random_problem(seed)
    try:
        found = solve_subset(problem, sync)
    except Infeasible:
        return
    order = np.random.default_rng(seed).permutation(len(problem.costs)).tolist()
    again = solve_subset(*permuted(problem, sync, order))
    assert again.iteration_seconds == pytest.approx(found.iteration_seconds, rel=1e-14)
    costs = problem.costs
    longer = replace(
        costs, c=8 * costs.c, a=8 * costs.a, t0=8 * costs.t0, knot_seconds=8 * costs.knot_seconds
    )
    slower = Sync(sync.kind, 8 * sync.latency_seconds, 8 * sync.message_seconds)
    scaled = solve_subset(replace(problem, costs=longer), slower)
    assert scaled.iteration_seconds == 8 * found.iteration_seconds


@pytest.mark.parametrize("seed", sampled(range(60), *range(20)))
def test_a_faster_worker_or_link_never_lengthens_the_iteration(seed: int) -> None:
    problem, sync = random_problem(seed)
    try:
        found = solve_subset(problem, sync)
    except Infeasible:
        return
    costs, one = problem.costs, np.arange(len(problem.costs)) == seed % len(problem.costs)
    faster = replace(costs, c=np.where(one, costs.c / 2, costs.c), a=np.where(one, costs.a / 2, costs.a))
    sooner = solve_subset(replace(problem, costs=faster), sync)
    assert sooner.iteration_seconds <= found.iteration_seconds * (1 + 1e-14)
    link = Sync(sync.kind, np.where(one, 0.0, sync.latency_seconds), sync.message_seconds)
    assert solve_subset(problem, link).iteration_seconds <= found.iteration_seconds * (1 + 1e-14)


def test_links_count_only_where_they_are_used() -> None:
    costs = Costs.lines([0.1, 0.1, 0.1], 0.01)
    problem = Problem.of(costs, 60)
    fast = solve_subset(problem, Sync.of("ring", 3, 0.0, [0.01, 0.01, 0.01]))
    assert (fast.batches > 0).sum() == 3
    slow = solve_subset(problem, Sync.of("ring", 3, 0.0, [0.01, 0.01, 9.0]))
    assert slow.batches.tolist() == [30, 30, 0]
    assert slow.sync_seconds == pytest.approx(0.01)


def test_no_synchronisation_is_the_split_alone() -> None:
    problem, _ = random_problem(1)
    found = solve_subset(problem, Sync.of("none", len(problem.costs), 1.0, 1.0))
    assert found.iteration_seconds == solve(problem).iteration_seconds


@pytest.mark.parametrize("kind", ["ring", "tree", "server"])
def test_synchronisation_never_gets_cheaper_with_more_workers(kind: SyncKind) -> None:
    sync = Sync.of(kind, 3, [0.0, 0.3, 0.1], [1.0, 0.1, 0.7])
    by_count = np.array([sync.by_link(k) for k in range(1, 300)])
    assert (np.diff(by_count, axis=0) >= 0).all()


def test_links_that_are_no_links_are_refused() -> None:
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            Sync.of("ring", 2, bad)


@pytest.mark.parametrize("kind", ["ring", "tree", "server"])
@pytest.mark.parametrize("scale", [1, 100])
def test_a_thousand_unlike_workers_take_few_looks(
    kind: SyncKind, scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    luck = np.random.default_rng(3)
    n = 1000
    costs = Costs.lines(luck.uniform(0.001, 0.05, n), luck.uniform(1e-4, 5e-3, n))
    problem = Problem.of(
        costs,
        64 * n,
        max_batch=luck.integers(96, 513, n),
        batch_multiple=luck.choice([1, 8, 16], n),
        min_batch=luck.choice([1, 32], n),
    )
    sync = Sync.of(kind, n, luck.uniform(1e-5, 1e-4, n), scale * luck.uniform(1e-4, 1e-3, n))
    looks = 0
    look = subset.SubsetSearch.sums_by

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(*arguments)

    monkeypatch.setattr(subset.SubsetSearch, "sums_by", counted)
    found = solve_subset(problem, sync)
    assert found.batches.sum() == problem.global_batch
    assert (found.batches % problem.batch_multiple == 0).all()
    assert looks < 2000  # benchmarks/solver.py has the times, also of 10,000 workers
