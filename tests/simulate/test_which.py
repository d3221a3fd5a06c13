"""Ways to train, ranked: by pace where samples are the same, else as ranges, and after a pilot."""

from __future__ import annotations

import msgspec
import pytest

from pyps.errors import InputError
from pyps.formats import (
    Cluster,
    Device,
    GoodputInfo,
    Job,
    Memory,
    ModelInfo,
    Point,
    Profile,
    Sharding,
    WorkerGroup,
)
from pyps.profiler import select_fit
from pyps.simulate.which import Ranked, Ranking, after_pilot, ranked_ways

FAST_LINK, SLOW_LINK = 1e11, 2e7
PARAMETERS = 1_000_000
AMPLE = Memory(fixed_bytes=17 * PARAMETERS, bytes_per_sample=1e4, budget_bytes=10**9)
SLOWER = (1.0, 1.0, 4.0)


def profile(slower: float) -> Profile:
    points = [Point(batch=b, seconds=slower * (0.002 + 0.001 * b)) for b in (1, 8, 32, 96)]
    model = ModelInfo(name="m", parameters=PARAMETERS)
    return Profile(device=Device(name="d"), model=model, points=points, fit=select_fit(points))


PROFILES = [profile(slower) for slower in SLOWER]


def cluster(bandwidth: float | None, noise_scale: float | None = None) -> Cluster:
    groups = [
        WorkerGroup(name=f"w{k}", profile=f"w{k}.json", bandwidth=bandwidth, latency=1e-4)
        for k in range(len(SLOWER))
    ]
    goodput = GoodputInfo(noise_scale=noise_scale, base_batch=96) if noise_scale is not None else None
    return Cluster(job=Job(global_batch=96), worker=groups, goodput=goodput)


@pytest.fixture(scope="module")
def slow() -> Ranking:
    return ranked_ways(cluster(SLOW_LINK), PROFILES)


def named(ranking: Ranking) -> dict[str, Ranked]:
    return {one.name: one for one in ranking.ways}


def test_where_the_link_is_fast_planned_ranks_are_as_fast_as_any_way_with_the_same_samples() -> None:
    ways = named(ranked_ways(cluster(FAST_LINK), PROFILES))
    planned = ways["ddp, planned"].seconds_per_sample
    assert planned <= 1.01 * min(one.seconds_per_sample for one in ways.values() if one.kind == "store")
    equal = next(one for name, one in ways.items() if name.startswith("ddp, equal"))
    assert equal.workers == 2, "the slow device takes longer for a third than the others for a half"
    assert planned < 0.95 * equal.seconds_per_sample


def test_where_the_link_is_slow_ways_that_hide_or_avoid_transfers_lead(slow: Ranking) -> None:
    ways = named(slow)
    assert slow.ways[0].kind == "late", "of local steps most problems need many more samples"
    assert ways["hps"].seconds_per_sample < ways["bsp"].seconds_per_sample
    assert ways["local steps 8, int4"].seconds_per_sample < ways["bsp"].seconds_per_sample
    assert slow.level, "the ranges of local steps meet the leader's"
    assert any("pilot" in what for what in slow.measure)


def test_a_pilot_gives_each_way_the_same_time(slow: Ranking) -> None:
    ways = named(slow)
    seconds = [count * ways[name].seconds_per_sample for name, count in slow.pilot.items()]
    assert len(seconds) >= 2
    rounds = [96 * (way.run.local_steps or 1) if way.run else 96 for way in map(ways.get, slow.pilot) if way]
    longest = max(n * ways[name].seconds_per_sample for n, name in zip(rounds, slow.pilot, strict=True))
    assert max(seconds) - min(seconds) <= longest
    assert all(count % n == 0 for n, count in zip(rounds, slow.pilot.values(), strict=True))


