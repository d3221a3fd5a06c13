"""Plans of local steps: whole steps of the even share of a global batch, against brute force."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_tools import profile
from sampled import examples

from pyps.cli.plan_view import mode_text
from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Plan, Profile, RunTable, WorkerGroup
from pyps.formats.cluster import Job, Shared
from pyps.formats.mode import Pace
from pyps.formats.plan import check_plan
from pyps.run.ranks import even_plan, with_split
from pyps.solver.links import WIRE_BYTES
from pyps.solver.plan import make_plan

SPEEDS = (1, 2, 3, 4)


def planned(profiles: list[Profile], global_batch: int, steps: int, **group: Any) -> Plan:
    groups = [WorkerGroup(name=f"w{k}", profile="p.json", **group) for k in range(len(profiles))]
    run = RunTable(local_steps=steps)
    plan = make_plan(Cluster(job=Job(global_batch=global_batch), worker=groups, run=run), profiles)
    check_plan("plan.json", plan)
    return plan


def test_all_arrive_together() -> None:
    """Speeds of 1 to 4: local steps in that proportion, and 2.5 times as fast as equal ones."""
    plan = planned([profile(0.04 / speed, 0.0) for speed in (1, 2, 3, 4)], 16, 10)
    assert [(w.accumulation, w.micro_batch) for w in plan.workers] == [(4, 4), (8, 4), (12, 4), (16, 4)]
    assert plan.global_batch == 160
    assert plan.run is not None
    assert plan.run.local_steps == 10
    assert plan.speedup_over_even == pytest.approx(2.5)
    assert {round(w.predicted_seconds, 9) for w in plan.workers} == {0.64}


@pytest.mark.parametrize("depth", [1, "auto"])
def test_workers_that_do_not_wait_also_arrive_together(depth: Any) -> None:
    """All samples of a round are planned, and the numbers of steps are those of rounds."""
    groups = [
        WorkerGroup(name=f"w{speed}", profile="p", shares=["link"] if speed in (2, 3) else [])
        for speed in SPEEDS
    ]
    run = RunTable(policy="asp", local_steps=10, codec="int8", depth=depth)
    cluster = Cluster(
        job=Job(global_batch=16), worker=groups, run=run, shared=[Shared(name="link", bandwidth=5e6)]
    )
    plan = make_plan(cluster, [profile(0.04 / speed, 0.0) for speed in SPEEDS], Pace("free"))
    check_plan("plan.json", plan)
    assert plan.global_batch == sum(w.batch for w in plan.workers) == 160
    seconds = [w.predicted_seconds for w in plan.workers]
    assert max(seconds) < 1.2 * min(seconds)


def test_only_workers_behind_a_link_overlap() -> None:
    """The others, without a link, transfer nothing: they wait for the round, on its newest parameters."""
    shares = [["link"] if speed in (2, 3) else [] for speed in SPEEDS]
    groups = [WorkerGroup(name=f"w{k}", profile="p", shares=names) for k, names in enumerate(shares)]
    run = RunTable(policy="hps", local_steps=10, codec="int4", pull_codec="int8", depth="auto")
    cluster = Cluster(
        job=Job(global_batch=20), worker=groups, run=run, shared=[Shared(name="link", bandwidth=5e6)]
    )
    plan = make_plan(cluster, [profile(0.05 / speed, 0.0) for speed in SPEEDS], Pace("round"))
    assert plan.run is not None
    assert [plan.mode_of(worker).depth for worker in plan.workers] == [1, 2, 2, 1]
    assert [worker.batch for worker in plan.workers] == [20, 40, 60, 80]
    assert plan.iteration_seconds == pytest.approx(1.0)


@pytest.mark.parametrize(("steps", "depth"), [(10, 1), (None, 2)])
def test_without_any_link_a_pipeline_is_shallow(steps: int | None, depth: int) -> None:
    """Local steps of a round wait for it: there is no transfer to hide, and late ones learn less."""
    groups = [WorkerGroup(name=f"w{k}", profile="p") for k in range(3)]
    run = RunTable(policy="hps", local_steps=steps, depth="auto")
    cluster = Cluster(job=Job(global_batch=12), worker=groups, run=run)
    plan = make_plan(cluster, [profile(0.01, 0.0)] * 3, Pace("round"))
    assert plan.run is not None
    assert [plan.mode_of(worker).depth for worker in plan.workers] == [depth] * 3


def test_one_transfer_for_all_steps_of_a_round() -> None:
    """A worker far away gets fewer local steps, for its transfers take part of the round."""
    near = planned([profile(0.01, 0.0)] * 2, 8, 10)
    groups = [
        WorkerGroup(name="near", profile="p", bandwidth=1e9),
        WorkerGroup(name="far", profile="p", bandwidth=5e6),
    ]
    cluster = Cluster(job=Job(global_batch=8), worker=groups, run=RunTable(local_steps=10))
    plan = make_plan(cluster, [profile(0.01, 0.0)] * 2)
    assert [w.accumulation for w in near.workers] == [10, 10]
    fast, far = plan.workers
    assert fast.accumulation > 10 > far.accumulation
    assert abs(fast.predicted_seconds - far.predicted_seconds) <= 2 * 0.04


@pytest.mark.parametrize("moments", [0, 1, 2])
def test_averaged_moments_take_their_time_on_a_link(moments: int) -> None:
    """In fp32 both ways, however gradients are encoded."""
    alike = profile(0.01, 0.0)
    groups = [WorkerGroup(name="near", profile="p"), WorkerGroup(name="far", profile="p", bandwidth=1e8)]
    run = RunTable(local_steps=10, codec="int8", average_moments=moments)
    plan = make_plan(Cluster(job=Job(global_batch=8), worker=groups, run=run), [alike] * 2)
    check_plan("plan.json", plan)
    assert plan.run is not None
    assert (plan.run.average_moments or 0) == moments
    assert alike.model.parameters is not None
    numbers = alike.model.parameters
    each_way = [WIRE_BYTES[8] + 4 * moments, WIRE_BYTES[32] + 4 * moments]
    assert plan.workers[1].link_seconds == pytest.approx(sum(each_way) * numbers / 1e8)


@given(data=st.data())
@settings(max_examples=examples(18, 60), deadline=None)
def test_brute_force(data: st.DataObject) -> None:
    """No samples of workers, of as many in all, let the slowest end earlier."""
    count = data.draw(st.integers(1, 3))
    fits = [(data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))) for _ in range(count)]
    size, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    plan = planned([profile(0.01 * a, 0.01 * c) for a, c in fits], size * count, steps)
    samples = size * count * steps
    best = min(
        max(0.01 * (a * n - c * (-n // size)) for n, (a, c) in zip(split, fits, strict=True))
        for split in itertools.product(range(samples + 1), repeat=count)
        if sum(split) == samples
    )
    assert plan.iteration_seconds == pytest.approx(best)
    assert all(w.micro_batch == min(w.batch, size) for w in plan.workers if w.batch)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_local_steps_end_together(steps: int) -> None:
    """Speeds of which no small numbers of whole steps are in proportion."""
    speeds = (1.0, 1.7, 2.9)
    plan = planned([profile(0.01 / speed, 0.0) for speed in speeds], 150, steps)
    assert plan.iteration_seconds < 1.02 * 0.01 * 150 * steps / sum(speeds)
    assert not [line for line in plan.warnings if "idle" in line]


def test_steps_that_must_be_whole_are_and_idle_workers_are_said() -> None:
    """With a batch_multiple all steps are alike; the plan says what that costs, and what would help."""
    speeds = (1.0, 1.7, 2.9)
    profiles = [profile(0.01 / speed, 0.0) for speed in speeds]
    plan = planned(profiles, 150, 2, batch_multiple=10)
    assert [w.batch for w in plan.workers] == [50, 100, 150]
    idle = 1 - plan.workers[0].predicted_seconds / plan.iteration_seconds
    assert plan.warnings == [
        f"w0: idle for {idle:.1%} of a round, which has 2 local steps of 50 samples on average: "
        "more of them, or a smaller global_batch, would fit better"
    ]


def test_what_memory_holds_is_a_local_step() -> None:
    """A device for 3 samples at once takes more, smaller steps; the others steps of the even share."""
    plan = planned([profile(0.01, 0.001), profile(0.01, 0.001, most=3)], 16, 6)
    large, small = plan.workers
    assert (large.micro_batch, small.micro_batch) == (8, 3)
    assert large.batch + small.batch == 96
    assert small.accumulation > large.accumulation


def test_a_multiple_that_memory_does_not_hold_is_taken_in_smaller_steps() -> None:
    group = WorkerGroup(name="w", profile="p", count=2, batch_multiple=3, max_batch=1)
    cluster = Cluster(job=Job(global_batch=6), worker=[group], run=RunTable(local_steps=2))
    (one, other) = make_plan(cluster, [profile(0.01, 0.001)]).workers
    assert (one.batch, other.batch) == (6, 6)
    assert (one.micro_batch, one.max_batch) == (1, 1)


def test_a_global_batch_that_workers_do_not_divide() -> None:
    plan = planned([profile(0.01, 0.001)] * 4, 18, 5)
    assert sum(w.batch for w in plan.workers) == plan.global_batch == 90
    assert {w.micro_batch for w in plan.workers} == {4}


@pytest.mark.parametrize("split", [[40, 40, 40, 40], [1, 59, 50, 50], [16, 32, 48, 64]])
def test_another_split_keeps_the_local_batch(split: list[int]) -> None:
    plan = planned([profile(0.04 / speed, 0.0) for speed in (1, 2, 3, 4)], 16, 10)
    for changed in (with_split(plan, split), even_plan(plan, "plan.json")):
        check_plan("plan.json", changed)
        assert {min(4, w.batch) for w in changed.workers} >= {w.micro_batch for w in changed.workers}
        assert [w.accumulation for w in changed.workers] == [-(-w.batch // 4) for w in changed.workers]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"local_steps": 2, "accumulation": 2}, r"run\.accumulation: found 2; expected 1 with local_steps"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_batch": 4}, r"run\.local_batch: found 4; expected nothing without local_steps"),
        ({"local_batch": "some", "local_steps": 2}, "local_batch"),
        ({"average_moments": 1}, r"run\.average_moments: found 1; expected 0 without local_steps"),
        ({"average_moments": 2, "local_steps": 3, "depth": "auto"}, "found 2; expected 0 in a pipeline"),
    ],
)
def test_contradictions_are_refused(table: dict[str, int], message: str) -> None:
    from pyps.formats.mode import check_run_table

    with pytest.raises((InputError, msgspec.ValidationError), match=message):
        check_run_table("c.toml", msgspec.convert(table, RunTable))


def test_too_many_samples_in_a_round() -> None:
    with pytest.raises(InputError, match=r"run\.local_steps: found 100000, of 1000000 samples"):
        planned([profile(0.01, 0.0)] * 2, 1_000_000, 100_000)


def with_local_batch(
    profiles: list[Profile], global_batch: int, steps: int, local: Any, **group: Any
) -> Plan:
    groups = [WorkerGroup(name=f"w{k}", profile="p.json", **group) for k in range(len(profiles))]
    run = RunTable(local_steps=steps, local_batch=local)
    plan = make_plan(Cluster(job=Job(global_batch=global_batch), worker=groups, run=run), profiles)
    check_plan("plan.json", plan)
    return plan


def test_a_local_batch_that_is_given_leaves_the_samples_of_a_round() -> None:
    """The steps become smaller and more, and all still end together (benchmarks/local_samples.py)."""
    plan = with_local_batch([profile(0.04 / speed, 0.0) for speed in SPEEDS], 20, 10, 2)
    assert [(w.accumulation, w.micro_batch) for w in plan.workers] == [(10, 2), (20, 2), (30, 2), (40, 2)]
    assert plan.global_batch == 200
    assert plan.run is not None
    assert (plan.run.local_steps, plan.run.local_batch) == (10, 2)


def test_the_plan_in_words_has_the_local_steps_of_all_workers() -> None:
    alike, unlike = (
        with_local_batch([profile(0.01, 0.001), profile(0.01, 0.001, most=most)], 20, 10, 4)
        for most in (None, 3)
    )
    for plan, words in ((alike, "local steps of 4"), (unlike, "local steps of 3 to 4")):
        assert plan.run is not None
        assert mode_text(plan, plan.run).endswith(words)


def test_a_local_batch_that_is_no_whole_multiple_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"run\.local_batch: found 2; expected at least 4, the batch_multiple of w0"
    ):
        with_local_batch([profile(0.01, 0.0)] * 2, 40, 10, 2, batch_multiple=4)


@settings(max_examples=examples(10, 30), deadline=None)
@given(
    fixed=st.lists(st.floats(0.0, 0.05), min_size=2, max_size=4),
    even=st.integers(1, 40),
    multiple=st.sampled_from([1, 1, 4]),
)
def test_an_automatic_local_batch_is_the_smallest_that_is_nearly_as_fast(
    fixed: list[float], even: int, multiple: int
) -> None:
    """Against each size of a step in a plan of its own: none smaller is within 5 % of the fastest."""
    even = -(-even // multiple) * multiple
    profiles = [profile(0.002 * (k + 1), c) for k, c in enumerate(fixed)]
    batch = even * len(profiles)

    def samples_a_second(size: int) -> float:
        rates = [size / (c + 0.002 * (k + 1) * size) for k, c in enumerate(fixed)]
        return sum(rates)

    plan = with_local_batch(profiles, batch, 50, "auto", batch_multiple=multiple)
    assert plan.run is not None
    found = plan.run.local_batch
    sizes = range(multiple, even + 1, multiple)
    best = max(map(samples_a_second, sizes))
    expected = min(size for size in sizes if samples_a_second(size) >= 0.95 * best)
    assert found == expected


def test_what_a_step_costs_by_itself_makes_local_steps_larger() -> None:
    """Like Muon's orthogonalization, which a profile with Muon has measured."""
    profiles = [profile(0.01, 0.0), profile(0.02, 0.0)]
    costly = [profile(0.01, 0.02), profile(0.02, 0.02)]
    free, dear = (with_local_batch(which, 64, 10, "auto").run for which in (profiles, costly))
    assert free is not None
    assert dear is not None
    assert free.local_batch == 1
    assert dear.local_batch is not None
    assert 10 < dear.local_batch < 32


