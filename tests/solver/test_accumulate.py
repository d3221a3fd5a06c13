"""Micro-batches: the size of each batch's is part of the program, against the enumeration of every size."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_tools import profile

from pyps.errors import Infeasible
from pyps.formats import Cluster, Fit, Job, Point, Profile, WorkerGroup
from pyps.profiler.curve import select_fit
from pyps.solver.accumulate import accumulated, best_size
from pyps.solver.costs import Cost, Costs, Floats, Ints, Line, Table, cost_of
from pyps.solver.plan import make_plan
from pyps.solver.report.measure import next_sizes

THOROUGH = [pytest.mark.thorough, pytest.mark.timeout(900)]
CLOSE = 1e-12  # relative: a table keeps no bends that rounding makes


def in_parts(cost: Cost, once: float, batch: int, size: int) -> float:
    """The seconds of a batch in full micro-batches of this size and a remainder."""
    parts = -(-batch // size)
    return (parts - 1) * (cost.seconds(size) - once) + cost.seconds(batch - (parts - 1) * size)


def fastest(cost: Cost, once: float, batch: int, at_once: int, repeats: int) -> float:
    sizes = range(1, at_once + 1)
    return min((in_parts(cost, once, batch, m) for m in sizes if -(-batch // m) <= repeats), default=math.inf)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    if draw(st.booleans()):
        return Line(draw(st.floats(-0.01, 0.05)), draw(st.floats(0.011, 0.1)), draw(st.floats(0.0, 0.3)))
    batches = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=6)))
    steps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.03, 0.2]), min_size=6, max_size=6))
    seconds = itertools.accumulate(steps[: len(batches)], initial=0.01)
    return Table(tuple(zip(batches, itertools.islice(seconds, 1, None), strict=True)))


@settings(deadline=None)
@given(costs(), st.floats(0.0, 0.9), st.integers(1, 40), st.integers(2, 5), st.integers(1, 40))
def test_every_batch_takes_the_best_size(
    cost: Cost, share: float, at_once: int, repeats: int, total: int
) -> None:
    once = share * cost.seconds(1)
    table = accumulated(cost, once, at_once, repeats, 1, 1, total)
    for batch in range(1, min(2 * total, at_once * repeats) + 1):
        best = fastest(cost, once, batch, at_once, repeats)
        assert table.seconds(batch) == pytest.approx(best, rel=CLOSE)
        if math.isfinite(best):
            size = best_size(cost, once, batch, at_once, repeats, 1)
            assert -(-batch // size) <= repeats
            assert in_parts(cost, once, batch, size) == pytest.approx(best, rel=CLOSE)


def table_profile(points: list[tuple[int, float]]) -> Profile:
    fit = Fit(
        kind="table",
        fixed_seconds=0.0,
        per_sample_seconds=0.001,
        trusted_min_batch=1,
        trusted_max_batch=points[-1][0],
        table=points,
    )
    return msgspec.structs.replace(profile(0.001, 0.0, points[-1][0]), fit=fit)


def cluster_of(counts: list[int], total: int, repeats: list[int]) -> Cluster:
    groups = [
        WorkerGroup(name=f"g{k}", profile=f"g{k}.json", count=n, max_accumulation=r)
        for k, (n, r) in enumerate(zip(counts, repeats, strict=True))
    ]
    return Cluster(job=Job(global_batch=total), worker=groups)


def test_allowing_accumulation_never_makes_a_plan_slower() -> None:
    """One device: 64 samples take 84 ms, 80 take 114 and 96 take 150; two of them share 100 and more."""
    device = table_profile([(64, 0.084), (80, 0.114), (96, 0.150)])
    other = table_profile([(16, 0.090), (32, 0.105), (64, 0.200)])
    for total in range(40, 160, 7):
        without, allowed = (
            make_plan(cluster_of([1, 1], total, [repeats, 1]), [device, other]).iteration_seconds
            for repeats in (1, 2)
        )
        assert allowed <= without


def random_case(seed: int) -> tuple[Cluster, list[Profile]]:
    luck = np.random.default_rng(seed)
    profiles = []
    for _ in range(3):
        batches = np.unique(luck.integers(1, 40, luck.integers(1, 6)))
        rises = luck.choice([0.001, 0.01, 0.1], len(batches)) * luck.random(len(batches))
        seconds = 0.005 + np.cumsum(rises)
        profiles.append(table_profile(list(zip(batches.tolist(), seconds.tolist(), strict=True))))
    most = sum(int(p.max_batch or 0) for p in profiles)
    repeats = luck.integers(1, 5, 3).tolist()
    return cluster_of([1, 1, 1], int(luck.integers(1, most + 1)), repeats), profiles


def best_split(cluster: Cluster, profiles: list[Profile]) -> float:
    """The least iteration seconds of all splits and sizes: the least time by which all samples are done."""
    total = cluster.job.global_batch
    reach: list[Floats] = []
    for group, one in zip(cluster.worker, profiles, strict=True):
        assert one.fit is not None
        cost, most, repeats = cost_of(one.fit), int(one.max_batch or 0), group.max_accumulation
        batch, size = np.arange(1, min(total, most * repeats) + 1), np.arange(1, most + 1)[:, None]
        single, before = np.array([cost.seconds(int(m)) for m in size[:, 0]]), -(-batch // size) - 1
        seconds = before * single[size - 1] + single[batch - before * size - 1]
        reach.append(np.where(before < repeats, seconds, math.inf).min(0))
    for t in np.unique(np.concatenate(reach)):
        if sum(np.searchsorted(seconds, t, "right") for seconds in reach) >= total:
            return float(t)
    return math.inf


PARTS = [pytest.param(range(k, k + 1000), marks=THOROUGH) for k in range(0, 10_000, 1000)]


@pytest.mark.parametrize("seeds", [range(60), *PARTS])
def test_a_plan_is_the_best_of_all_splits_and_sizes(seeds: range) -> None:
    for seed in seeds:
        check_plan(*random_case(seed))


def check_plan(cluster: Cluster, profiles: list[Profile]) -> None:
    plan = make_plan(cluster, profiles)
    best = best_split(cluster, profiles)
    assert plan.iteration_seconds == pytest.approx(best, rel=CLOSE)
    assert plan.lower_bound_seconds <= best * (1 + CLOSE)
    for worker, one in zip(plan.workers, profiles, strict=True):
        if worker.batch:
            assert one.fit is not None
            took = in_parts(cost_of(one.fit), 0.0, worker.batch, worker.micro_batch)
            assert took == pytest.approx(worker.predicted_seconds, rel=CLOSE)


def test_micro_batches_of_a_device_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only sizes up to the batches are tried: all 2**31 would need 16 GiB."""
    asked: list[int] = []

    def at_once(self: Costs, batch: Ints) -> Floats:
        asked.append(len(batch))
        return compute(self, batch)

    compute = Costs.compute
    monkeypatch.setattr(Costs, "compute", at_once)
    cluster, profiles = cluster_of([2], 100, [4]), [profile(0.001, 0.01)]
    plan = make_plan(cluster, profiles)
    assert [(worker.batch, worker.accumulation) for worker in plan.workers] == [(50, 1)] * 2
    assert max(asked) < 1000


