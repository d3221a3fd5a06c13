"""Batches and shares of a model's state that follow each card's memory: exact, and refused by name."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled import sampled

from pyps.errors import Infeasible, InputError
from pyps.formats import (
    Cluster,
    Device,
    Fit,
    Job,
    Memory,
    ModelInfo,
    Plan,
    PlanWorker,
    Point,
    Profile,
    RunTable,
    Sharding,
    SyncCost,
    WorkerGroup,
    check_cluster,
    check_plan,
)
from pyps.solver.costs import Costs, Line
from pyps.solver.exact.minmax import NotAlike, Pool, Problem, at_index, solve, times
from pyps.solver.exact.parts import InParts, at_once_within
from pyps.solver.plan import make_plan
from pyps.solver.planner import Planner
from pyps.solver.report.explain import Explanation
from pyps.solver.shards import Card, ModelState, with_shares
from pyps.solver.ways import GIB, STEPS, with_memory

PARAMETERS = 1_000_000
ROUNDED = 8  # bytes: each of a rank's kinds is rounded up to whole ones


def profile(seconds: float, budget: int, sample: float = 1e6, fixed: int = 18, **model: Any) -> Profile:
    """A device with so many seconds a sample. budget, fixed: bytes for each parameter. sample: bytes."""
    fit = Fit(
        kind="affine",
        fixed_seconds=0.01,
        per_sample_seconds=seconds,
        trusted_min_batch=1,
        trusted_max_batch=512,
    )
    memory = Memory(fixed_bytes=fixed * PARAMETERS, bytes_per_sample=sample, budget_bytes=budget * PARAMETERS)
    info = ModelInfo(**{"name": "m", "parameters": PARAMETERS, "optimizer": "AdamW", **model})
    points = [Point(batch=1, seconds=1.0)]
    return Profile(device=Device(name="d"), model=info, points=points, fit=fit, memory=memory)


def cluster(B: int, count: int, sharding: Sharding | None = None, **group: Any) -> Cluster:
    groups = [WorkerGroup(name=f"g{k}", profile=f"p{k}", bandwidth=1e9, **group) for k in range(count)]
    sharding = sharding or Sharding(stage=3, shares="memory", whole=0.0)
    made = Cluster(job=Job(global_batch=B), worker=groups, sync=SyncCost(kind="ring"), sharding=sharding)
    check_cluster("cluster.toml", made)
    return made


def shares_of(plan: Plan) -> list[float]:
    check_plan("plan.json", plan)
    return [worker.share for worker in plan.workers if worker.share is not None]


@given(
    rooms=st.lists(
        st.tuples(st.integers(-2, 9), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4
    ),
    state=st.integers(1, 12),
)
def test_shares_exist_where_all_that_is_free_holds_the_state(
    rooms: list[tuple[int, int, int]], state: int
) -> None:
    """The lemma, against every way to divide a state of whole bytes."""
    free = [room - each * batch for room, each, batch in rooms]
    divided = any(
        sum(parts) == state and all(part <= left for part, left in zip(parts, free, strict=True))
        for parts in itertools.product(range(state + 1), repeat=len(rooms))
    )
    assert divided == (min(free) >= 0 and sum(free) >= state)
    if not divided:
        return
    whole = ModelState(0.0, 0.0, float(state), 1, 0.0, None)
    cards = [
        Card(whole, Memory(fixed_bytes=5, bytes_per_sample=each, budget_bytes=1), room + 5)
        for room, each, _ in rooms
    ]
    workers = [
        PlanWorker(
            rank=k, name=f"{k}", batch=b, micro_batch=b, accumulation=1, weight=0.5, predicted_seconds=1.0
        )
        for k, (_, _, b) in enumerate(rooms)
    ]
    found = with_shares(workers, cards)
    assert math.isclose(math.fsum(worker.share or 0.0 for worker in found), 1.0)
    for worker, (room, each, batch) in zip(found, rooms, strict=True):
        assert (worker.share or 0.0) * state + each * batch <= room + 1e-9
        assert worker.bytes is not None
        assert worker.bytes.total <= worker.bytes.memory + ROUNDED
        assert (worker.max_batch or 0) >= batch


@pytest.mark.parametrize("seed", sampled(range(60), *range(20)))
def test_a_pool_is_kept_as_by_brute_force(seed: int) -> None:
    luck = np.random.default_rng(seed)
    count, step = int(luck.integers(1, 5)), int(luck.integers(1, 3))
    costs = Costs.stack([Line(float(luck.integers(0, 3)), float(luck.integers(1, 5))) for _ in range(count)])
    low, high = luck.integers(1, 4, count), luck.integers(3, 9, count)
    each = luck.choice([1.0, 2.0, 3.5], count)
    total = int(luck.integers(1, 6 * count)) * step
    pool = Pool(each, float(luck.integers(1, 14 * count)))
    problem = Problem.of(
        costs, total, min_batch=low * step, max_batch=high * step, batch_multiple=step, required=True
    )
    problem = replace(problem, pool=pool)
    best = math.inf
    for units in itertools.product(*(range(int(a), int(b) + 1) for a, b in zip(low, high, strict=True))):
        batches = np.array(units, np.int64) * step
        if batches.sum() == total and each @ batches <= pool.at_most:
            best = min(best, float(times(costs, batches).max()))
    if math.isinf(best):
        with pytest.raises(Infeasible):
            solve(problem)
        return
    found = solve(problem)
    assert found.iteration_seconds == best
    assert pool.fits(found.batches)
    order = luck.permutation(count)
    again = solve(at_index(problem, order))
    assert sorted(again.batches.tolist()) == sorted(found.batches.tolist())


def test_unlike_multiples_in_a_pool_are_not_solved_here() -> None:
    costs = Costs.stack([Line(1.0, 1.0), Line(1.0, 2.0)])
    problem = Problem.of(costs, 8, max_batch=9, batch_multiple=[1, 2], required=True)
    with pytest.raises(NotAlike):
        solve(replace(problem, pool=Pool(np.array([2.0, 1.0]), 9.0)))


def test_a_pool_that_does_not_bind_changes_nothing() -> None:
    problem = Problem.of(Costs.stack([Line(1.0, 1.0), Line(1.0, 2.0)]), 9, max_batch=9, required=True)
    pooled = solve(replace(problem, pool=Pool(np.array([2.0, 1.0]), 100.0)))
    assert pooled.batches.tolist() == solve(problem).batches.tolist() == [6, 3]


def test_like_cards_have_equal_shares_and_what_fsdp_holds() -> None:
    profiles = [profile(0.001, 30)] * 4
    by_memory = make_plan(cluster(32, 4), profiles)
    equal = make_plan(cluster(32, 4, Sharding(stage=3, whole=0.0)), profiles)
    assert shares_of(by_memory) == pytest.approx([0.25] * 4)
    assert shares_of(equal) == [0.25] * 4
    assert [w.bytes for w in by_memory.workers] == [w.bytes for w in equal.workers]
    assert by_memory.iteration_seconds == equal.iteration_seconds


def test_a_share_is_what_its_card_has_room_for() -> None:
    """24 and 12 bytes for each of the parameters: 2 are fixed, 16 are the state, and samples take some."""
    profiles = [profile(0.001, 24), profile(0.003, 12)]
    made = make_plan(cluster(8, 2), profiles)
    assert [w.batch for w in made.workers] == [6, 2]
    assert shares_of(made) == pytest.approx([16 / 24, 8 / 24])  # free: 24 - 2 - 6 and 12 - 2 - 2
    for worker, card, fixed in zip(made.workers, (24, 12), (2, 2), strict=True):
        held, share = worker.bytes, worker.share or 0.0
        assert held is not None
        kinds = held.parameters, held.gradients, held.optimizer
        assert kinds == tuple(math.ceil(each * share * PARAMETERS) for each in (4, 4, 8))
        assert (held.fixed, held.memory) == (fixed * PARAMETERS, card * PARAMETERS)
        assert held.activations == worker.batch * PARAMETERS
        assert worker.memory is not None
        left = card * PARAMETERS - worker.memory.fixed_bytes
        assert worker.max_batch == left // PARAMETERS
    with pytest.raises(Infeasible):
        make_plan(cluster(8, 2, Sharding(stage=3, whole=0.0)), [profile(0.001, 24), profile(0.003, 9)])
    assert make_plan(cluster(8, 2), [profile(0.001, 24), profile(0.003, 9)])


@pytest.mark.parametrize(
    ("stage", "model", "kinds"),
    [
        (1, {}, (4, 4, 4)),
        (2, {}, (4, 2, 4)),
        (3, {}, (2.2, 2.2, 4)),
        (1, {"trained": PARAMETERS // 10}, (4, 0.4, 0.4)),  # adapters
        (3, {"parameter_bytes": 2}, (1.1, 1.1, 2)),  # a model in bfloat16, with its moments
        (1, {"optimizer": "SGD with momentum 0.9"}, (4, 4, 2)),
    ],
)
def test_bytes_by_kind_follow_stage_precision_and_optimizer(
    stage: Any, model: dict[str, Any], kinds: tuple[float, ...]
) -> None:
    sharding = Sharding(stage=stage, shares="memory", whole=0.1)
    made = make_plan(cluster(8, 2, sharding), [profile(0.001, 60, **model)] * 2)
    held = made.workers[0].bytes
    assert held is not None
    found = held.parameters, held.gradients, held.optimizer
    assert [x / PARAMETERS for x in found] == pytest.approx(kinds, rel=1e-6)
    assert held.fixed + sum(found) == pytest.approx(18 * PARAMETERS - saved(stage, model, kinds), 1e-6)


def saved(stage: int, model: dict[str, Any], kinds: tuple[float, ...]) -> float:
    """Return what a rank of two no longer holds of the whole model's bytes."""
    each = model.get("parameter_bytes", 4)
    trained = model.get("trained", PARAMETERS)
    moments = 1 if "optimizer" in model else 2
    whole = each * PARAMETERS + each * trained * (1 + moments)
    return whole - sum(kinds) * PARAMETERS