def test_much_noise_makes_late_and_local_gradients_as_good(slow: Ranking) -> None:
    noisy = named(ranked_ways(cluster(SLOW_LINK, 1e6), PROFILES))
    assert noisy["local steps 8, int8"].samples.high < 1.01
    assert named(slow)["local steps 8, int8"].samples.high > 2
    assert "gradient noise" in noisy["asp"].samples.source


def test_a_way_that_may_not_arrive_says_so_unless_the_noise_is_known(slow: Ranking) -> None:
    for one in slow.ways:
        assert (
            ("never arrives" in one.why)
            == (one.samples.over > 0)
            == (one.kind == "local" or one.name == "hps")
        )
        if one.kind == "local":
            assert one.samples.low <= 1.2 < one.samples.high
    assert all(one.samples.over == 0 for one in ranked_ways(cluster(SLOW_LINK, 1e6), PROFILES).ways)


def test_unknown_links_are_said_and_leave_rings_out() -> None:
    ranking = ranked_ways(cluster(None), PROFILES)
    assert "links" in ranking.measure[0]
    assert all(one.kind != "ring" for one in ranking.ways)


def test_a_way_that_does_not_work_is_named_with_the_reason(slow: Ranking) -> None:
    none = [msgspec.structs.replace(one, model=ModelInfo(name="m")) for one in PROFILES]
    assert "parameters" in ranked_ways(cluster(SLOW_LINK), none).left_out["ddp, planned"]
    assert set(slow.left_out) <= {"fsdp2, planned"}


def test_after_a_pilot_another_way_must_be_clearly_better(slow: Ranking) -> None:
    local = "local steps 8, int8"
    assert [one.name for one in slow.ways if one.name in ("hps", "bsp")] == ["hps", "bsp"]
    assert after_pilot(slow, {"hps": 0.3108, "bsp": 0.3097}).name == "hps"
    assert after_pilot(slow, {"hps": 0.5, "bsp": 0.4, local: 0.39}).name == "bsp"
    assert after_pilot(slow, {"hps": 0.50, "bsp": 0.6, local: 0.40}).name == local
    assert after_pilot(slow, {"hps": 0.50, "bsp": 0.6, local: 0.499}).name == "hps"
    assert after_pilot(slow, {"hps": float("nan"), "bsp": 0.6, local: float("inf")}).name == "bsp"
    with pytest.raises(InputError, match=r"one of .*hps"):
        after_pilot(slow, {"hsp": 0.5})
    with pytest.raises(InputError, match="without local steps"):
        after_pilot(slow, {local: 0.5})


def test_a_cluster_in_tokens_is_refused() -> None:
    given = cluster(FAST_LINK)
    job = msgspec.structs.replace(given.job, unit="tokens")
    with pytest.raises(InputError, match="samples"):
        ranked_ways(msgspec.structs.replace(given, job=job), PROFILES)


def test_memory_by_card_makes_a_way_feasible() -> None:
    """Half of the model's state is more than the small card holds, and all of it more than either."""
    cards = []
    for budget, slower in ((13, 1.0), (9, 3.0)):
        memory = Memory(fixed_bytes=17 * PARAMETERS, bytes_per_sample=1e4, budget_bytes=budget * PARAMETERS)
        one = profile(slower)
        model = msgspec.structs.replace(one.model, optimizer="AdamW")
        cards.append(msgspec.structs.replace(one, memory=memory, model=model))
    given = msgspec.structs.replace(cluster(FAST_LINK), worker=cluster(FAST_LINK).worker[:2])
    found = ranked_ways(given, cards)
    assert [one.name for one in found.ways] == ["shards by memory, planned"]
    assert "no memory" in found.left_out["fsdp2, planned"]
    assert set(found.left_out) > {"ddp, planned", "bsp", "optimizer by memory, planned"}
    ample = [msgspec.structs.replace(one, memory=AMPLE) for one in cards]
    sharded = msgspec.structs.replace(given, sharding=Sharding(stage=1, shares="memory"))
    assert {"fsdp2, planned", "optimizer by memory, planned", "ddp, planned"} < set(
        named(ranked_ways(sharded, ample))
    )
