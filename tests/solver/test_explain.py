"""Explanations and changes: what binds is named, what it is worth is true, a verdict says it in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pyps.errors import InputError
from pyps.formats import Cluster, Device, Fit, ModelInfo, Plan, Point, Profile, WorkerGroup
from pyps.solver.jobs.whatif import changed, summary_of, verdict
from pyps.solver.plan import make_plan, plan_ranks
from pyps.solver.problem import planning_problem
from pyps.solver.ranks import planned_ranks
from pyps.solver.report.explain import Explanation, explain


def profile(a: float, c: float = 0.01) -> Profile:
    fit = Fit(
        kind="affine", fixed_seconds=c, per_sample_seconds=a, trusted_min_batch=1, trusted_max_batch=4096
    )
    model, points = ModelInfo(name="m", parameters=10**6), [Point(batch=1, seconds=c + a)]
    return Profile(device=Device(name="d"), model=model, fit=fit, points=points)


def case(B: int, groups: list[dict[str, Any]], **tables: Any) -> Cluster:
    workers = [{"profile": "p.json", **group} for group in groups]
    return msgspec.convert({"job": {"global_batch": B}, "worker": workers, **tables}, Cluster)


def explained(cluster: Cluster, *profiles: Profile) -> tuple[Plan, Explanation]:
    ranks = planned_ranks(cluster, profiles)
    problem = planning_problem(cluster, ranks)
    plan = plan_ranks(cluster, ranks, problem)
    return plan, explain(plan, ranks, problem)


def test_a_shared_link_only_takes_time() -> None:
    groups = [{"name": "fast"}, {"name": "far", "shares": ["wire"]}]
    wire = [{"name": "wire", "bandwidth": 1e5}]
    plan, found = explained(case(100, groups, shared=wire), profile(0.001), profile(0.001))
    assert plan.warnings == ["far: left out, the others finish sooner without it"]
    assert "far should stay out: the others finish sooner without." in found.verdict
    powered = [{**group, "watts": 80.0} for group in groups]
    barred = case(100, powered, shared=wire, limits={"watts": 100.0})
    plan, found = explained(barred, profile(0.001), profile(0.001))
    assert plan.warnings == ["far: left out, the limits or ties require it"]
    assert "far should stay out: the limits or ties require it." in found.verdict


def test_what_binds_is_named_and_priced() -> None:
    groups = [{"name": "fast", "max_batch": 100}, {"name": "mid", "count": 2}, {"name": "old"}]
    profiles = [profile(0.001), profile(0.002), profile(0.002, c=5.0)]
    plan, found = explained(case(500, groups), *profiles)
    assert [g.binds for g in found.groups] == ["at its maximum", "holds the others up", "left out"]
    assert sum(group.share for group in found.groups) == pytest.approx(1.0, rel=1e-3)
    one_more = make_plan(case(502, groups), profiles)
    assert 2 * found.seconds_per_sample == pytest.approx(
        one_more.iteration_seconds - plan.iteration_seconds, rel=1e-3
    )
    wider = make_plan(case(500, [{"name": "fast", "max_batch": 102}, *groups[1:]]), profiles)
    saved = plan.iteration_seconds - wider.iteration_seconds
    assert 2 * found.groups[0].seconds_saved_per_sample == pytest.approx(saved, rel=1e-3)
    for words in (
        "500 samples",
        "mid (2 workers) set the pace",
        "fast cannot take more than 100",
        "old should stay out",
    ):
        assert words in found.verdict


def test_one_that_waits_for_others_holds_nobody_up() -> None:
    """Whole samples make it wait, though all three share the price of one more."""
    _, found = explained(case(11, [{"name": "like", "count": 3}]), profile(0.1))
    assert [(g.batch, g.binds) for g in found.groups] == [(4, "holds the others up"), (3, "waits")]


def test_a_worker_that_no_batch_fits_is_named() -> None:
    groups = [{"name": "fast"}, {"name": "wide", "min_batch": 300}]
    _, found = explained(case(200, groups), profile(0.1), profile(0.1))
    assert [g.binds for g in found.groups] == ["holds the others up", "no batch fits"]
    assert "wide cannot take part: no batch fits." in found.verdict


def test_a_minimum_that_binds_is_named() -> None:
    groups = [{"name": "fast"}, {"name": "slow", "min_batch": 50, "required": True}]
    _, found = explained(case(200, groups), profile(0.001), profile(0.02))
    assert found.groups[1].binds == "at its minimum"
    assert found.groups[0].waits_seconds > 0.5
    assert "slow may not take fewer than 50" in found.verdict


def test_limits_and_accumulation_are_in_the_verdict() -> None:
    groups = [
        {"name": "fast", "price_per_hour": 3.0, "max_batch": 40, "max_accumulation": 3},
        {"name": "slow", "price_per_hour": 1.0},
    ]
    _, found = explained(case(150, groups, limits={"price_per_hour": 4.5}), profile(0.001), profile(0.002))
    assert "Of price_per_hour 4.5, 4 is used." in found.verdict


def test_more_workers_and_fewer() -> None:
    groups = [{"name": "a", "count": 2, "price_per_hour": 2.0}, {"name": "b", "price_per_hour": 1.0}]
    cluster, profiles = case(300, groups), [profile(0.001), profile(0.002)]
    more = changed(cluster, {"a": 2}, {})
    assert [g.count for g in more.worker] == [4, 1]
    before, after = summary_of(make_plan(cluster, profiles)), summary_of(make_plan(more, profiles))
    assert after.iteration_seconds < before.iteration_seconds
    assert (before.price_per_hour, after.price_per_hour) == (5.0, 9.0)
    assert 0 < after.utilisation <= 1
    text = verdict(before, after)
    assert "less time" in text
    assert "a million samples cost" in text
    assert "more time" in verdict(after, before)
    assert "as long" in verdict(before, before)
    assert [g.name for g in changed(cluster, {}, {"a": None}).worker] == ["b"]
    assert [g.count for g in changed(cluster, {}, {"a": 1}).worker] == [1, 1]
    new = WorkerGroup(name="c", profile="c.json", count=3)
    assert [g.name for g in changed(cluster, {}, {}, [new]).worker] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("add", "drop", "message"),
    [
        ({"x": 1}, {}, "--add: found 'x'"),
        ({}, {"x": None}, "--drop: found 'x'"),
        ({}, {"a": 3}, "at most 2"),
        ({}, {"a": None, "b": None}, "at least one worker left"),
    ],
)
def test_changes_that_cannot_be_are_refused(
    add: dict[str, int], drop: dict[str, int | None], message: str
) -> None:
    cluster = case(300, [{"name": "a", "count": 2}, {"name": "b"}])
    with pytest.raises(InputError, match=message):
        changed(cluster, add, drop)


def test_a_new_group_must_state_what_is_limited() -> None:
    cluster = case(300, [{"name": "a", "price_per_hour": 1.0}], limits={"price_per_hour": 5.0})
    with pytest.raises(InputError, match="price_per_hour"):
        changed(cluster, {}, {}, [WorkerGroup(name="c", profile="c.json")])