def test_a_profile_below_what_its_model_holds_is_taken_to_hold_it() -> None:
    made = make_plan(cluster(8, 2), [profile(0.001, 30, fixed=3)] * 2)
    assert made.workers[0].bytes is not None
    assert made.workers[0].bytes.fixed <= 1
    assert made.workers[0].bytes.optimizer == 4 * PARAMETERS


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("shares", ["equal", "memory"])
def test_without_a_memory_model_every_stage_is_refused(stage: Any, shares: Any) -> None:
    bare = msgspec.structs.replace(profile(0.001, 30), memory=None)
    with pytest.raises(InputError, match=f"p0.*memory.*stage = {stage}"):
        make_plan(cluster(8, 2, Sharding(stage=stage, shares=shares)), [bare, bare])


def test_ranks_that_divide_one_state_have_the_same_one() -> None:
    other = profile(0.001, 30, optimizer="SGD")
    with pytest.raises(InputError, match=r"p1.*precision or optimizer"):
        make_plan(cluster(8, 2), [profile(0.001, 30), other])


@pytest.mark.parametrize(
    ("group", "more", "field"),
    [
        ({}, {"sharding": Sharding(stage=3, shares="memory", replicas=2)}, "sharding.replicas"),
        ({}, {"run": RunTable(policy="asp")}, "run.policy"),
        ({"parallel": "data", "devices": 2, "inside_bandwidth": 1e9}, {}, r"worker\[0\].parallel"),
    ],
)
def test_what_unlike_shares_cannot_have_is_refused(
    group: dict[str, Any], more: dict[str, Any], field: str
) -> None:
    made = msgspec.structs.replace(cluster(8, 2), **more)
    made = msgspec.structs.replace(
        made, worker=[msgspec.structs.replace(one, **group) for one in made.worker]
    )
    with pytest.raises(InputError, match=field):
        check_cluster("cluster.toml", made)


