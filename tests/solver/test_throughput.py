"""Splits with the most samples a second, against enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from planning_tools import profile

from pyps.errors import Infeasible
from pyps.formats import Cluster, Job, Pace, RunTable, WorkerGroup
from pyps.solver import Costs, Line, Problem, Table
from pyps.solver.constrained import ConstrainedProblem
from pyps.solver.exact import throughput
from pyps.solver.exact.throughput import most_throughput
from pyps.solver.plan import make_plan
from pyps.solver.sync import Sync


def tied(problem: Problem) -> ConstrainedProblem:
    return ConstrainedProblem(problem, Sync.of("none", len(problem.costs)))


def random_problem(luck: np.random.Generator) -> Problem:
    count = int(luck.integers(1, 4))
    costs = [
        Line(luck.uniform(0, 0.05), luck.uniform(1e-4, 1e-2))
        if luck.random() < 0.5
        else Table(tuple((b, float(s)) for b, s in enumerate(np.cumsum(luck.uniform(1e-4, 0.02, 14)), 1)))
        for _ in range(count)
    ]
    return Problem.of(
        Costs.stack(costs),
        int(luck.integers(1, 24)),
        min_batch=luck.integers(1, 4, count),
        max_batch=luck.integers(4, 14, count),
        batch_multiple=luck.integers(1, 4, count),
        required=luck.random(count) < 0.3,
    )


def enumerated(problem: Problem) -> float:
    """The most samples a second; -1 if no split is feasible."""
    choices = []
    for k in range(len(problem.costs)):
        q = int(problem.batch_multiple[k])
        allowed = [b for b in range(q, int(problem.max_batch[k]) + 1, q) if b >= problem.min_batch[k]]
        choices.append(allowed if problem.required[k] else [0, *allowed])
    best = -1.0
    for split in itertools.product(*choices):
        if sum(split) == problem.global_batch:
            seconds = problem.costs.seconds(np.maximum(split, 1))
            best = max(best, sum(b / s for b, s in zip(split, seconds, strict=True) if b))
    return best


def test_no_split_passes_more_samples() -> None:
    for seed in range(150):
        problem = random_problem(np.random.default_rng(seed))
        best = enumerated(problem)
        if best < 0:
            with pytest.raises(Infeasible):
                most_throughput(tied(problem))
            continue
        found = most_throughput(tied(problem))
        assert found is not None
        assert int(found.batches.sum()) == problem.global_batch
        assert found.samples_per_second == pytest.approx(best, rel=1e-12)
        assert found.gap == 0.0


def test_by_prices_the_gap_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = []
    for seed in range(150):
        problem = random_problem(np.random.default_rng(seed))
        best = enumerated(problem)
        monkeypatch.setattr(throughput, "MOST_WORK", 0)
        if best < 0:
            continue
        found = most_throughput(tied(problem))
        assert found is not None
        assert int(found.batches.sum()) == problem.global_batch
        assert found.samples_per_second <= best * (1 + 1e-12)
        assert best <= found.samples_per_second * (1 + found.gap) * (1 + 1e-9)
        gaps.append(found.gap)
    assert np.median(gaps) < 0.05


def test_a_plan_for_workers_that_wait_for_nothing_passes_the_most_samples() -> None:
    devices = [profile(1e-3, 0.001), profile(1e-3, 0.02), profile(4e-3, 0.08)]
    groups = [WorkerGroup(name=f"w{k}", profile="p") for k in range(3)]
    cluster = Cluster(job=Job(global_batch=120), worker=groups, run=RunTable(policy="asp"))
    plan = make_plan(cluster, devices, Pace("free"))
    lines = [(0.001, 1e-3), (0.02, 1e-3), (0.08, 4e-3)]
    best = max(
        sum(b / (c + a * b) for b, (c, a) in zip(split, lines, strict=True) if b)
        for split in ((x, y, 120 - x - y) for x in range(121) for y in range(121 - x))
    )
    assert 120 / plan.iteration_seconds == pytest.approx(best, rel=1e-3)
    assert plan.lower_bound_seconds == pytest.approx(120 / best, rel=1e-9)