def test_micro_batches_keep_to_the_multiple_that_a_device_needs() -> None:
    """Off multiples of 8 it takes a fifth longer, and the fit, of multiples alone, does not say so."""

    def seconds(batch: int) -> float:
        return (0.03 + 0.001 * batch) * (1.2 if batch % 8 else 1.0)

    points = [Point(batch=b, seconds=seconds(b)) for b in (16, 32, 47, 48, 64, 79, 80, 96)]
    device = msgspec.structs.replace(profile(0.001, 0.03, 100), points=points, fit=select_fit(points))
    group = WorkerGroup(name="g", profile="g.json", max_accumulation=3, batch_multiple=8)
    cluster = Cluster(job=Job(global_batch=200), worker=[group])
    (worker,) = make_plan(cluster, [device]).workers
    assert (worker.batch, worker.micro_batch, worker.accumulation) == (200, 96, 3)
    best = min(seconds(m) * (200 // m) + (seconds(200 % m) if 200 % m else 0.0) for m in range(67, 101))
    assert worker.predicted_seconds == pytest.approx(best, rel=1e-3)
    more = next_sizes(cluster, [device])
    assert not [one for one in more.sizes if one.batch % 8], "also of curves that may be faster"
    with pytest.raises(Infeasible, match="maxima sum to 288"):
        make_plan(Cluster(job=Job(global_batch=296), worker=[group]), [device])