@pytest.mark.parametrize("shares", [(0.5, 0.4), (1.0, None)])
def test_a_plan_whose_shares_are_not_the_whole_is_refused(shares: tuple[float, float | None]) -> None:
    made = make_plan(cluster(8, 2), [profile(0.001, 30)] * 2)
    workers = [
        msgspec.structs.replace(worker, share=share)
        for worker, share in zip(made.workers, shares, strict=True)
    ]
    with pytest.raises(InputError, match=r"workers\.share"):
        check_plan("plan.json", msgspec.structs.replace(made, workers=workers))


def test_a_ring_carries_all_but_the_least_share() -> None:
    profiles = [profile(0.001, 24), profile(0.003, 12)]
    made = make_plan(cluster(8, 2), profiles)
    equal = make_plan(cluster(8, 2, Sharding(stage=3, whole=0.0)), [profile(0.001, 24), profile(0.003, 24)])
    assert made.sync is not None
    assert equal.sync is not None
    assert made.sync.seconds == pytest.approx(equal.sync.seconds * (1 - min(shares_of(made))) / 0.5)
    assert made.lower_bound_seconds <= made.iteration_seconds


def test_an_all_reduce_carries_equal_parts_whatever_the_shares() -> None:
    """Under stage 1, only the gather of what the owners have stepped follows the shares."""
    given = cluster(8, 2, Sharding(stage=1, shares="memory"))
    made = make_plan(given, [profile(0.001, 24), profile(0.003, 15)])
    assert made.sync is not None
    least, model = min(shares_of(made)), 4 * PARAMETERS / 1e9  # seconds of the model over a link
    assert 0.1 < least < 0.4
    assert made.sync.seconds == pytest.approx(model * (2 * 0.5 + (1 - least)))


