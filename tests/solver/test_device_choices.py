"""Groups that share devices, and energy in the price: against the enumeration of every set of workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from planning_tools import profile

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Job, Profile, WorkerGroup
from pyps.formats.cluster import Shared, check_cluster
from pyps.solver import Costs, Line, Problem, solve
from pyps.solver.plan import make_plan

HOUR, TARGET = 3600.0, 1e8
FRONT = 1e-4  # relative: the steps in price of a Pareto front


def random_case(seed: int) -> tuple[Cluster, list[Profile]]:
    """Two pools of devices: in each, one group per device, one at a power cap, and one of pairs."""
    luck = np.random.default_rng(seed)
    groups, profiles = [], []
    for pool in ("a", "b"):
        slope, fixed, watts = luck.uniform(1e-3, 4e-3), luck.uniform(0.001, 0.02), luck.uniform(150, 400)
        count = int(luck.integers(1, 4))
        slower, less = luck.uniform(1.02, 1.5), luck.uniform(0.4, 0.9)
        for name, times, power, devices in (
            ("full", 1.0, 1.0, 1),
            ("capped", slower, less, 1),
            ("pair", luck.uniform(0.45, 0.7), 1.0, 2),
        ):
            most = int(luck.choice([40, 80])) * devices
            profiles.append(profile(slope * times, fixed * times, most))
            groups.append(
                WorkerGroup(
                    name=f"{pool}-{name}",
                    profile="p.json",
                    count=max(1, count // devices),
                    devices=devices,
                    watts=watts * power,
                    shares=[pool],
                )
            )
    sizes = {pool: sum(g.count for g in groups if g.name == f"{pool}-full") for pool in ("a", "b")}
    shared = [Shared(name=pool, devices=size) for pool, size in sizes.items()]
    total = int(luck.integers(20, 35 * sum(sizes.values())))
    return Cluster(job=Job(global_batch=total), worker=groups, shared=shared), profiles


def sets_of(cluster: Cluster, profiles: list[Profile]) -> Iterator[tuple[float, float]]:
    """Return seconds of an iteration and watts, for each number of workers that devices allow, by group."""
    of_pool = {one.name: one.devices for one in cluster.shared}
    for counts in itertools.product(*[range(group.count + 1) for group in cluster.worker]):
        taken = dict.fromkeys(of_pool, 0)
        for group, count in zip(cluster.worker, counts, strict=True):
            taken[group.shares[0]] += group.devices * count
        if any(taken[pool] > (most or 0) for pool, most in of_pool.items()) or not sum(counts):
            continue
        costs, most, watts = [], [], 0.0
        for group, one, count in zip(cluster.worker, profiles, counts, strict=True):
            assert one.fit is not None
            assert one.max_batch is not None
            costs += [Line(one.fit.fixed_seconds, one.fit.per_sample_seconds)] * count
            most += [one.max_batch] * count
            watts += (group.watts or 0.0) * group.devices * count
        required = [True] * len(costs)
        try:
            problem = Problem.of(
                Costs.stack(costs), cluster.job.global_batch, max_batch=most, required=required
            )
            yield solve(problem).iteration_seconds, watts
        except Infeasible:
            continue


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.thorough)])
def test_choices_are_the_best_of_all_sets(seeds: range) -> None:
    refused = 0
    for seed in seeds:
        cluster, profiles = random_case(seed)
        all_sets = list(sets_of(cluster, profiles))
        if not all_sets:
            refused += 1
            with pytest.raises(Infeasible):
                make_plan(cluster, profiles)
            continue
        fastest = min(seconds for seconds, _ in all_sets)
        plan = make_plan(cluster, profiles)
        assert plan.iteration_seconds == pytest.approx(fastest, rel=1e-9)
        steps = TARGET / cluster.job.global_batch
        deadline = 1.3 * fastest * steps / HOUR
        job = msgspec.structs.replace(cluster.job, target=TARGET, deadline_hours=deadline, price_per_kwh=0.25)
        least = min(
            0.25 * watts / 1000 * seconds * steps / HOUR
            for seconds, watts in all_sets
            if seconds * steps / HOUR <= deadline * (1 + 1e-9)
        )
        frugal = make_plan(msgspec.structs.replace(cluster, job=job), profiles)
        assert frugal.target is not None
        assert frugal.target.price is not None
        assert frugal.target.seconds <= deadline * HOUR * (1 + 1e-9)
        assert least * (1 - 1e-9) <= frugal.target.price <= least * (1 + FRONT)
    assert refused < len(seeds) / 4


def test_a_power_limit_holds_for_the_devices_in_use() -> None:
    """300 W are enough for one of the two devices, or for both at a cap."""
    profiles = [profile(1e-3, 0.001, 100), profile(1.3e-3, 0.001, 100)]
    groups = [
        WorkerGroup(name=name, profile="p", count=2, watts=watts, shares=["gpus"])
        for name, watts in (("full", 250.0), ("capped", 150.0))
    ]
    cluster = msgspec.convert(
        {"job": {"global_batch": 80}, "limits": {"watts": 300}, "shared": [{"name": "gpus", "devices": 2}]}
        | {"worker": [msgspec.to_builtins(group) for group in groups]},
        Cluster,
    )
    plan = make_plan(cluster, profiles)
    assert [worker.batch for worker in plan.workers] == [0, 0, 40, 40]
    assert plan.cost is not None
    assert plan.cost.watts == 300


def test_a_refusal_names_the_devices() -> None:
    profiles = [profile(1e-3, 0.001, 10)]
    cluster = Cluster(
        job=Job(global_batch=30),
        worker=[WorkerGroup(name="w", profile="p", count=4, shares=["gpus"])],
        shared=[Shared(name="gpus", devices=2)],
    )
    with pytest.raises(Infeasible, match=r"raise shared\.gpus\.devices from 2 to 3"):
        make_plan(cluster, profiles)


def test_energy_needs_the_watts_of_every_group() -> None:
    job = Job(global_batch=30, price_per_kwh=0.3)
    cluster = Cluster(job=job, worker=[WorkerGroup(name="w", profile="p")])
    with pytest.raises(InputError, match=r"worker\[0\].watts"):
        check_cluster("c.toml", cluster)
    priced = WorkerGroup(name="w", profile="p", watts=200.0, price_per_hour=1.0)
    plan = make_plan(msgspec.structs.replace(cluster, worker=[priced]), [profile(1e-3, 0.001, 64)])
    assert plan.cost is not None
    assert plan.cost.price_per_hour == pytest.approx(1.0 + 0.2 * 0.3)
    assert math.isclose(plan.cost.watts or 0.0, 200.0)


@pytest.mark.parametrize(
    ("key", "table"), [("sharding", {"sharding": {"stage": 1}}), ("run", {"run": {"local_steps": 4}})]
)
def test_what_counts_every_worker_is_refused(key: str, table: dict[str, object]) -> None:
    groups = [{"name": name, "profile": "p", "shares": ["gpus"]} for name in ("full", "capped")]
    text = {"job": {"global_batch": 8}, "worker": groups, "shared": [{"name": "gpus", "devices": 1}]}
    check_cluster("c.toml", msgspec.convert(text, Cluster))
    with pytest.raises(InputError, match=rf"{key}.*shared\[0\]\.devices"):
        check_cluster("c.toml", msgspec.convert(text | table, Cluster))