def test_a_local_step_has_as_many_samples_as_the_model_trains_on() -> None:
    """Two with batch normalization, also where the even share is one; and none of them has one left over."""
    normalized = msgspec.structs.replace(profile(0.01, 0.001), min_batch=2)
    plan = planned([normalized, normalized, profile(0.02, 0.001), profile(0.03, 0.001)], 4, 10)
    assert [worker.micro_batch for worker in plan.workers[:2]] == [2, 2]
    unlike = [msgspec.structs.replace(profile(each, 0.0), min_batch=2) for each in (0.01, 0.03)]
    plan = planned(unlike, 2, 11)
    assert [(worker.micro_batch, worker.batch % 2) for worker in plan.workers] == [(2, 0)] * 2
    with pytest.raises(InputError, match=r"run\.local_batch: found 1; expected at least 2: w0 trains on no"):
        with_local_batch([normalized] * 2, 40, 10, 1)


@pytest.mark.parametrize("deadline", [None, 1.0])
def test_what_helps_a_refused_round_is_a_steps_batch(deadline: float | None) -> None:
    """Six required workers with three samples each need 18; a round of four steps has 16, then 20."""
    group = WorkerGroup(name="w", profile="p.json", count=6, required=True, min_batch=3, price_per_hour=1.0)
    job = Job(global_batch=4, target=1e6, deadline_hours=deadline)
    cluster = Cluster(job=job, worker=[group], run=RunTable(local_steps=4))
    with pytest.raises(Infeasible, match="global_batch 4, 16 samples a round") as refused:
        make_plan(cluster, [profile(1e-3, 1e-3)])
    assert refused.value.nearest.startswith("set global_batch to 5")
    changed = msgspec.structs.replace(cluster, job=msgspec.structs.replace(job, global_batch=5))
    assert make_plan(changed, [profile(1e-3, 1e-3)]).global_batch == 20


def test_no_batch_is_proposed_that_misses_the_deadline() -> None:
    group = WorkerGroup(name="w", profile="p.json", count=6, required=True, min_batch=3, price_per_hour=1.0)
    job = Job(global_batch=4, target=1e6, deadline_hours=0.1)
    with pytest.raises(Infeasible) as refused:
        make_plan(Cluster(job=job, worker=[group], run=RunTable(local_steps=4)), [profile(1e-2, 1e-1)])
    assert not refused.value.nearest