def with_way(given: Cluster, profiles: list[Profile], way: str) -> tuple[Cluster, list[Profile]]:
    """The cluster with a change that a refusal proposes."""
    assert given.sharding is not None
    if found := re.fullmatch(r"give ('g(\d)'|every card) (\S+) GiB more memory", way):
        those = [int(found[2])] if found[2] else range(len(profiles))
        return with_memory(given, profiles, those, round(float(found[3]) * GIB))
    if found := re.fullmatch(r"set global_batch to (\d+)", way):
        return msgspec.structs.replace(given, job=Job(global_batch=int(found[1]))), profiles
    if found := re.fullmatch(r"allow every worker max_accumulation = (\d+)", way):
        more = [msgspec.structs.replace(one, max_accumulation=int(found[1])) for one in given.worker]
        return msgspec.structs.replace(given, worker=more), profiles
    found = re.fullmatch(r'set sharding\.(stage|shares) to "?(\w+)"?', way)
    assert found is not None, way
    value: Any = int(found[2]) if found[1] == "stage" else found[2]
    sharding = msgspec.structs.replace(given.sharding, **{found[1]: value})
    return msgspec.structs.replace(given, sharding=sharding), profiles


@pytest.mark.parametrize("seed", sampled(range(24), *range(8)))
def test_what_a_refusal_proposes_helps_and_is_the_least(seed: int) -> None:
    luck = np.random.default_rng(seed)
    count, shares = int(luck.integers(1, 4)), str(luck.choice(["memory", "memory", "equal"]))
    billion, profiles = 1000, []
    for _ in range(count):
        budget, sample = int(luck.integers(4, 20)), float(luck.integers(2, 9)) * 1e8
        one = profile(float(luck.uniform(0.001, 0.01)), budget * billion, sample, 17 * billion)
        model = msgspec.structs.replace(one.model, parameters=billion * PARAMETERS)
        profiles.append(msgspec.structs.replace(one, model=model))
    sharding = Sharding(stage=int(luck.integers(1, 4)), shares=shares, whole=0.0)  # type: ignore[arg-type]
    given = cluster(int(luck.integers(4, 90)), count, sharding)
    try:
        make_plan(given, profiles)
        return
    except Infeasible as refusal:
        ways = refusal.nearest.split(" or ") if refusal.nearest else []
    assert ways
    for way in ways:
        make_plan(*with_way(given, profiles, way))
        if found := re.fullmatch(r"(give (?:'g\d'|every card)) (\S+) GiB more memory", way):
            less = f"{found[1]} {float(found[2]) - 1 / STEPS:.6g} GiB more memory"
        elif found := re.fullmatch(r"set global_batch to (\d+)", way):
            less = f"set global_batch to {int(found[1]) + 1}"
        else:
            continue
        with pytest.raises(Infeasible):
            make_plan(*with_way(given, profiles, less))


