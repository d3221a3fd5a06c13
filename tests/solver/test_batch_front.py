"""The front over global batches and workers: as good, to within its gap, as every choice there is."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from planning_tools import profile

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, GoodputInfo, Job, WorkerGroup
from pyps.solver import Costs, Line, Problem, solve
from pyps.solver.auto_batch import NEXT, front_over_batches
from pyps.solver.ranks import needs, planned_ranks

BASE = 8


def random_cluster(seed: int) -> tuple[Cluster, list[Line], list[int]]:
    luck = np.random.default_rng(seed)
    lines = [Line(luck.uniform(0.001, 0.02), luck.uniform(1e-3, 4e-3)) for _ in range(3)]
    most = luck.choice([16, 24], 3).tolist()
    groups = [
        WorkerGroup(name=f"g{k}", profile="p", count=n, price_per_hour=float(luck.uniform(0.5, 3)))
        for k, n in enumerate((1, 2, 1))
    ]
    info = GoodputInfo(noise_scale=float(luck.choice([10.0, 60.0, 1000.0])), base_batch=BASE)
    return Cluster(job=Job(global_batch=1), worker=groups, goodput=info), lines, most


@pytest.mark.parametrize("seed", range(2))
def test_every_choice_is_matched_to_within_the_gap(seed: int) -> None:
    cluster, lines, most = random_cluster(seed)
    profiles = [profile(c.per_sample_seconds, c.fixed_seconds, m) for c, m in zip(lines, most, strict=True)]
    ranks = planned_ranks(cluster, profiles)
    price = needs(ranks, "price_per_hour")
    assert price is not None
    front = front_over_batches(cluster, ranks, price)
    assert cluster.goodput is not None
    phi = cluster.goodput.noise_scale
    assert phi is not None
    place = [0, 1, 1, 2]
    for used in itertools.product([False, True], repeat=4):
        chosen = [k for k, on in zip(place, used, strict=True) if on]
        for batch in range(max(1, len(chosen)), sum(most[k] for k in chosen) + 1, 3):
            problem = Problem.of(
                Costs.stack([lines[k] for k in chosen]),
                batch,
                max_batch=[most[k] for k in chosen],
                required=[True] * len(chosen),
            )
            useful = batch * (phi + BASE) / (phi + batch) / solve(problem).iteration_seconds
            seconds = 1e6 / useful
            paid = seconds / 3600 * float(price[np.array(used)].sum())
            assert any(
                one.seconds_per_million <= seconds * NEXT and one.price_per_million <= paid * NEXT
                for one in front
            )
    for one in front:
        batches = one.point.solution.batches
        assert batches.sum() == one.global_batch
        slowest = max(lines[place[k]].seconds(int(b)) for k, b in enumerate(batches) if b)
        assert one.point.solution.iteration_seconds == pytest.approx(slowest)
    pairs = [(one.seconds_per_million, one.price_per_million) for one in front]
    assert pairs == sorted(pairs)
    assert all(a > b for (_, a), (_, b) in itertools.pairwise(pairs))


def test_what_it_needs() -> None:
    cluster, lines, most = random_cluster(0)
    profiles = [profile(c.per_sample_seconds, c.fixed_seconds, m) for c, m in zip(lines, most, strict=True)]
    ranks = planned_ranks(cluster, profiles)
    price = np.ones(len(ranks))
    with pytest.raises(InputError, match="noise_scale and base_batch"):
        front_over_batches(msgspec.structs.replace(cluster, goodput=None), ranks, price)
    dear = msgspec.convert(msgspec.to_builtins(cluster) | {"limits": {"price_per_hour": 1e-6}}, Cluster)
    with pytest.raises(Infeasible, match="no global batch up to"):
        front_over_batches(dear, planned_ranks(dear, profiles), price)
