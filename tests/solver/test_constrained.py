"""Splits under ties: equal to brute force, to the exact solver without ties, and refused with the way out."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from planning_tools import profile
from sampled import sampled

from pyps.errors import Infeasible
from pyps.formats import Cluster, Fit, Job, Shared, WorkerGroup
from pyps.solver.constrained import ConstrainedProblem, Limit, Resource, evaluate
from pyps.solver.costs import Costs
from pyps.solver.exact.minmax import Problem
from pyps.solver.exact.subset import solve_subset
from pyps.solver.milp.constrained import solve_by_milp, solve_constrained
from pyps.solver.milp.model import NoProof
from pyps.solver.plan import make_plan
from pyps.solver.sync import Sync, SyncKind

TOLERANCE = 2e-6  # of HiGHS, on a scale of about 1
KINDS: list[SyncKind] = ["none", "ring", "tree", "server"]


def random_constrained(seed: int, *, ties: bool = True) -> ConstrainedProblem:
    luck = np.random.default_rng(seed)
    n = int(luck.integers(2, 6))
    costs = Costs.lines(luck.uniform(0.05, 0.4, n), luck.uniform(0.02, 0.3, n), luck.choice([0, 0.5], n))
    cap = luck.choice([4, 8, 12], n)
    if luck.random() < 0.3:
        costs, cap = costs.accumulated(cap), cap * luck.integers(1, 4, n)
    problem = Problem.of(
        costs,
        int(luck.integers(4, 20)),
        min_batch=luck.choice([1, 1, 3], n),
        max_batch=cap,
        batch_multiple=luck.choice([1, 1, 2], n),
        required=luck.random(n) < 0.15,
    )
    latency, message = luck.choice([0.0, 0.1], n), luck.choice([0.05, 0.3], n)
    shares = {"overlap": (0.0, 0.5, 1.0)[seed % 3], "tail": (1.0, 0.2)[seed % 2]}
    sync = Sync.of(KINDS[seed % 4], n, latency, message, **shares)
    if not ties:
        return ConstrainedProblem(problem, sync)
    price = luck.choice([0.5, 1.0, 2.0, 3.0], n)
    members = luck.random(n) < 0.6
    return ConstrainedProblem(
        problem,
        sync,
        (
            Limit("price_per_hour", price, float(luck.uniform(1, 6))),
            Limit("watts", luck.choice([100.0, 250.0], n), 600),
        ),
        (
            Resource("link", members, np.where(members, luck.choice([0.0, 0.2, 0.4], n), 0.0)),
            Resource("host", luck.random(n) < 0.5, np.zeros(n), float(luck.uniform(3, 30))),
        ),
        (luck.permutation(n)[:2],),
    )


def brute_force(constrained: ConstrainedProblem) -> float:
    """The least time over all splits that keep every bound and tie; infinite if there is none."""
    problem, best = constrained.problem, math.inf
    sets = []
    for low, cap, multiple, required in zip(
        problem.min_batch, problem.max_batch, problem.batch_multiple, problem.required, strict=True
    ):
        used = [b for b in range(int(low), min(int(cap), problem.global_batch) + 1) if b % multiple == 0]
        sets.append(used if required else [0, *used])
    for split in itertools.product(*sets):
        batches = np.array(split)
        used = batches > 0
        if sum(split) != problem.global_batch or any(
            0 < used[g].sum() < len(g) for g in constrained.together
        ):
            continue
        if any(limit.need[used].sum() > limit.at_most for limit in constrained.limits):
            continue
        slowest = 0.0
        for k in np.flatnonzero(used):
            one = problem.costs.take(np.array([k])).seconds(batches[[k]])[0]
            links = (
                r.transfer_seconds[used & r.workers].sum() for r in constrained.resources if r.workers[k]
            )
            slowest = max(slowest, one + sum(links))
        for r in constrained.resources:
            if r.samples_per_second:
                slowest = max(slowest, batches[r.workers].sum() / r.samples_per_second)
        given, seconds = constrained.sync, constrained.sync.seconds(batches)
        best = min(best, max(slowest + given.tail * seconds, (1 - given.overlap) * slowest + seconds))
    return best


@pytest.mark.parametrize("seed", sampled(range(60), *range(20)))
def test_equal_to_brute_force(seed: int) -> None:
    constrained = random_constrained(seed)
    best = brute_force(constrained)
    if math.isinf(best):
        with pytest.raises(Infeasible):
            solve_constrained(constrained)
        return
    found = solve_constrained(constrained)
    assert found.iteration_seconds == pytest.approx(best, abs=TOLERANCE)
    assert found.batches.sum() == constrained.problem.global_batch


@pytest.mark.parametrize("seed", sampled(range(40), *range(13)))
def test_the_milp_equals_the_exact_solver_where_both_apply(seed: int) -> None:
    constrained = random_constrained(seed, ties=False)
    try:
        exact = solve_subset(constrained.problem, constrained.sync)
    except Infeasible:
        with pytest.raises(Infeasible):
            solve_by_milp(constrained)
        return
    found = solve_by_milp(constrained)
    assert found.iteration_seconds == pytest.approx(exact.iteration_seconds, abs=TOLERANCE)
    assert found.iteration_seconds >= exact.iteration_seconds - 1e-12
    assert solve_constrained(constrained).batches.tolist() == exact.batches.tolist()


def with_limit(constrained: ConstrainedProblem, key: str, at_most: float) -> float:
    """The least time with another limit."""
    limits = [replace(x, at_most=at_most) if x.key == key else x for x in constrained.limits]
    return brute_force(replace(constrained, limits=tuple(limits)))


def with_batch(constrained: ConstrainedProblem, B: int) -> float:
    return brute_force(replace(constrained, problem=replace(constrained.problem, global_batch=B)))


@pytest.mark.parametrize("seed", sampled(range(60), *range(20)))
def test_a_refusal_names_the_smallest_changes_that_help(seed: int) -> None:
    constrained = random_constrained(seed)
    try:
        solve_constrained(constrained)
    except Infeasible as refusal:
        if "within limits" not in refusal.reason:
            return  # of the workers' own bounds: tests/solver/test_minmax.py
        for change in refusal.nearest.split(" or "):
            words = change.split()
            if change.startswith("raise limits."):
                key, needed = words[1].removeprefix("limits."), float(words[-1])
                assert math.isfinite(with_limit(constrained, key, needed + 1e-9))
                assert math.isinf(with_limit(constrained, key, needed - 0.01))
            elif change.startswith("set global_batch"):
                B, target = constrained.problem.global_batch, int(words[-1])
                reach = abs(target - B)
                assert math.isfinite(with_batch(constrained, target))
                assert all(
                    math.isinf(with_batch(constrained, b)) for b in range(max(1, B - reach + 1), B + reach)
                )


def test_a_shared_link_makes_its_workers_wait_for_each_other() -> None:
    problem = Problem.of(Costs.lines([0.1] * 4, 0.01), 120, max_batch=60)
    link = Resource("rack", np.array([True, True, False, False]), np.array([0.5, 0.5, 0.0, 0.0]))
    found = solve_constrained(ConstrainedProblem(problem, Sync.of("none", 4), resources=(link,)))
    assert found.batches[:2].tolist() in ([6, 0], [7, 0])  # as much time, half a second of it its transfer
    assert found.iteration_seconds == pytest.approx(0.67)
    both = evaluate(
        ConstrainedProblem(problem, Sync.of("none", 4), resources=(link,)), np.array([30, 30, 30, 30])
    )
    assert both.link_seconds.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert both.iteration_seconds == pytest.approx(1.4)


@pytest.mark.parametrize("seed", range(6))
def test_groups_of_like_workers_agree_with_the_exact_solver(seed: int) -> None:
    luck = np.random.default_rng(seed)
    like = np.repeat(np.arange(3), 4)
    costs = Costs.lines(luck.uniform(0.01, 0.05, 3)[like], luck.uniform(3e-4, 3e-3, 3)[like])
    problem = Problem.of(
        costs, 64 * 12, max_batch=luck.choice([96, 256], 3)[like], batch_multiple=luck.choice([1, 8], 3)[like]
    )
    sync = Sync.of(KINDS[seed % 4], 12, 1e-5, luck.choice([0.001, 0.02], 3)[like])
    exact = solve_subset(problem, sync)
    found = solve_by_milp(ConstrainedProblem(problem, sync))
    assert found.iteration_seconds == pytest.approx(exact.iteration_seconds, rel=TOLERANCE)
    assert found.iteration_seconds >= exact.iteration_seconds * (1 - 1e-14)
    price = luck.choice([0.5, 1.0, 3.0], 3)[like]
    roomy = ConstrainedProblem(problem, sync, (Limit("price_per_hour", price, float(price.sum())),))
    assert solve_constrained(roomy).iteration_seconds == pytest.approx(exact.iteration_seconds, rel=TOLERANCE)


def test_a_search_that_takes_too_long_says_what_it_found_and_what_is_possible() -> None:
    """96 unlike workers in 24 racks, within a price: here ten times the limit brings no proof."""
    luck, n = np.random.default_rng(0), 96
    costs = Costs.lines(luck.uniform(0.05, 0.4, n), luck.uniform(0.02, 0.3, n))
    problem = Problem.of(costs, 20 * n, batch_multiple=luck.choice([1, 3, 4], n))
    rack = np.arange(n) // 4
    links = [Resource(f"rack {k}", rack == k, luck.uniform(0.05, 0.5, n) * (rack == k)) for k in range(24)]
    price = Limit("price_per_hour", luck.uniform(0.5, 3, n), 0.8 * n)
    constrained = ConstrainedProblem(problem, Sync.of("none", n), (price,), tuple(links))
    with pytest.raises(NoProof, match=r"no proof within 2 s; a gap of .* no split is below") as stopped:
        solve_by_milp(constrained, 2.0)
    assert stopped.value.best is not None
    assert stopped.value.bound is not None
    assert stopped.value.best > stopped.value.bound > 0


def test_a_restart_of_highs_does_not_lose_the_optimum() -> None:
    """HiGHS 1.16 ends with 16 ms, as "optimal", where it begins its search anew after a second presolve."""
    tables = [[(10, 0.06)], None, [(4, 0.005)], [(10, 0.01)]]
    profiles = []
    for table, per_sample, most in zip(tables, [0.0, 0.002, 0.0, 0.01], [None, None, 7, 5], strict=True):
        fit = Fit(
            kind="affine" if table is None else "table",
            fixed_seconds=0.01,
            per_sample_seconds=per_sample,
            trusted_min_batch=1,
            trusted_max_batch=512,
            table=table,
        )
        profiles.append(msgspec.structs.replace(profile(0.01, 0.0, most), fit=fit))
    groups = [WorkerGroup(name=f"g{k}", profile="p") for k in range(3)]
    groups.append(WorkerGroup(name="g3", profile="p", min_batch=2, max_accumulation=4))
    link, host = Shared(name="lan", bandwidth=2e7), Shared(name="host", samples_per_second=1590.0)
    cluster = Cluster(job=Job(global_batch=12), worker=groups, shared=[link, host])
    assert make_plan(cluster, profiles).iteration_seconds == pytest.approx(0.01)
