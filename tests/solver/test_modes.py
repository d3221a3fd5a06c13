"""Plans for a mode of running: exact by brute force, never slower than planning first and launching then."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planning_tools import PARAMETERS, profile
from sampled import examples

from pyps.errors import InputError
from pyps.formats import (
    Cluster,
    Mode,
    Pace,
    Plan,
    Profile,
    RunTable,
    encode,
)
from pyps.formats.mode import CODEC_BITS
from pyps.formats.options import MAX_DEPTH
from pyps.solver.constrained import evaluate, even_batches, iteration, paced_seconds
from pyps.solver.links import WIRE_BYTES
from pyps.solver.milp.checks import agreement
from pyps.solver.mode import mode_of
from pyps.solver.plan import make_plan
from pyps.solver.problem import planning_problem
from pyps.solver.ranks import planned_ranks
from pyps.store.policies import Policy, policy_named

MOVED = PARAMETERS
SAME = 1e-9  # relative
CLOSE = 1e-6  # relative: HiGHS' tolerance


def cluster_of(B: int, links: list[dict[str, Any]], **tables: Any) -> Cluster:
    workers = [{"name": f"w{k}", "profile": "p.json", **link} for k, link in enumerate(links)]
    return msgspec.convert({"job": {"global_batch": B}, "worker": workers, **tables}, Cluster)


def planned(cluster: Cluster, profiles: list[Profile], pace: Pace) -> Plan:
    plan = make_plan(cluster, profiles, pace)
    assert msgspec.json.decode(encode(plan), type=Plan) == plan
    return plan


# -- The case of a fast device behind a slow link --

NEAR_AND_FAR = [profile(0.000625, 0.0009), profile(0.00015, 0.0009)]
LINKS = [{"bandwidth": 1e10}, {"bandwidth": 2e7}]
PIPELINED = {"policy": "hps", "depth": "auto", "codec": "plan"}


def test_a_device_behind_20_megabytes_a_second_is_worth_having() -> None:
    """Planned for serial fp32 transfers it is dropped, for 41 ms; as it is launched, 8.7 ms are possible."""
    serial = make_plan(cluster_of(64, LINKS), NEAR_AND_FAR)
    assert [w.batch for w in serial.workers] == [64, 0]
    cluster = cluster_of(64, LINKS, run=PIPELINED)
    joint = planned(cluster, NEAR_AND_FAR, policy_named("hps").pace)
    assert all(w.batch for w in joint.workers)
    assert joint.run is not None
    far = joint.mode_of(joint.workers[1])
    assert (far.push, far.pull, far.depth) == ("int8", "int8", 3)
    assert joint.iteration_seconds == max(w.predicted_seconds for w in joint.workers)
    assert 4 * MOVED * 1.015625 / 4 / 2e7 < joint.iteration_seconds < 0.009, "one way, at int8, and compute"
    launched = valued(cluster, NEAR_AND_FAR, Pace(), [w.batch for w in serial.workers])
    assert launched > 2 * joint.iteration_seconds
    assert joint.hps.pipelined_seconds  # an estimate of what more overlap or fewer bits would do


def valued(cluster: Cluster, profiles: list[Profile], pace: Pace, batches: list[int]) -> float:
    """Seconds of an iteration with these batches, launched in the cluster's mode at its fastest."""
    problem = planning_problem(cluster, planned_ranks(cluster, profiles), pace)
    return evaluate(problem, np.array(batches)).iteration_seconds


# -- Brute force --

