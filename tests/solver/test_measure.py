"""Which sizes to measure next: measured one after another, no split can win more than 1 % in the end."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from planning_tools import profile

from pyps.formats import Cluster, Job, Point, Profile, WorkerGroup
from pyps.profiler.curve import select_fit
from pyps.profiler.multiples import shown_multiple
from pyps.solver.plan import make_plan
from pyps.solver.report.measure import WORTH, measured_for, next_sizes

LARGEST = 256
TRUE = {
    "tail": lambda b: 0.004 + 3e-4 * b + 5e-4 * max(0, b - 100),
    "line": lambda b: 0.010 + 8e-4 * b,
}


def measured(name: str, batches: list[int]) -> Profile:
    points = [Point(batch=b, seconds=float(TRUE[name](b))) for b in sorted(set(batches))]
    made = profile(1e-3, 0.0, LARGEST)
    return msgspec.structs.replace(made, points=points, fit=select_fit(points))


def cluster_of(names: list[str], total: int) -> Cluster:
    groups = [WorkerGroup(name=name, profile=f"{name}.json") for name in names]
    return Cluster(job=Job(global_batch=total), worker=groups)


def best_split(total: int) -> float:
    """The least seconds of an iteration over all splits, by the true times."""
    return min(
        max(TRUE["tail"](b) if b else 0.0, TRUE["line"](total - b) if total > b else 0.0)
        for b in range(total - LARGEST, LARGEST + 1)
        if 0 <= total - b <= LARGEST
    )


@pytest.mark.parametrize("total", [180, 300])
def test_it_ends_with_a_plan_that_no_split_beats(total: int) -> None:
    cluster = cluster_of(["tail", "line"], total)
    sizes = {"tail": [1, 16, 256], "line": [1, 16, 256]}
    for _ in range(12):
        profiles = [measured(name, batches) for name, batches in sizes.items()]
        found = next_sizes(cluster, profiles)
        wanted = [one for one in found.sizes if "multiples" not in one.why]
        if not wanted:
            break
        for one in wanted:
            assert one.batch not in sizes[one.group]
            sizes[one.group].append(one.batch)
    assert found.may_win <= WORTH
    plan = make_plan(cluster, profiles)
    true = max(TRUE[w.name](w.batch) for w in plan.workers if w.batch)
    assert true <= best_split(total) * (1 + 2 * WORTH)
    assert max(map(len, sizes.values())) < 12


@pytest.mark.parametrize("multiple", [8, 16, 32])
def test_a_multiple_is_noticed_and_none_is_invented(multiple: int) -> None:
    def device(batches: list[int], true: int, noise: float = 0.0) -> Profile:
        luck = np.random.default_rng(1)
        points = [
            Point(
                batch=b,
                seconds=(0.01 + 1e-3 * b)
                * (1.0 if b % true == 0 else 1.3)
                * math.exp(noise * luck.standard_normal()),
            )
            for b in batches
        ]
        return msgspec.structs.replace(profile(1e-3, 0.01, LARGEST), points=points, fit=select_fit(points))

    sizes = [8, 16, 32, 40, 48, 64, 80, 96, 129, 160, 192, 200, 256]
    assert shown_multiple(device(sizes, multiple)) == multiple
    assert shown_multiple(device(sizes, 1, 0.01)) is None
    only = device([8, 16, 32, 64, 128, 256], 8)
    cluster = cluster_of(["line"], 100)
    named = next_sizes(cluster, [only]).sizes
    assert any(one.batch % 2 == 1 for one in named)
    proposed = next_sizes(cluster, [device(sizes, multiple)])
    assert proposed.multiples == {"line": multiple}


def test_a_device_is_measured_until_nothing_more_of_it_can_win() -> None:
    cluster = cluster_of(["tail", "line"], 300)
    asked: list[list[int]] = []

    def measure(known: Profile, sizes: list[int]) -> Profile:
        asked.append(sizes)
        return measured("tail", [*(point.batch for point in known.points), *sizes])

    start = [measured("tail", [1, 15, 256]), measured("line", [1, 15, 32, 64, 100, 160, 200, 256])]
    profiles, left = measured_for(cluster, start, "tail.json", measure)
    assert asked
    assert len({size for sizes in asked for size in sizes}) == sum(map(len, asked))
    assert profiles[1] is start[1]
    assert not [one for one in left.sizes if one.profile == "tail.json"]
    plan = make_plan(cluster, profiles)
    true = max(TRUE[w.name](w.batch) for w in plan.workers if w.batch)
    assert true <= best_split(300) * (1 + 2 * WORTH)


def test_sizes_to_measure_are_samples_also_of_a_plan_in_tokens() -> None:
    names, each = ["tail", "line"], 8
    profiles = [measured(name, [1, 16, 256]) for name in names]
    in_samples, plain = next_sizes(cluster_of(names, 300), profiles), cluster_of(names, 300 * each)
    cluster = msgspec.structs.replace(plain, job=Job(global_batch=300 * each, unit="tokens"))
    model = msgspec.structs.replace(profiles[0].model, tokens_per_sample=each)
    in_tokens = next_sizes(cluster, [msgspec.structs.replace(one, model=model) for one in profiles])
    assert in_samples.sizes
    assert [one.batch for one in in_tokens.sizes] == [one.batch for one in in_samples.sizes]
