"""The cheapest workers by a deadline, the fastest within a budget, and preemptions: against all sets."""

from __future__ import annotations

import itertools
import math
import re

import msgspec
import numpy as np
import pytest
from planning_tools import profile
from sampled import sampled

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Profile, check_cluster
from pyps.formats.cluster import Spot
from pyps.solver.jobs.spot import HOUR, Delays, lost_to_preemptions
from pyps.solver.plan import make_plan

TARGET = 1e6
STEP = 2e-4  # relative: two steps in price of the front


def random_case(seed: int) -> tuple[Cluster, list[Profile]]:
    luck = np.random.default_rng(seed)
    groups, profiles = [], []
    for k in range(3):
        most = int(luck.integers(20, 60))
        profiles.append(profile(float(luck.uniform(1e-3, 5e-3)), float(luck.uniform(1e-3, 2e-2)), most))
        spot = float(luck.choice([0.0, 0.05, 0.6]))
        price = float(luck.uniform(0.3, 4.0))
        groups.append(
            {"name": f"g{k}", "profile": "p", "count": int(luck.integers(1, 3)), "price_per_hour": price}
            | {"preemptions_per_hour": spot}
        )
    tables = {
        "job": {"global_batch": int(luck.integers(10, 50)), "target": TARGET},
        "worker": groups,
        "spot": {"checkpoint_seconds": 60.0, "restart_seconds": 600.0},
    }
    return msgspec.convert(tables, Cluster), profiles


def every_set(cluster: Cluster, profiles: list[Profile]) -> list[tuple[float, float]]:
    """Hours and price of the target with each set of workers, all of them in use."""
    found = []
    for counts in itertools.product(*(range(group.count + 1) for group in cluster.worker)):
        groups = [
            msgspec.structs.replace(group, count=n, required=True)
            for group, n in zip(cluster.worker, counts, strict=True)
            if n
        ]
        given = [one for one, n in zip(profiles, counts, strict=True) if n]
        if not groups or sum(counts) > cluster.job.global_batch:
            continue
        try:
            plan = make_plan(msgspec.structs.replace(cluster, worker=groups), given)
        except Infeasible:
            continue
        assert plan.target is not None
        found.append((plan.target.seconds / 3600, plan.target.price or 0.0))
    return found


def bounded(cluster: Cluster, **bounds: float) -> Cluster:
    return msgspec.structs.replace(cluster, job=msgspec.structs.replace(cluster.job, **bounds))


@pytest.mark.parametrize("seed", sampled(range(12), *range(6)))
def test_no_set_is_cheaper_by_the_deadline_or_faster_within_the_budget(seed: int) -> None:
    cluster, profiles = random_case(seed)
    known = every_set(cluster, profiles)
    hours, prices = (sorted(column) for column in zip(*known, strict=True))
    for deadline in (hours[0] * 1.0001, hours[len(hours) // 2], 2 * hours[-1]):
        plan = make_plan(bounded(cluster, deadline_hours=deadline), profiles)
        best = min(price for time, price in known if time <= deadline * (1 + 1e-9))
        assert plan.target is not None
        assert plan.target.seconds <= deadline * 3600 * (1 + 1e-9)
        assert plan.target.price == pytest.approx(best, rel=STEP)
    for budget in (prices[0] * 1.001, prices[len(prices) // 2], 2 * prices[-1]):
        plan = make_plan(bounded(cluster, budget=budget), profiles)
        best = min(time for time, price in known if price <= budget * (1 + 1e-9))
        assert plan.target is not None
        assert (plan.target.price or 0.0) <= budget * (1 + 1e-9)
        assert plan.target.seconds / 3600 == pytest.approx(best, rel=STEP)


def test_what_cannot_be_kept_is_said_with_what_can() -> None:
    cluster, profiles = random_case(3)
    hours = min(time for time, _ in every_set(cluster, profiles))
    with pytest.raises(Infeasible, match=r"job\.deadline_hours") as refused:
        make_plan(bounded(cluster, deadline_hours=hours / 2), profiles)
    named = float(refused.value.nearest.rpartition(" ")[2])
    assert hours <= named <= hours * 1.002
    assert make_plan(bounded(cluster, deadline_hours=named), profiles).target
    with pytest.raises(Infeasible, match=r"job\.budget"):
        make_plan(bounded(cluster, budget=1e-6), profiles)
    plain = msgspec.structs.replace(cluster, job=msgspec.structs.replace(cluster.job, target=None))
    with pytest.raises(InputError, match=r"job\.target"):
        check_cluster("c.toml", bounded(plain, budget=1.0))


def test_where_neither_bound_can_be_kept_both_changes_are_said() -> None:
    cluster, profiles = random_case(3)
    hours, prices = zip(*every_set(cluster, profiles), strict=True)
    with pytest.raises(Infeasible) as refused:
        make_plan(bounded(cluster, deadline_hours=min(hours) / 2, budget=min(prices) / 2), profiles)
    ways = re.findall(r"job\.deadline_hours to (\S+) and job\.budget to (\S+)", refused.value.nearest)
    assert ways
    for deadline, budget in ways:
        changed = bounded(cluster, deadline_hours=float(deadline), budget=float(budget))
        assert make_plan(changed, profiles).target


def test_what_preemptions_cost() -> None:
    """Against the formula of Daly for intervals all around the best one."""
    spot = Spot(checkpoint_seconds=40.0, restart_seconds=300.0)
    assert lost_to_preemptions(0.0, spot) == (1.0, math.inf)
    for per_hour in (0.01, 0.5, 6.0):
        lost, every = lost_to_preemptions(per_hour, spot)
        assert every is not None
        rate = per_hour / 3600

        def took(interval: float, rate: float = rate) -> float:
            wait = math.exp(rate * spot.restart_seconds)
            return wait * math.expm1(rate * (interval + spot.checkpoint_seconds)) / (rate * interval)

        assert took(every) == pytest.approx(lost, rel=1e-6)
        assert min(took(every * factor) for factor in (0.5, 0.9, 1.1, 2.0)) >= lost


def test_a_job_that_is_seldom_preempted_ends_by_its_deadline_as_often_as_said() -> None:
    """One delay is a restart and a uniform part of an interval; with a probability of 0.86 there is none."""
    spot = Spot(checkpoint_seconds=9, restart_seconds=400)
    work, per_hour = 15 * HOUR, 0.01
    delays, every = Delays.of(work, per_hour, 0.0, spot), float(lost_to_preemptions(per_hour, spot)[1])
    none = math.exp(-per_hour / HOUR * float(delays.least))
    part = (0.95 - none) / (1 - none)
    assert float(delays.by(0.95) - delays.least) == pytest.approx(400 + part * every, rel=0.15)
    assert float(delays.by(0.8)) == float(delays.least) + 9, "the checkpoint at the end"
    for confidence in (0.9, 0.95, 0.99):
        assert delays.chance(float(delays.by(confidence))) == pytest.approx(confidence)