seconds = st.sampled_from([0.001, 0.002, 0.005, 0.01])
bandwidths = st.sampled_from([5e6, 2e7, 1e8, 1e9])
codecs = st.sampled_from([None, "int8", "bf16", "plan"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, list[Profile], Pace]:
    count = draw(st.integers(1, 3))
    links = [
        {"bandwidth": draw(bandwidths), "latency": draw(st.sampled_from([0.0, 0.002]))} for _ in range(count)
    ]
    profiles = [profile(draw(seconds), draw(seconds), draw(st.sampled_from([None, 4]))) for _ in range(count)]
    pace = Pace(draw(st.sampled_from(["round", "clock", "turns", "free"])))
    run = {
        "policy": "hps",
        "codec": draw(codecs),
        "pull_codec": draw(codecs),
        "depth": draw(st.sampled_from([None, "auto"])),
    }
    most = sum(p.max_batch or 9 for p in profiles)
    return cluster_of(draw(st.integers(1, min(9, most))), links, run=run), profiles, pace


def step(profile: Profile, link: dict[str, float], batch: int, mode: Mode) -> float:
    """From one step of a worker to the next, written out once more."""
    assert profile.fit is not None
    compute = profile.fit.fixed_seconds + profile.fit.per_sample_seconds * batch
    on_wire, whole = transfer(link, mode)
    return compute + whole if mode.depth == 1 else max(compute, on_wire, whole / (mode.depth - 1))


def transfer(link: dict[str, float], mode: Mode) -> tuple[float, float]:
    """A push and a pull: seconds of the longer one on the wire, and of both with the latencies."""
    sizes = [WIRE_BYTES[CODEC_BITS[codec]] for codec in (mode.push, mode.pull)]
    ways = [size * MOVED / link["bandwidth"] for size in sizes]
    return max(ways), sum(ways) + 2 * link["latency"]


def longest(
    links: list[dict[str, float]],
    profiles: list[Profile],
    pace: Pace,
    split: tuple[int, ...],
    modes: list[Mode],
) -> float:
    used = [k for k, batch in enumerate(split) if batch]
    found = max(step(profiles[k], links[k], split[k], modes[k]) for k in used)
    if pace.kind == "turns":
        found = max(found, sum(transfer(links[k], modes[k])[1] for k in used))
    return found


@settings(max_examples=examples(15, 60), deadline=None)
@given(cases())
def test_the_joint_plan_is_the_best_of_all_splits_codecs_and_depths(
    case: tuple[Cluster, list[Profile], Pace],
) -> None:
    cluster, profiles, pace = case
    links = [{"bandwidth": g.bandwidth or 0.0, "latency": g.latency or 0.0} for g in cluster.worker]
    plan = planned(cluster, profiles, pace)
    assert plan.run is not None
    split = tuple(w.batch for w in plan.workers)
    B, n = cluster.job.global_batch, len(profiles)
    mode = mode_of(cluster, pace)
    tops = [min(B, p.max_batch or B) for p in profiles]
    splits = [s for s in itertools.product(*(range(top + 1) for top in tops)) if sum(s) == B]
    fastest = [mode.fastest] * n  # transfers shrink with every bit, steps with every level of depth
    best = min(longest(links, profiles, pace, s, fastest) for s in splits)
    if pace.kind != "free":
        assert plan.iteration_seconds == pytest.approx(best, rel=CLOSE)
        assert plan.lower_bound_seconds <= plan.iteration_seconds
    modes = [plan.mode_of(worker) for worker in plan.workers]
    mine = longest(links, profiles, pace, split, modes)
    for k, worker in enumerate(plan.workers):
        assert worker.batch == 0 or worker.predicted_seconds == pytest.approx(
            step(profiles[k], links[k], worker.batch, modes[k])
        )
    if pace.kind == "free":
        rate = sum(w.batch / w.predicted_seconds for w in plan.workers if w.batch)
        assert plan.iteration_seconds == pytest.approx(B / rate)
    else:
        assert plan.iteration_seconds == pytest.approx(mine, rel=SAME)
    serial = msgspec.structs.replace(cluster, run=RunTable())
    two_stage = [w.batch for w in make_plan(serial, profiles).workers]
    assert plan.iteration_seconds <= valued(cluster, profiles, pace, two_stage) * (1 + CLOSE)
    agreement(
        planning_problem(cluster, planned_ranks(cluster, profiles), pace),
        split
        if pace.kind != "free"
        else splits[int(np.argmin([longest(links, profiles, pace, s, fastest) for s in splits]))],
    )


@settings(max_examples=examples(10, 30), deadline=None)
@given(cases())
def test_no_worker_could_be_more_exact_or_shallower_alone(case: tuple[Cluster, list[Profile], Pace]) -> None:
    cluster, profiles, pace = case
    if pace.kind == "turns":
        pace = Pace("clock")  # turns share one link: what one takes another cannot
    plan = planned(cluster, profiles, pace)
    links = [{"bandwidth": g.bandwidth or 0.0, "latency": g.latency or 0.0} for g in cluster.worker]
    assert plan.run is not None
    order = mode_of(cluster, pace).options()
    slowest = max(w.predicted_seconds for w in plan.workers)
    for k, worker in enumerate(plan.workers):
        if not worker.batch:
            continue
        limit = worker.predicted_seconds if pace.kind == "free" else slowest
        for option in order[: order.index(plan.mode_of(worker))]:
            assert step(profiles[k], links[k], worker.batch, option) > limit * (1 + SAME)


def test_turns_that_bind_leave_workers_out_or_not_as_the_milp_does() -> None:
    rates = np.random.default_rng(7)
    for _ in range(10):
        links = [{"bandwidth": float(rates.uniform(1e7, 1e8))} for _ in range(5)]
        profiles = [profile(float(rates.uniform(1e-4, 1e-3)), 0.001) for _ in links]
        cluster = cluster_of(64, links, run={"policy": "r2sp"})
        plan = planned(cluster, profiles, Pace("turns"))
        turns = sum(w.link_seconds for w in plan.workers if w.batch)
        steps = max(w.predicted_seconds for w in plan.workers)
        assert plan.iteration_seconds == pytest.approx(max(turns, steps))
        assert plan.r2sp.period_seconds == pytest.approx(plan.iteration_seconds)
        problem = planning_problem(cluster, planned_ranks(cluster, profiles), Pace("turns"))
        assert "same optimum" in agreement(problem, [w.batch for w in plan.workers])


# -- Paces --


def test_every_policy_has_a_pace() -> None:
    kinds = {name: kind().pace.kind for name, kind in Policy.known.items()}
    assert {name for name, kind in kinds.items() if kind == "round"} == {"bsp", "backup", "quorum", "hps"}
    assert {name for name, kind in kinds.items() if kind == "clock"} == {"ssp", "dssp"}
    assert kinds["r2sp"] == "turns"
    assert policy_named("backup:k=2").pace.spare == 2
    assert policy_named("ssp:bound=inf").pace.kind == "free"


@pytest.mark.parametrize("policy", ["bsp", "backup:k=1", "ssp", "asp", "r2sp"])
def test_a_plan_for_rounds_predicts_each_policy_as_the_planner_does(policy: str) -> None:
    profiles, pace = [profile(0.0001, 0.1), profile(0.0005, 0.25)], policy_named(policy).pace
    cluster = cluster_of(128, [{}, {"required": True, "min_batch": 2}])
    plan = planned(cluster, profiles, Pace())
    batches = [worker.batch for worker in plan.workers]
    assert paced_seconds(plan, pace) == pytest.approx(valued(cluster, profiles, pace, batches), rel=SAME)
    if policy == "asp":
        assert (paced_seconds(plan, pace) or 1.0) < 0.5 * plan.iteration_seconds
        linked = planned(cluster_of(128, [{"bandwidth": 1e9}] * 2), profiles, Pace())
        assert paced_seconds(linked, pace) is None, "links may be shared"
        hosted = replace(plan, iteration_seconds=2 * plan.iteration_seconds)
        assert paced_seconds(hosted, pace) is None, "a host's preparation takes longer than the steps"


def test_an_iteration_at_each_pace() -> None:
    batches, steps = np.array([10, 10, 20]), np.array([0.1, 0.1, 0.2])
    assert iteration(Pace(), batches, steps, 0.2, []) == 0.2
    assert iteration(Pace("free"), batches, steps, 0.2, []) == pytest.approx(40 / 300)
    assert iteration(Pace(spare=1), batches, steps, 0.2, []) == pytest.approx(0.1 * 40 / 20)
    same = np.array([0.2, 0.2, 0.2])
    assert iteration(Pace(spare=1), batches, same, 0.2, []) == pytest.approx(0.2 * 40 / (40 - 40 / 3))
    jammed = [np.array([0.2, 0.2, 0.2])]  # seconds on one link, in steps that leave it no idle moment
    assert iteration(Pace("free"), batches, steps, 0.6, jammed) == pytest.approx(0.6)


def test_accumulation_for_all_and_codecs_of_an_all_reduce() -> None:
    profiles = [profile(0.001, 0.001, most=8)] * 2
    made = planned(cluster_of(32, [{}, {}], run={"accumulation": 2}), profiles, Pace())
    assert [(w.micro_batch, w.accumulation) for w in made.workers] == [(8, 2)] * 2
    assert made.run is None  # no mode is stated
    ring = {"kind": "ring", "bandwidth": 1e7}
    halved = planned(
        cluster_of(16, [{}, {}], sync=ring, run={"codec": "bf16", "pull_codec": "bf16"}), profiles, Pace()
    )
    whole = make_plan(cluster_of(16, [{}, {}], sync=ring), profiles)
    assert halved.sync is not None
    assert whole.sync is not None
    assert halved.sync.seconds == pytest.approx(whole.sync.seconds / 2)


def test_a_shared_link_is_used_one_at_a_time() -> None:
    """Rounds: each worker waits for all transfers. In a pipeline they only have to fit into the step. Equal
    workers at a clock's pace stay in step, so their transfers meet as in rounds.
    """
    shared = {"shares": ["rack"]}
    tables = {"shared": [{"name": "rack", "bandwidth": 80 * MOVED}]}  # 0.1 s for a push and a pull
    profiles = [profile(0.01, 0.0), profile(0.01, 0.0)]
    serial = planned(cluster_of(40, [shared, shared], **tables), profiles, Pace())
    assert serial.iteration_seconds == pytest.approx(0.2 + 0.18), "[22, 18]: one sends, one still computes"
    piped = planned(cluster_of(40, [shared, shared], run={"depth": 2}, **tables), profiles, Pace())
    assert piped.iteration_seconds == pytest.approx(0.2)
    clocked = planned(cluster_of(40, [shared, shared], **tables), profiles, Pace("clock"))
    assert clocked.iteration_seconds == pytest.approx(0.2 + 0.18)


def test_a_shared_link_carries_pushes_and_pulls_at_once() -> None:
    """0.4 s for a push, and for a pull, of each of two workers, whose steps take 0.2 s."""
    links, profiles = [{"shares": ["rack"]}] * 2, [profile(0.01, 0.0)] * 2
    shared = [{"name": "rack", "bandwidth": 10 * MOVED, "latency": 0.05}]
    deep = cluster_of(40, links, shared=shared, run={"depth": 8})
    assert valued(deep, profiles, Pace(), [20, 20]) == pytest.approx(2 * 0.4), "pulls go the other way"
    rounds = cluster_of(40, links, shared=shared)
    assert valued(rounds, profiles, Pace(), [20, 20]) == pytest.approx(0.2 + 4 * 0.4 + 2 * 0.05)


@pytest.mark.parametrize(
    ("run", "pace", "words"),
    [
        ({"policy": "r2sp"}, Pace("turns"), "run.policy"),
        ({"depth": "auto"}, Pace(), "run.depth"),
        ({"depth": 3}, Pace(), "run.depth: found 3"),
    ],
)
def test_an_all_reduce_has_rounds_without_a_pipeline(run: dict[str, Any], pace: Pace, words: str) -> None:
    cluster = cluster_of(16, [{}, {}], sync={"kind": "ring", "bandwidth": 1e7}, run=run)
    with pytest.raises(InputError, match=words):
        make_plan(cluster, NEAR_AND_FAR, pace)


def test_a_named_policy_needs_its_pace() -> None:
    with pytest.raises(InputError, match="pace"):
        make_plan(cluster_of(16, [{}, {}], run={"policy": "r2sp"}), NEAR_AND_FAR)


def test_the_even_split_is_valued_in_the_mode() -> None:
    plan = planned(cluster_of(64, LINKS, run=PIPELINED), NEAR_AND_FAR, Pace())
    assert plan.even_split.seconds == pytest.approx(0.0009 + 32 * 0.000625, rel=0.01)
    assert even_batches(64, 2) == [32, 32]


def test_a_depth_that_no_worker_has_is_refused() -> None:
    from pyps.formats import check_cluster

    for depth in (0, True, "deep", 1.5):
        with pytest.raises(msgspec.ValidationError, match=r"run\.depth"):
            cluster_of(8, [{}], run={"depth": depth})
    with pytest.raises(InputError, match=r"c\.toml: run\.depth: found 9; expected 1 to 8, or auto"):
        check_cluster("c.toml", cluster_of(8, [{}], run={"depth": MAX_DEPTH + 1}))
