"""Warnings of a plan: a line a group where there are few, one line for all of many."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_tools import profile

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Device, Fit, Job, ModelInfo, Point, Profile, Shared, SyncCost, WorkerGroup
from pyps.solver.jobs.whatif import changed
from pyps.solver.plan import make_plan, plan_ranks
from pyps.solver.problem import planning_problem
from pyps.solver.ranks import planned_ranks
from pyps.solver.report.explain import explain
from pyps.solver.report.warnings import MOST_LINES, Remark, few_of, in_lines


def planned(B: int, *seconds: float, error: float = 0.0, **last: Any) -> tuple[list[str], str]:
    """The warnings, and the verdict, of workers with so many seconds a sample. error: of their fits. last:
    keys of the last one.
    """
    workers = [WorkerGroup(name=f"w{k}", profile="p.json", max_batch=400) for k in range(len(seconds))]
    workers[-1] = WorkerGroup(name=workers[-1].name, profile="p.json", **last)
    fits = [
        Fit(
            kind="affine",
            fixed_seconds=0.01,
            per_sample_seconds=a,
            trusted_min_batch=1,
            trusted_max_batch=999,
            leave_one_out_error=error,
        )
        for a in seconds
    ]
    points, device, model = [Point(batch=1, seconds=1.0)], Device(name="d"), ModelInfo(name="mlp")
    profiles = [Profile(device=device, model=model, points=points, fit=fit) for fit in fits]
    cluster = Cluster(job=Job(global_batch=B), worker=workers)
    ranks = planned_ranks(cluster, profiles)
    problem = planning_problem(cluster, ranks)
    plan = plan_ranks(cluster, ranks, problem)
    return plan.warnings, explain(plan, ranks, problem).verdict


def test_many_groups_share_a_line() -> None:
    warnings, _ = planned(100, 0.1, *[20.0] * 4)
    alone = "left out, the others finish sooner without it"
    assert [line for line in warnings if "left out" in line] == [f"w{k}: {alone}" for k in range(1, 5)]
    warnings, verdict = planned(100, 0.1, *[20.0] * 10, min_batch=101, latency=2.0)
    assert warnings[:3] == [
        "w1, w2, w3 and 6 more: left out, the others finish sooner without them",
        "w10: left out, no batch fits: its smallest is 101, the global batch is 100",
        "w10: its latency is not counted: state its bandwidth, too",
    ]
    assert "w1, w2, w3 and 6 more groups should stay out" in verdict
    _, verdict = planned(4000, *[0.001] * 10, max_batch=1000)
    assert "w0, w1, w2 and 6 more groups cannot take more samples; one more" in verdict


def of_models(*models: ModelInfo, kind: str = "cuda", per_sample: float = 0.01, **job: Any) -> list[str]:
    workers = [WorkerGroup(name=f"w{k}", profile=f"{k}.json") for k in range(len(models))]
    one = msgspec.structs.replace(profile(per_sample, 0.001, 100), device=Device(name="d", kind=kind))
    profiles = [msgspec.structs.replace(one, model=model) for model in models]
    return make_plan(Cluster(job=Job(global_batch=64, **job), worker=workers), profiles).warnings


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("autocast", ("bf16", None)),
        ("compiled", (True, False)),
        ("parameters", (1000, 2000)),
        ("optimizer", ("SGD", "AdamW")),
        ("tokens_per_sample", (512, 1024)),
    ],
)
def test_profiles_of_unlike_steps_are_said(field: str, values: tuple[Any, Any]) -> None:
    """A plan of them is for no script: its batches follow from the settings, not from the devices."""
    first, second = (ModelInfo(name="m", **{field: value}) for value in values)
    said = ["null" if value is None else str(value).lower() for value in values]
    line = f"the profiles are of unlike steps, by model.{field}: {said[0]} in 0.json, {said[1]} in 1.json"
    assert of_models(first, second, first) == [line]
    assert of_models(first, first) == of_models(second, second) == []


def test_choices_and_imported_times_are_not_unlike() -> None:
    """`devices`: as for groups that are compiled or not, as docs/how-to/plan.md has them."""
    taken = [{"compiled": True}, {"autocast": "bf16"}, {}]
    models = [ModelInfo(name="m", **each) for each in taken]
    assert of_models(*models, kind="imported") == []
    workers = [WorkerGroup(name=f"w{k}", profile=f"{k}.json", shares=["box"]) for k in range(3)]
    one = msgspec.structs.replace(profile(0.01, 0.001, 100), device=Device(name="d", kind="cuda"))
    profiles = [msgspec.structs.replace(one, model=model) for model in models]
    cluster = Cluster(job=Job(global_batch=64), worker=workers, shared=[Shared(name="box", devices=2)])
    assert not [line for line in make_plan(cluster, profiles).warnings if "unlike" in line]


def test_what_a_profile_does_not_state_is_not_unlike() -> None:
    known = ModelInfo(name="m", parameters=1000, optimizer="SGD", tokens_per_sample=512)
    assert of_models(known, ModelInfo(name="m")) == []
    tokens = [msgspec.structs.replace(known, tokens_per_sample=n) for n in (1, 4)]
    assert of_models(*tokens, unit="tokens") == []


@pytest.mark.parametrize(
    ("kind", "per_sample", "said"), [("cpu", 2e-4, True), ("cpu", 1e-3, False), ("cuda", 2e-4, False)]
)
def test_short_steps_on_shared_cores_are_said(kind: str, per_sample: float, said: bool) -> None:
    """benchmarks/prediction.py --short: a run of such a plan takes 1.15 to 1.41 times as long."""
    model = ModelInfo(name="m")
    found = of_models(model, model, kind=kind, per_sample=per_sample)
    line = "steps of 7.4 ms are short: where the processes share CPU cores, they may take 1.4 times as long"
    assert [warning.startswith(line) for warning in found] == [True] * said
    assert of_models(model, kind=kind, per_sample=per_sample) == []


def test_short_steps_that_wait_for_a_long_one_are_not_said() -> None:
    workers = [WorkerGroup(name=f"w{k}", profile=f"{k}.json", count=2 - k) for k in range(2)]
    short, long = profile(1e-5, 1e-5, 8), profile(1e-3, 0.1, 100)
    long = msgspec.structs.replace(long, device=Device(name="d", kind="cuda"))
    cluster = Cluster(job=Job(global_batch=64), worker=workers)
    assert not [line for line in make_plan(cluster, [short, long]).warnings if "are short" in line]


def test_a_refusal_names_the_profiles_that_lack_larger_batches_for_want_of_time() -> None:
    workers = [WorkerGroup(name=f"w{k}", profile=f"{k}.json") for k in range(2)]
    short, whole = profile(0.1, 0.1, 4), profile(0.1, 0.1, 8)
    short = msgspec.structs.replace(short, cut_short=True)
    with pytest.raises(Infeasible, match=r"maxima sum to 12.*; there was no time .* batches for 0\.json$"):
        make_plan(Cluster(job=Job(global_batch=64), worker=workers), [short, whole])
    wide = [msgspec.structs.replace(one, required=True, min_batch=5) for one in workers]
    with pytest.raises(Infeasible, match=r"minima .* sum to 10; the smallest feasible global_batch is 10$"):
        make_plan(Cluster(job=Job(global_batch=9), worker=wide), [profile(0.1, 0.1, 8), whole])


def test_a_worker_at_the_last_batch_that_there_was_time_for_is_named() -> None:
    workers = [WorkerGroup(name=f"w{k}", profile=f"{k}.json") for k in range(2)]
    short, whole = profile(0.1, 0.1, 4), profile(0.1, 0.1, 100)
    line = "w0: no time was left to measure larger batches; pyps-profile --seconds"
    for cut_short, total, said in ((True, 64, True), (False, 64, False), (True, 6, False)):
        profiles = [msgspec.structs.replace(short, cut_short=cut_short), whole]
        found = make_plan(Cluster(job=Job(global_batch=total), worker=workers), profiles).warnings
        assert (line in found) is said


def test_units_that_are_unlikely_are_named() -> None:
    """A link in Gbit/s or milliseconds, or a profile in milliseconds, only leaves workers out."""
    workers = [WorkerGroup(name=f"w{k}", profile=f"{k}.json", shares=["lan"]) for k in range(2)]
    lan = Shared(name="lan", bandwidth=10, latency=2.0)
    cluster = Cluster(job=Job(global_batch=64), worker=workers, shared=[lan])
    fast, slow = (
        msgspec.structs.replace(
            profile(a, a, 100), points=[Point(batch=8, seconds=8 * a)], device=Device(name="d", kind=kind)
        )
        for a, kind in ((0.01, "cuda"), (9.0, "imported"))
    )
    unit = "bandwidth is in bytes a second (1 Gbit/s is 1.25e8)"
    warnings = make_plan(cluster, [fast, slow]).warnings
    assert f"[[shared]] lan: bandwidth 10: {unit}" in warnings
    assert "[[shared]] lan: latency 2: latency is in seconds" in warnings
    line = "w1: a sample takes 900 times as long as on w0, by the profiles: are both in seconds?"
    assert line in warnings
    longer = msgspec.structs.replace(slow, points=[Point(batch=8, seconds=400.0)])
    line = "w1: a step of 8 takes 400 s: is that in milliseconds?"
    assert line in make_plan(cluster, [fast, longer]).warnings
    measured = msgspec.structs.replace(slow, device=Device(name="d"))
    assert not [line for line in make_plan(cluster, [fast, measured]).warnings if "times as long as" in line]
    sync = SyncCost(kind="ring", bandwidth=10, latency=2.0)
    cluster = Cluster(job=Job(global_batch=64), worker=workers[:1], sync=sync, shared=[lan])
    assert f"[sync]: bandwidth 10: {unit}" in make_plan(cluster, [fast]).warnings


@pytest.mark.parametrize(
    ("other", "error", "doubtful"), [(0.11, 0.1, True), (0.11, 0.01, False), (0.1, 0.1, False)]
)
def test_a_gain_within_the_error_of_the_profiles_is_doubtful(
    other: float, error: float, doubtful: bool
) -> None:
    warnings, _ = planned(100, 0.1, other, error=error)
    assert sum("even split" in line for line in warnings) == doubtful


def test_a_cheap_plan_is_not_doubted_for_being_slow() -> None:
    groups = [
        WorkerGroup(name=name, profile="p", price_per_hour=price) for name, price in (("a", 0.1), ("b", 5.0))
    ]
    job = Job(global_batch=80, target=1e6, deadline_hours=100)
    plan = make_plan(Cluster(job=job, worker=groups), [profile(1e-3, 0.001, 100)] * 2)
    assert [worker.batch for worker in plan.workers] == [80, 0]
    assert not any("even split" in line for line in plan.warnings)


@given(st.lists(st.tuples(*[st.sampled_from("abcdefg")] * 2, st.sampled_from("xyz")), max_size=30))
def test_no_group_and_no_cause_goes_unsaid(said: list[tuple[str, str, str]]) -> None:
    remarks = [Remark(name, f"{cause}{line}", cause) for name, line, cause in said]
    lines = in_lines(remarks)
    for cause in {remark.cause for remark in remarks}:
        names = list(dict.fromkeys(r.name for r in remarks if r.cause == cause))
        if len(names) > MOST_LINES:
            assert lines.count(f"{few_of(names)}: {cause}") == 1
        else:
            assert all(lines.count(f"{r.name}: {r.line}") == 1 for r in remarks if r.cause == cause)


def test_an_unknown_group_is_not_answered_with_all_of_them() -> None:
    groups = [WorkerGroup(name=f"gpu{k}", profile="p.json") for k in range(5000)]
    with pytest.raises(InputError, match=r"expected a group of the cluster file: .*\bgpu17, .* more$"):
        changed(Cluster(job=Job(global_batch=8), worker=groups), {}, {"gpu17x": None})