def test_a_refusal_of_a_sharded_model_proposes_no_worker_to_leave_out() -> None:
    with pytest.raises(Infeasible, match=r"'g1' has no memory for a batch of 1; give 'g1'") as refusal:
        make_plan(cluster(8, 2), [profile(0.001, 90), profile(0.001, 2)])
    assert "require" not in str(refusal.value)


def explained(B: int, profiles: list[Profile]) -> Explanation:
    return Planner(cluster(B, len(profiles)), profiles).explain()


def test_an_explanation_says_whose_memory_binds_and_what_a_gib_is_worth() -> None:
    ample = explained(8, [profile(0.001, 90), profile(0.003, 90)])
    assert "More memory would save no time" in ample.verdict
    assert set(ample.seconds_saved_per_gib) == {"", "g0", "g1"}
    assert not any(ample.seconds_saved_per_gib.values())
    one = explained(30, [profile(0.001, 12), profile(0.003, 60)])  # the fast card is full
    assert "The memory of g0 binds" in one.verdict
    full = make_plan(cluster(30, 2), [profile(0.001, 12), profile(0.003, 60)])
    given = with_memory(cluster(30, 2), [profile(0.001, 12), profile(0.003, 60)], [0], GIB)
    more = make_plan(*given)
    saved = compute_of(full) - compute_of(more)
    assert one.seconds_saved_per_gib["g0"] == pytest.approx(saved)
    # The fast card's samples take twice the memory.
    both = explained(12, [profile(0.001, 20, 2e6), profile(0.004, 20, 1e6)])
    assert "All memory together binds" in both.verdict
    assert both.seconds_saved_per_gib["g1"] > 0


def compute_of(plan: Plan) -> float:
    assert plan.sync is not None
    return plan.iteration_seconds - plan.sync.seconds


def in_parts(luck: np.random.Generator) -> InParts:
    cost = Line(float(luck.integers(1, 9)), float(luck.integers(1, 5)))
    once, multiple = float(luck.integers(0, 2)), int(luck.choice([1, 1, 2]))
    at_once, unit, repeats = int(luck.integers(1, 6)), int(luck.choice([1, 1, 2])), int(luck.integers(1, 4))
    return InParts(
        cost, once, at_once, unit, repeats, int(luck.integers(1, 3)), multiple, float(luck.integers(1, 4))
    )


