"""Plans: caps and bounds from cluster and profile, the even split, turns, transfers and warnings."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Device, Fit, Job, Link, Memory, ModelInfo, Plan, Point, Profile, WorkerGroup
from pyps.profiler import predict_seconds
from pyps.solver.auto_batch import best_global_batch
from pyps.solver.constrained import even_batches
from pyps.solver.costs import cost_of
from pyps.solver.plan import make_plan
from pyps.solver.ranks import max_batch_of, planned_ranks, problem_of

PARAMETERS = 1_000_000
MOVED = PARAMETERS


def profile(a: float, c: float = 0.01, **changes: Any) -> Profile:
    fit = Fit(
        kind="affine", fixed_seconds=c, per_sample_seconds=a, trusted_min_batch=1, trusted_max_batch=4096
    )
    base = Profile(
        device=Device(name="d"),
        model=ModelInfo(name="mlp", parameters=PARAMETERS),
        points=[Point(batch=1, seconds=1.0)],
        fit=fit,
    )
    return msgspec.structs.replace(base, **changes)


def plan(B: int, *groups: tuple[dict[str, Any], Profile]) -> Plan:
    workers = [WorkerGroup(**{"name": f"w{k}", "profile": "p.json", **g}) for k, (g, _) in enumerate(groups)]
    return make_plan(Cluster(job=Job(global_batch=B), worker=workers), [p for _, p in groups])


def test_a_plan_is_consistent() -> None:
    made = plan(300, ({"count": 2}, profile(0.001)), ({}, profile(0.002)))
    assert [w.name for w in made.workers] == ["w0-0", "w0-1", "w1"]
    assert [w.rank for w in made.workers] == [0, 1, 2]
    assert [w.batch for w in made.workers] == [120, 120, 60]
    assert sum(w.weight for w in made.workers) == pytest.approx(1.0)
    assert made.iteration_seconds == max(w.predicted_seconds for w in made.workers) == pytest.approx(0.13)
    assert made.lower_bound_seconds == pytest.approx(0.13)
    assert made.even_split.feasible
    assert made.speedup_over_even == pytest.approx(0.21 / 0.13)
    assert made.warnings == []


def test_batches_have_the_samples_that_the_model_needs() -> None:
    """A profile of a model with batch normalization says 2; the plan keeps it, for what a run decides too."""
    needs_two = profile(0.1, min_batch=2)
    split = plan(
        8, ({"name": "fast"}, profile(0.001, min_batch=2)), ({"name": "slow", "required": True}, needs_two)
    )
    assert [worker.batch for worker in split.workers] == [6, 2]
    assert [worker.min_batch for worker in split.workers] == [2, 2]
    stricter = plan(
        8, ({"name": "fast"}, profile(0.001)), ({"name": "slow", "min_batch": 3, "required": True}, needs_two)
    )
    assert [worker.batch for worker in stricter.workers] == [5, 3]


def test_the_even_split_gives_what_is_over_to_the_first() -> None:
    assert even_batches(11, 4) == [3, 3, 3, 2]
    assert even_batches(2, 4) == [1, 1, 0, 0]


@pytest.mark.parametrize("bound", [{"max_batch": 10}, {"min_batch": 60}, {"batch_multiple": 8}])
def test_an_even_split_that_breaks_a_bound_is_not_feasible(bound: dict[str, int]) -> None:
    made = plan(100, (bound, profile(0.001)), ({}, profile(0.002)))
    assert not made.even_split.feasible
    assert made.even_split.seconds is None
    assert made.speedup_over_even is None


def test_the_cap_is_the_least_of_all_that_bound_it() -> None:
    memory = Memory(fixed_bytes=100, bytes_per_sample=3.0, budget_bytes=200)
    group = WorkerGroup(name="a", profile="p", max_batch=50)
    assert max_batch_of(group, profile(1.0)) == 50
    assert max_batch_of(group, profile(1.0, max_batch=40)) == 40
    assert max_batch_of(group, profile(1.0, max_batch=40, memory=memory)) == 33
    tiny = Memory(fixed_bytes=300, bytes_per_sample=3.0, budget_bytes=200)
    assert max_batch_of(group, profile(1.0, memory=tiny)) == 0


def test_every_kind_of_fit_is_a_cost() -> None:
    bounds = {"trusted_min_batch": 1, "trusted_max_batch": 9}
    knee = Fit(kind="knee", fixed_seconds=1.0, per_sample_seconds=0.5, floor_seconds=2.0, **bounds)
    assert [cost_of(knee).seconds(b) for b in (1, 2, 4)] == [2.0, 2.0, 3.0]
    assert cost_of(msgspec.structs.replace(knee, kind="affine")).seconds(1) == 1.5
    table = Fit(kind="table", table=[(1, 1.0), (3, 2.0)], **bounds)
    assert cost_of(table).seconds(2) == 1.5


def test_required_workers_that_cannot_take_part_are_named() -> None:
    with pytest.raises(Infeasible, match=r"worker\[1\] 'w1' is required.*at least 8 and at most 5"):
        plan(
            100,
            ({}, profile(0.1)),
            ({"required": True, "min_batch": 3, "batch_multiple": 8, "max_batch": 5}, profile(0.1)),
        )


def test_a_profile_without_a_fit_is_refused() -> None:
    with pytest.raises(InputError, match=r"p\.json: fit"):
        plan(10, ({}, profile(0.1, fit=None)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"min_batch": 300}, "no batch fits: its smallest is 300, the global batch is 200"),
        (
            {"batch_multiple": 8, "max_batch": 5},
            "no batch fits: its smallest is 8, max_batch and memory allow 5",
        ),
        ({"free_bytes": 16}, "no batch fits: its smallest is 1, max_batch and memory allow 0"),
        ({"bandwidth": 1.0, "latency": 1.0}, "the others finish sooner without it"),
    ],
)
def test_a_worker_that_is_left_out_has_the_true_reason(given: dict[str, Any], reason: str) -> None:
    memory = Memory(fixed_bytes=10, bytes_per_sample=10.0, budget_bytes=10**9)
    one = profile(0.1, memory=memory)
    assert f"w1: left out, {reason}" in plan(200, ({}, one), (given, one)).warnings


def test_links_in_other_units_are_doubted() -> None:
    """Gigabytes for bytes, milliseconds for seconds, and a latency that nothing counts."""
    one, measured = profile(0.1), Link(via="gloo", latency_seconds=1e-3, bytes_per_second=1e9)
    made = plan(200, ({"latency": 50.0}, one), ({"bandwidth": 1.25, "latency": 0.1}, one))
    assert [line for line in made.warnings if "latency" in line or "bandwidth" in line] == [
        "w0: its latency is not counted: state its bandwidth, too",
        "w0: latency 50: latency is in seconds",
        "w1: bandwidth 1.25: bandwidth is in bytes a second (1 Gbit/s is 1.25e8)",
    ]
    assert not plan(200, ({"latency": 0.1}, profile(0.1, link=measured))).warnings


def test_warnings_say_what_not_to_trust() -> None:
    fit = Fit(
        kind="affine",
        per_sample_seconds=0.001,
        trusted_min_batch=1,
        trusted_max_batch=16,
        leave_one_out_error=0.2,
    )
    emulated = profile(0.1, fit=fit, device=Device(name="slow", emulated=True, throttle=2.9))
    made = plan(100, ({"count": 2}, emulated), ({}, profile(9.0, model=ModelInfo(name="cnn"))))
    assert made.warnings == [
        "w0: batch 50 is outside 1..16, where its fit is trusted",
        "w0: the fit misses left-out points by 20.0% (median)",
        "w0: emulated, 2.9 times slower by a throttle",
        "w1: left out, the others finish sooner without it",
        "the profiles are of different models: cnn, mlp",
        "from a global batch of 18,019 on, all workers would be used",
    ]
    assert [w.throttle for w in made.workers] == [2.9, 2.9, 1.0]
    assert made.r2sp.order == [0, 1]


def test_a_global_batch_far_away_is_not_searched_for() -> None:
    """With unlike multiples, sums of billions of samples take minutes."""
    slow = {"batch_multiple": 2}, profile(0.001, c=3e4)
    made = plan(90, ({"batch_multiple": 3}, profile(0.001)), ({"batch_multiple": 5}, profile(0.002)), slow)
    assert made.warnings == ["w2: left out, the others finish sooner without it"]
    linked = [({"batch_multiple": n, "bandwidth": MOVED / 25}, profile(1e-5)) for n in (3, 5)]
    remedies = plan(90, *linked).r2sp.remedies
    assert remedies is not None
    assert remedies.global_batch is None, "turns of 400 s would need 80 million samples"


@pytest.mark.parametrize("seed", range(8))
def test_the_global_batch_from_which_all_are_used(seed: int) -> None:
    """It is said where a worker is left out; plans of one sample less and of more agree."""
    draw = random.Random(seed)
    groups = [({}, profile(draw.uniform(0.001, 0.01), c=draw.uniform(0.01, 1.0))) for _ in range(4)]
    said = [w for w in plan(4, *groups).warnings if w.startswith("from a global batch of")]
    least = int(said[0].split()[5].replace(",", ""))
    assert [all(w.batch for w in plan(B, *groups).workers) for B in (least - 1, least, least + 9)] == [
        False,
        True,
        True,
    ]


def test_a_link_that_binds_is_said() -> None:
    made = plan(100, ({"count": 2, "bandwidth": 1e6}, profile(0.001)))
    assert made.r2sp.feasible is False
    assert "the link binds, not the workers; it would fit with" in made.warnings[-1]
    assert made.hps.serial_seconds == pytest.approx(0.06 + 8 * MOVED / 1e6)
    assert made.hps.pipelined_seconds == pytest.approx(4 * MOVED / 1e6)


def test_the_problem_takes_every_bound_from_the_cluster() -> None:
    group = WorkerGroup(
        name="a", profile="p", min_batch=3, max_batch=9, batch_multiple=2, required=True, count=2
    )
    cluster = Cluster(job=Job(global_batch=12), worker=[group])
    built = problem_of(cluster, planned_ranks(cluster, [profile(1.0)]))
    assert built.global_batch == 12
    bounds = [built.min_batch, built.max_batch, built.batch_multiple]
    assert [bound.tolist() for bound in bounds] == [[3, 3], [9, 9], [2, 2]]
    assert built.required.tolist() == [True, True]


def test_a_cap_that_binds_is_accumulated_where_it_may_be() -> None:
    made = plan(
        100, ({"max_batch": 16, "max_accumulation": 8, "required": True}, profile(0.001)), ({}, profile(0.02))
    )
    first = made.workers[0]
    assert first.micro_batch == 16
    assert first.accumulation == -(-first.batch // 16) > 1
    full, rest = divmod(first.batch - 1, 16)
    assert first.predicted_seconds == pytest.approx(full * 0.026 + 0.01 + 0.001 * (rest + 1))
    alone = plan(100, ({"max_batch": 16}, profile(0.001)), ({}, profile(0.02)))
    assert alone.workers[0].batch == 16
    assert made.iteration_seconds < alone.iteration_seconds


def test_times_of_steps_in_micro_batches_are_refused() -> None:
    """Such times say nothing of one micro-batch, nor of the memory of a whole batch."""
    parts = profile(0.001, model=ModelInfo(name="mlp", accumulate=4))
    with pytest.raises(InputError, match=r"model\.accumulate: found 4 micro-batches; .*max_accumulation = 4"):
        plan(100, ({}, parts))


def test_free_memory_takes_the_place_of_the_budget() -> None:
    memory = Memory(fixed_bytes=100, bytes_per_sample=3.0, budget_bytes=200)
    assert max_batch_of(WorkerGroup(name="a", profile="p", free_bytes=130), profile(1.0, memory=memory)) == 10
    with pytest.raises(InputError, match="memory model"):
        max_batch_of(WorkerGroup(name="a", profile="p", free_bytes=130), profile(1.0))


def whole_plan(B: int, groups: list[dict[str, Any]], profiles: list[Profile], **tables: Any) -> Plan:
    """A plan of a cluster file with other tables."""
    workers = [{"name": f"w{k}", "profile": "p.json", **group} for k, group in enumerate(groups)]
    raw = {"job": {"global_batch": B}, "worker": workers, **tables}
    return make_plan(msgspec.convert(raw, Cluster), profiles)


def test_synchronisation_leaves_out_ranks_that_cost_too_much() -> None:
    groups = [{"count": 2, "bandwidth": 1e9}, {"bandwidth": 1e6}]
    profiles = [profile(0.001), profile(0.001)]
    without = whole_plan(300, groups, profiles, sync={"kind": "none"})
    assert [w.batch for w in without.workers] == [100, 100, 100]
    made = whole_plan(300, groups, profiles, sync={"kind": "ring"})
    assert [w.batch for w in made.workers] == [150, 150, 0]
    assert made.sync is not None
    assert made.sync.seconds == pytest.approx(4 * PARAMETERS / 1e9)
    assert made.iteration_seconds == pytest.approx(0.16 + 0.004)
    assert made.lower_bound_seconds <= made.iteration_seconds
    with pytest.raises(InputError, match="bandwidth"):
        whole_plan(300, [{}], [profile(0.001)], sync={"kind": "ring"})
    silent = profile(0.001, model=ModelInfo(name="mlp"))
    with pytest.raises(InputError, match=r"model\.parameters"):
        whole_plan(300, [{"bandwidth": 1e9}], [silent], sync={"kind": "ring"})


def test_a_transfer_over_a_worker_s_own_link_is_part_of_its_time() -> None:
    groups: list[dict[str, Any]] = [{"bandwidth": 1e9}, {"bandwidth": 1e7}]
    both, a = 2 * 4 * MOVED, 0.001
    made = whole_plan(1000, groups, [profile(a), profile(a)])
    fast, slow = made.workers
    assert fast.batch - slow.batch == pytest.approx((both / 1e7 - both / 1e9) / a, abs=2)
    assert slow.predicted_seconds == pytest.approx(0.01 + a * slow.batch + both / 1e7)
    assert made.iteration_seconds == max(fast.predicted_seconds, slow.predicted_seconds)
    assert made.iteration_seconds == pytest.approx(made.lower_bound_seconds, abs=a)
    assert made.hps.compute_seconds == pytest.approx(0.01 + a * fast.batch)
    assert made.hps.serial_seconds == pytest.approx(made.iteration_seconds)
    probed = profile(a, link=Link(via="store", latency_seconds=0.0, bytes_per_second=1e7))
    by_profile = whole_plan(1000, [groups[0], {}], [profile(a), probed])
    assert [w.batch for w in by_profile.workers] == [fast.batch, slow.batch]
    sharing, link = [{**g, "shares": ["link"]} for g in groups], {"name": "link", "bandwidth": 1e9}
    on_a_shared_link = whole_plan(1000, sharing, [profile(a)] * 2, shared=[link])
    assert [w.batch for w in on_a_shared_link.workers] == [502, 498], "one sends while the other computes"


def test_a_budget_is_kept_and_priced() -> None:
    groups = [{"count": 2, "price_per_hour": 3.0}, {"count": 4, "price_per_hour": 1.0}]
    profiles = [profile(0.001), profile(0.003)]
    rich = whole_plan(400, groups, profiles)
    assert rich.cost is not None
    assert rich.cost.price_per_hour == 10.0
    assert rich.cost.price_per_million_samples == pytest.approx(
        10 / 3600 * rich.iteration_seconds / 400 * 1e6
    )
    poor = whole_plan(400, groups, profiles, limits={"price_per_hour": 5.0})
    assert poor.cost is not None
    assert poor.cost.price_per_hour is not None
    assert poor.cost.price_per_hour <= 5
    assert poor.iteration_seconds > rich.iteration_seconds
    with pytest.raises(Infeasible, match=r"raise limits.price_per_hour from 0.5 to 1"):
        whole_plan(400, groups, profiles, limits={"price_per_hour": 0.5})


def test_shared_links_and_ties_reach_the_plan() -> None:
    shared = [{"name": "rack", "bandwidth": 1e8}]
    groups = [{"count": 2, "shares": ["rack"], "together": "node"}, {"max_batch": 150}]
    profiles = [profile(0.001), profile(0.001)]
    made = whole_plan(400, groups, profiles, shared=shared)
    transfers = 4 * 4 * MOVED / 1e8
    assert made.workers[0].predicted_seconds == pytest.approx(
        0.01 + 0.001 * made.workers[0].batch + transfers
    )
    apart = whole_plan(100, groups, profiles, shared=shared)
    assert [w.batch for w in apart.workers] == [0, 0, 100]


def test_a_quantile_plan_also_gives_the_fitted_times() -> None:
    steady = [Point(batch=b, seconds=[0.01 + 0.001 * b] * 4) for b in (10, 20)]
    shaky = [Point(batch=b, seconds=[(0.01 + 0.001 * b) * f for f in (0.7, 0.9, 1.1, 1.4)]) for b in (10, 20)]
    profiles = [profile(0.001, points=steady), profile(0.001, points=shaky)]
    workers = [{"name": "steady", "profile": "p"}, {"name": "shaky", "profile": "p"}]
    raw = {"job": {"global_batch": 200, "quantile": 0.95}, "worker": workers}
    made = make_plan(msgspec.convert(raw, Cluster), profiles)
    assert made.noise is not None
    assert made.noise.nominal.batches == [100, 100]
    assert made.workers[0].batch > 100 > made.workers[1].batch
    robust = made.noise.robust.quantile_seconds
    assert (
        made.iteration_seconds * 0.99 < robust <= made.iteration_seconds < made.noise.nominal.quantile_seconds
    )
    assert made.noise.nominal.seconds < made.noise.robust.seconds
    assert made.noise.robust.chance >= 0.95 - 1e-9
    single = make_plan(msgspec.convert(raw, Cluster), [profiles[0], profile(0.001)])
    assert "shaky: too few timings to estimate its noise" in single.warnings


def test_goodput_is_reported_where_the_noise_scale_is_known() -> None:
    made = whole_plan(
        300, [{}], [profile(0.001)], goodput={"noise_scale": 300.0, "base_batch": 100, "max_batch": 5000}
    )
    assert made.goodput is not None
    assert made.goodput.efficiency == pytest.approx(400 / 600)
    assert made.goodput.samples_per_second == pytest.approx(300 / 0.31)
    assert made.goodput.goodput == pytest.approx(300 / 0.31 * 400 / 600)


def test_a_polygon_goes_on_after_its_last_batch() -> None:
    bounds = {"trusted_min_batch": 1, "trusted_max_batch": 9}
    convex = Fit(kind="convex", table=[(1, 1.0), (3, 2.0), (5, 4.0)], **bounds)
    assert cost_of(convex).seconds(2) == 1.5
    assert cost_of(convex).seconds(7) == pytest.approx(6.0)
    assert cost_of(convex, 2.0).seconds(7) == pytest.approx(12.0)
    stated = msgspec.structs.replace(convex, kind="table", per_sample_seconds=0.25)
    assert cost_of(stated).seconds(7) == predict_seconds(stated, 7) == pytest.approx(4.5)
    alone = Fit(kind="convex", table=[(4, 1.0)], **bounds)
    assert cost_of(alone).seconds(5) == 1.0


def test_one_disturbed_last_time_does_not_tilt_how_an_older_table_goes_on() -> None:
    bounds = {"trusted_min_batch": 1, "trusted_max_batch": 9}
    table = [(b, 0.1 * b) for b in (1, 2, 4, 8, 16, 24, 32)]
    steady, tilted = (
        Fit(kind="table", table=[*table[:-1], (32, last)], **bounds) for last in (table[-1][1], 4.6)
    )
    assert steady.end_slope == pytest.approx(0.1)
    assert cost_of(tilted).seconds(64) < 1.8 * cost_of(steady).seconds(64)
    assert cost_of(tilted).seconds(64) == pytest.approx(predict_seconds(tilted, 64))


def test_a_measured_link_is_used_where_the_cluster_names_none() -> None:
    link = Link(via="store", latency_seconds=0.0, bytes_per_second=1e8)
    groups = [{"required": True}, {"bandwidth": 1e9, "required": True}]
    profiles = [profile(0.001, link=link)] * 2
    made = whole_plan(300, groups, profiles, sync={"kind": "server", "bandwidth": 1e12})
    assert made.sync is not None
    assert made.sync.seconds == pytest.approx(4 * 4 * PARAMETERS / 1e8)
    assert made.r2sp.turn_seconds == pytest.approx([2 * 4 * MOVED / b for b in (1e8, 1e9)])


def test_thousands_of_workers_on_a_narrow_link_are_soon_planned() -> None:
    start = time.perf_counter()
    made = plan(2_000_000, *(({"count": 4000, "bandwidth": 1e9}, profile(a)) for a in (0.001, 0.002, 0.005)))
    seconds = time.perf_counter() - start
    assert made.r2sp.remedies is not None
    assert made.r2sp.remedies.links is not None
    assert seconds < 30  # three where the machine is quiet; anything quadratic takes minutes


def test_the_batch_that_is_chosen_keeps_the_price_of_samples() -> None:
    """A million samples cost 1 + 100 / B; by the noise scale alone B would be small."""
    workers = [{"name": "w", "profile": "p.json", "price_per_hour": 3.6}]
    raw = {"job": {"global_batch": 1}, "worker": workers, "goodput": {"noise_scale": 10.0, "base_batch": 1}}
    free = msgspec.convert(raw, Cluster)
    bound = msgspec.convert({**raw, "limits": {"price_per_million_samples": 2.0}}, Cluster)
    assert best_global_batch(free, planned_ranks(free, [profile(0.001, c=0.1)])) < 90
    assert 100 <= best_global_batch(bound, planned_ranks(bound, [profile(0.001, c=0.1)])) < 110
