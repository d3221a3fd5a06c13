"""Nodes, tensor groups, shards and tokens: plans equal to brute force, and what they need in one message."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from sampled import sampled

from pyps.errors import Infeasible, InputError
from pyps.formats import (
    Cluster,
    Device,
    Fit,
    GoodputInfo,
    Job,
    Limits,
    Memory,
    ModelInfo,
    Plan,
    Point,
    Profile,
    Sharding,
    SyncCost,
    WorkerGroup,
    check_cluster,
)
from pyps.formats.plan import check_plan
from pyps.solver.auto_batch import best_global_batch
from pyps.solver.costs import cost_of
from pyps.solver.plan import make_plan
from pyps.solver.ranks import max_batch_of, planned_ranks

PARAMETERS = 1_000_000


AMPLE = Memory(fixed_bytes=100, bytes_per_sample=10.0, budget_bytes=10**12)


def profile(a: float, c: float = 0.01, **changes: Any) -> Profile:
    fit = Fit(
        kind="affine", fixed_seconds=c, per_sample_seconds=a, trusted_min_batch=1, trusted_max_batch=4096
    )
    model = ModelInfo(name="mlp", parameters=PARAMETERS, optimizer="AdamW")
    points = [Point(batch=1, seconds=1.0)]
    base = Profile(device=Device(name="d"), model=model, points=points, fit=fit)
    return msgspec.structs.replace(base, **changes)


def cluster(B: int, *groups: WorkerGroup, **more: Any) -> Cluster:
    whole = Cluster(job=Job(global_batch=B, unit=more.pop("unit", "samples")), worker=list(groups), **more)
    check_cluster("cluster.toml", whole)
    return whole


def node(name: str, devices: int, **more: Any) -> WorkerGroup:
    given = {"bandwidth": 1e8, "latency": 1e-4, "inside_bandwidth": 1e9, "inside_latency": 1e-5, **more}
    return WorkerGroup(name=name, profile="p.json", devices=devices, parallel="data", **given)


RING = SyncCost(kind="ring")


def ring(ranks: int, latency: float, seconds: float, passes: int = 2) -> float:
    return passes * (ranks - 1) * (latency + seconds / ranks)


@pytest.mark.parametrize("seed", sampled(range(20), *range(6)))
def test_nodes_are_planned_as_by_brute_force(seed: int) -> None:
    """Every choice of nodes and of an equal batch for the devices of each."""
    luck = np.random.default_rng(seed)
    B = int(luck.integers(8, 30))
    nodes = [
        node(
            f"n{k}",
            int(luck.choice([1, 2, 4])),
            bandwidth=float(luck.choice([4e7, 4e8])),
            inside_bandwidth=float(luck.choice([1e8, 1e9])),
            max_batch=int(luck.choice([4, 8])),
            required=bool(luck.random() < 0.2),
        )
        for k in range(3)
    ]
    profiles = [profile(float(luck.uniform(0.001, 0.02)), float(luck.uniform(0.0, 0.05))) for _ in nodes]
    best = math.inf
    for batches in itertools.product(*(range(int(n.max_batch or 0) + 1) for n in nodes)):
        used = [k for k, b in enumerate(batches) if b]
        if sum(b * n.devices for b, n in zip(batches, nodes, strict=True)) != B:
            continue
        if any(n.required and not b for n, b in zip(nodes, batches, strict=True)):
            continue
        slowest, across = 0.0, 0.0
        for k in used:
            fit, size = profiles[k].fit, 4 * PARAMETERS
            assert fit is not None
            inside = ring(nodes[k].devices, nodes[k].inside_latency, size / (nodes[k].inside_bandwidth or 1))
            slowest = max(slowest, cost_of(fit).seconds(batches[k]) + inside)
            across = max(across, ring(len(used), nodes[k].latency or 0.0, size / (nodes[k].bandwidth or 1)))
        best = min(best, slowest + across)
    given = cluster(B, *nodes, sync=RING)
    if math.isinf(best):
        with pytest.raises(Infeasible):
            make_plan(given, profiles)
        return
    made = make_plan(given, profiles)
    check_plan("plan.json", made)
    assert made.iteration_seconds == pytest.approx(best, rel=1e-12)
    assert [w.name for w in made.workers] == [name for n in nodes for name in n.worker_names()]
    for n in nodes:
        mine = [w.batch for w in made.workers if w.name in n.worker_names()]
        assert len(set(mine)) == 1


def test_a_node_costs_what_its_devices_cost() -> None:
    given = cluster(64, node("a", 4, price_per_hour=2.0, watts=100.0), sync=RING)
    cost = make_plan(given, [profile(0.001)]).cost
    assert cost is not None
    assert (cost.price_per_hour, cost.watts) == (8.0, 400.0)


def test_a_tensor_group_is_one_rank_with_one_batch_and_the_price_of_its_devices() -> None:
    group = WorkerGroup(name="tp", profile="p.json", count=2, devices=4, price_per_hour=2.0)
    made = make_plan(cluster(64, group), [profile(0.001)])
    assert [w.batch for w in made.workers] == [32, 32]
    assert made.cost is not None
    assert made.cost.price_per_hour == 16.0


def test_a_node_runs_as_many_micro_batches_as_its_devices_need() -> None:
    given = cluster(24, node("a", 2, max_batch=5, max_accumulation=3), sync=SyncCost(kind="none"))
    made = make_plan(given, [profile(0.001)])
    assert [(w.batch, w.micro_batch, w.accumulation) for w in made.workers] == [(12, 5, 3)] * 2


def memory_of(made: Plan) -> int:
    memory = made.workers[0].memory
    assert memory is not None
    return memory.fixed_bytes


@pytest.mark.parametrize(
    ("stage", "replicas", "each"), [(1, 1, 8), (2, 1, 12), (3, 1, 16), (3, 2, 16), (1, 4, 8)]
)
def test_a_shard_holds_its_part_of_the_state(stage: Any, replicas: int, each: int) -> None:
    memory = Memory(fixed_bytes=20 * PARAMETERS, bytes_per_sample=PARAMETERS, budget_bytes=30 * PARAMETERS)
    group = WorkerGroup(name="a", profile="p.json", count=4, bandwidth=1e9)
    sharding = Sharding(stage=stage, replicas=replicas, whole=0.0)
    made = make_plan(cluster(32, group, sync=RING, sharding=sharding), [profile(0.001, memory=memory)])
    saved = int(PARAMETERS * each * (1 - replicas / 4))
    assert memory_of(made) == 20 * PARAMETERS - saved
    assert made.workers[0].max_batch == (30 * PARAMETERS - memory_of(made)) // PARAMETERS
    assert all(w.required for w in made.workers)
    full = profile(0.001, memory=memory, max_batch=10)  # the largest that was measured: all that memory holds
    again = make_plan(cluster(32, group, sync=RING, sharding=sharding), [full])
    assert again.workers[0].max_batch == made.workers[0].max_batch


def test_what_stage_3_holds_whole_is_not_saved() -> None:
    memory = Memory(fixed_bytes=20 * PARAMETERS, bytes_per_sample=1.0, budget_bytes=30 * PARAMETERS)
    group = WorkerGroup(name="a", profile="p.json", count=2, bandwidth=1e9)
    sharding = Sharding(stage=3, whole=0.25, optimizer_bytes=0)
    made = make_plan(cluster(32, group, sync=RING, sharding=sharding), [profile(0.001, memory=memory)])
    assert memory_of(made) == 20 * PARAMETERS - int(0.5 * (8 - 0.25 * 8) * PARAMETERS)


@pytest.mark.parametrize(
    ("stage", "replicas", "seconds"),
    [
        (1, 1, ring(4, 1e-4, 0.004, passes=3)),  # DDP's all-reduce, and a gather of what owners stepped
        (2, 1, ring(4, 1e-4, 0.004)),
        (3, 1, ring(4, 1e-4, 0.004, passes=3)),
        (3, 2, ring(2, 1e-4, 0.004, passes=3) + ring(2, 1e-4, 0.002)),
        (3, 4, ring(4, 1e-4, 0.004)),  # each rank has the whole model: an all-reduce
    ],
)
def test_a_sharded_model_travels_so_often(stage: Any, replicas: int, seconds: float) -> None:
    group = WorkerGroup(name="a", profile="p.json", count=4, bandwidth=1e9, latency=1e-4)
    sharding = Sharding(stage=stage, replicas=replicas)
    made = make_plan(cluster(32, group, sync=RING, sharding=sharding), [profile(0.001, memory=AMPLE)])
    assert made.sync is not None
    assert made.sync.seconds == pytest.approx(seconds)


def test_shards_within_a_node_travel_inside_it() -> None:
    given = cluster(32, node("a", 4, count=2), sync=RING, sharding=Sharding(stage=3))
    made = make_plan(given, [profile(0.001, 0.0, memory=AMPLE)])
    inside = ring(4, 1e-5, 0.004, passes=3)
    assert made.workers[0].link_seconds == pytest.approx(inside)
    assert made.sync is not None
    assert made.sync.seconds == pytest.approx(ring(2, 1e-4, 0.04))
    assert made.iteration_seconds == pytest.approx(0.004 + inside + made.sync.seconds)


def test_a_plan_in_tokens_is_that_in_samples() -> None:
    memory = Memory(fixed_bytes=100, bytes_per_sample=10.0, budget_bytes=399)  # 29 samples
    long = profile(0.001, memory=memory)
    long = msgspec.structs.replace(long, model=msgspec.structs.replace(long.model, tokens_per_sample=128))
    short = msgspec.structs.replace(long, memory=None, max_batch=64)
    groups = [WorkerGroup(name=n, profile="p.json", max_accumulation=3) for n in ("a", "b")]
    tokens = make_plan(cluster(128 * 96, *groups, unit="tokens"), [long, short])
    samples = make_plan(cluster(96, *groups), [long, short])
    assert [w.batch for w in tokens.workers] == [128 * w.batch for w in samples.workers]
    assert [w.micro_batch for w in tokens.workers] == [128 * w.micro_batch for w in samples.workers]
    assert tokens.iteration_seconds == pytest.approx(samples.iteration_seconds)
    assert tokens.unit == "tokens"
    with pytest.raises(InputError, match="tokens_per_sample"):
        make_plan(cluster(128, groups[0], unit="tokens"), [profile(0.001)])


def test_a_micro_batch_below_the_cap_where_its_samples_are_faster() -> None:
    """Beyond 64 samples the device is short of memory bandwidth."""
    table = [(16, 0.020), (64, 0.064), (128, 0.200)]
    fit = Fit(kind="table", table=table, trusted_min_batch=16, trusted_max_batch=128)
    group = WorkerGroup(name="a", profile="p.json", max_batch=128, max_accumulation=4)
    made = make_plan(cluster(256, group), [profile(0.0, fit=fit)])
    assert (made.workers[0].micro_batch, made.workers[0].accumulation) == (64, 4)
    assert made.iteration_seconds == pytest.approx(0.256)
    full = make_plan(cluster(512, group), [profile(0.0, fit=fit)])  # four micro-batches have to suffice
    assert full.workers[0].micro_batch == 128


def test_time_and_price_to_a_target() -> None:
    group = WorkerGroup(name="a", profile="p.json", count=2, price_per_hour=3.0)
    given = cluster(64, group)
    given = msgspec.structs.replace(given, job=msgspec.structs.replace(given.job, target=64_000.0))
    made = make_plan(given, [profile(0.001)])
    assert made.target is not None
    assert made.target.seconds == pytest.approx(1000 * made.iteration_seconds)
    assert made.target.price == pytest.approx(6 * made.target.seconds / 3600)


@pytest.mark.parametrize(
    ("groups", "more", "field"),
    [
        ([node("a", 2)], {}, "sync"),
        ([node("a", 2, inside_bandwidth=None)], {"sync": RING}, "inside_bandwidth"),
        ([WorkerGroup(name="a", profile="p", inside_bandwidth=1.0)], {"sync": RING}, "inside_bandwidth"),
        ([node("a", 10_000, max_batch=10**6)], {"sync": RING}, "max_batch"),
        ([node("a", 2), node("b", 4)], {"sync": RING, "sharding": Sharding(stage=3)}, "sharding"),
        ([node("a", 2)], {"sync": RING, "sharding": Sharding(stage=3, replicas=2)}, "replicas"),
        (
            [WorkerGroup(name="a", profile="p", count=3)],
            {"sync": RING, "sharding": Sharding(stage=3, replicas=2)},
            "replicas",
        ),
        (
            [WorkerGroup(name="a", profile="p")],
            {"sync": SyncCost(kind="tree"), "sharding": Sharding(stage=1)},
            "sync.kind",
        ),
        ([node("a", 10_000, count=11)], {"sync": RING}, "count"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    groups: list[WorkerGroup], more: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError, match=field):
        cluster(64, *groups, **more)


def test_an_optimizer_of_unknown_state_has_to_be_stated() -> None:
    memory = Memory(fixed_bytes=20 * PARAMETERS, bytes_per_sample=1.0, budget_bytes=30 * PARAMETERS)
    odd = profile(0.001, memory=memory)
    odd = msgspec.structs.replace(odd, model=msgspec.structs.replace(odd.model, optimizer="Sophia"))
    group = WorkerGroup(name="a", profile="p.json", count=2, bandwidth=1e9)
    given = cluster(32, group, sync=RING, sharding=Sharding(stage=1))
    with pytest.raises(InputError, match="optimizer_bytes"):
        planned_ranks(given, [odd])
    assert max_batch_of(group, odd) > 0


@pytest.mark.parametrize("budget", [0.28, 0.30, 0.4, 1.0])
def test_the_best_global_batch_within_a_price_is_that_of_brute_force(budget: float) -> None:
    groups = [
        WorkerGroup(name="a", profile="p.json", count=2, max_batch=40, price_per_hour=2.0),
        WorkerGroup(name="b", profile="p.json", max_batch=24, price_per_hour=0.5),
    ]
    profiles = [profile(0.0004, 0.004), profile(0.0018, 0.004)]
    more = {
        "limits": Limits(price_per_million_samples=budget),
        "goodput": GoodputInfo(noise_scale=60.0, base_batch=8),
    }
    best = 0.0
    for B in range(1, 105):
        with contextlib.suppress(Infeasible):
            made = make_plan(cluster(B, *groups, **more), profiles)
            assert made.goodput is not None
            best = max(best, made.goodput.goodput)
    given = cluster(1, *groups, **more)
    if not best:
        with pytest.raises(Infeasible, match="limits"):
            best_global_batch(given, planned_ranks(given, profiles))
        return
    found = best_global_batch(given, planned_ranks(given, profiles))
    made = make_plan(cluster(found, *groups, **more), profiles)
    assert made.goodput is not None
    assert made.goodput.goodput >= best * (1 - 1.1e-3)


def test_without_a_cost_of_synchronisation_a_node_needs_no_parameters() -> None:
    bare = profile(0.001)
    bare = msgspec.structs.replace(bare, model=ModelInfo(name="mlp"))
    made = make_plan(cluster(16, node("a", 4), sync=SyncCost(kind="none")), [bare])
    assert [(w.batch, w.link_seconds) for w in made.workers] == [(4, 0.0)] * 4