@pytest.mark.parametrize("seed", sampled(range(80), *range(26)))
def test_micro_batches_in_a_pool_are_those_of_brute_force(seed: int) -> None:
    """Every batch in every size of micro-batches, of every worker."""
    luck = np.random.default_rng(seed)
    workers = [in_parts(luck) for _ in range(int(luck.integers(1, 4)))]
    total, at_most = int(luck.integers(2, 14)), float(luck.integers(2, 30))
    choices = []
    for one in workers:
        mine = []
        for batch in range(one.least, one.at_once * one.repeats + 1):
            for size in range(one.unit, one.at_once + 1, one.unit):
                parts = -(-batch // size)
                if batch % one.multiple == 0 and parts <= one.repeats:
                    last = batch - (parts - 1) * size
                    whole = (parts - 1) * (one.cost.seconds(size) - one.once) + one.cost.seconds(last)
                    mine.append((batch, whole, one.each * min(size, batch)))
        choices.append(mine)
    sums = [way for way in itertools.product(*choices) if sum(batch for batch, _, _ in way) == total]
    within = [way for way in sums if sum(need for _, _, need in way) <= at_most]
    if not sums:
        assert at_once_within(workers, total, at_most) is None
        return
    if not within:
        with pytest.raises(Infeasible, match="all memory together"):
            at_once_within(workers, total, at_most)
        return
    best = min(max(seconds for _, seconds, _ in way) for way in within)
    found = at_once_within(workers, total, at_most)
    assert found is not None
    assert sum(one.each * size for one, size in zip(workers, found.tolist(), strict=True)) <= at_most
    capped = [
        [way for way in mine if way[2] <= one.each * size]
        for mine, one, size in zip(choices, workers, found.tolist(), strict=True)
    ]
    reached = [way for way in itertools.product(*capped) if sum(batch for batch, _, _ in way) == total]
    assert min(max(seconds for _, seconds, _ in way) for way in reached) == best


def test_a_plan_in_micro_batches_keeps_to_all_memory() -> None:
    """Where micro-batches leave more for the state, a batch that did not fit does."""
    profiles = [profile(0.001, 14), profile(0.003, 12)]
    with pytest.raises(Infeasible, match="all memory together"):
        make_plan(cluster(12, 2), profiles)
    given = cluster(12, 2, max_accumulation=4)
    made = make_plan(given, profiles)
    assert any(worker.accumulation > 1 for worker in made.workers)
    assert sum(shares_of(made)) == pytest.approx(1.0)
    for worker in made.workers:
        assert worker.bytes is not None
        assert worker.bytes.activations == worker.micro_batch * 10**6
        assert worker.bytes.total <= worker.bytes.memory + ROUNDED
        assert worker.max_batch is not None
        assert worker.max_batch >= worker.micro_batch
    planner = Planner(given, profiles)
    assert "checked" in planner.check()
    assert planner.explain().seconds_saved_per_gib["g0"] > 0


def test_too_many_micro_batches_to_try_are_refused() -> None:
    workers = [InParts(Line(1.0, 1.0), 0.0, 4096, 1, 4096, 1, 1, 1.0)] * 2
    with pytest.raises(InputError, match=r"max_accumulation.*sizes and batches"):
        at_once_within(workers, 1 << 20, 1e9)
    many = [InParts(Line(1.0, 1.0), 0.0, 8, 1, 512, 1, 1, 1.0)] * 64
    with pytest.raises(InputError, match=r"max_accumulation.*batches and sums"):
        at_once_within(many, 1 << 14, 1e9)


def test_forecasts_have_the_ring_of_the_shares_and_sizes_to_measure_do_not() -> None:
    profiles = [profile(0.001, 24), profile(0.003, 12)]
    given = cluster(8, 2)
    noisy = msgspec.structs.replace(given, job=Job(global_batch=8, quantile=0.9))
    made = make_plan(noisy, profiles)
    assert made.noise is not None
    assert made.noise.robust.seconds == pytest.approx(made.iteration_seconds)
    assert made.iteration_seconds == pytest.approx(make_plan(given, profiles).iteration_seconds)
    assert Planner(given, profiles).next_sizes().may_win == 0  # of profiles with one batch
    points = [Point(batch=b, seconds=1.0) for b in (1, 8)]
    apart = [msgspec.structs.replace(one, points=points) for one in profiles]
    wins = [one.why for one in Planner(given, apart).next_sizes().sizes if "may save" in one.why]
    assert wins
    assert not any("-" in why for why in wins)


def test_a_deadline_that_cannot_be_kept_is_no_matter_of_memory() -> None:
    given = cluster(8, 2, price_per_hour=1.0)
    job = Job(global_batch=8, target=1e9, deadline_hours=0.001)
    with pytest.raises(Infeasible, match="deadline_hours") as refusal:
        make_plan(msgspec.structs.replace(given, job=job), [profile(0.001, 24), profile(0.003, 12)])
    assert "GiB" not in str(refusal.value)
