"""A pipeline in virtual time: closed forms, delay-1 SGD bitwise, and the store's decisions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pyps.errors import InputError
from pyps.formats import Jitter
from pyps.native.values import Hyper, Optimizer
from pyps.simulate import Fault, Logistic, Result, Scenario, SimWorker, simulate
from pyps.simulate.plot import gantt, trace
from pyps.simulate.problem import Model
from pyps.solver.links import LinkCost
from pyps.solver.mode import step_of
from pyps.solver.systems.hps import hps_modes
from pyps.store.policies import Policy, policy_named

COMPUTE, BANDWIDTH = 0.1, 1e6
BATCH, LR = 8, 0.5
FIXED = "saps:threshold=fixed"
KNOWN = {**{name: kind() for name, kind in Policy.known.items()}, FIXED: policy_named(FIXED)}
OVERLAPPING = sorted(
    name
    for name, policy in KNOWN.items()
    if policy.needs.allows_pipeline and not policy.needs.needs_grad_norm
)


def alone(one_way: float, latency: float = 0.0) -> Scenario:
    """One worker; `one_way` seconds for a push, and for a pull."""
    worker = SimWorker("w", BATCH, lambda _: COMPUTE, bandwidth=BANDWIDTH, latency=latency)
    size = one_way * BANDWIDTH
    return Scenario((worker,), up_bytes=size, down_bytes=size)


def several(jitter: float = 0.1) -> Scenario:
    made = tuple(
        SimWorker(
            f"w{k}", BATCH, lambda b, k=k: 0.01 * b * (1 + 0.3 * k), Jitter(sigma=jitter), bandwidth=1e7
        )  # type: ignore[misc]
        for k in range(4)
    )
    return Scenario(made, up_bytes=1e5, down_bytes=1e5, server_bandwidth=4e6)


@pytest.mark.parametrize("one_way", [0.0, 0.02, 0.05, 0.09])
@pytest.mark.parametrize("policy", ["asp", "ssp:bound=0", "hps", "r2sp:slack=0"])
def test_the_period_is_the_longer_of_compute_and_transfer(policy: str, one_way: float) -> None:
    piped = simulate(alone(one_way), policy, iterations=50, depth="auto")
    serial = simulate(alone(one_way), policy, iterations=50)
    assert serial.iteration_seconds == pytest.approx(COMPUTE + 2 * one_way, rel=0.02)
    assert piped.iteration_seconds == pytest.approx(max(COMPUTE, 2 * one_way), rel=0.05)
    assert serial.staleness == {0: 50}
    assert piped.staleness == {0: 1, 1: 49}, "one more, exactly, from the second step on"


@pytest.mark.parametrize("latency", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("depth", [2, 3, 5, 8])
@pytest.mark.parametrize("policy", ["asp", "hps"])
def test_a_deep_pipeline_hides_latency_as_the_planner_says(policy: str, depth: int, latency: float) -> None:
    one_way = 0.02
    found = simulate(alone(one_way, latency), policy, iterations=200, depth=depth)
    link = LinkCost(latency, one_way)
    assert found.iteration_seconds == pytest.approx(max(COMPUTE, link.seconds() / (depth - 1)), rel=0.05)
    assert max(found.staleness) <= depth - 1
    (best,) = hps_modes([COMPUTE], [link])
    deep = simulate(alone(one_way, latency), policy, iterations=200, depth=best.depth)
    assert deep.iteration_seconds == pytest.approx(step_of(COMPUTE, [link], best), rel=0.06)


def test_transfers_under_way_share_the_link_and_not_its_latency() -> None:
    found = simulate(alone(0.2, 0.5), "asp", iterations=400, depth=8)
    assert found.iteration_seconds == pytest.approx(0.2, rel=0.05), "the bandwidth one way"
    assert found.peak_transfers == 1, "one after the other on the wire"


def test_it_is_sgd_with_a_delay_of_one_bitwise() -> None:
    steps, problem = 40, Logistic(samples=100)
    result = simulate(alone(0.03), "asp", iterations=steps, objective=problem, lr=LR, depth="auto")
    plain = Model(problem, Optimizer.SGD, Hyper(LR))
    before = plain.w
    for k in range(steps):
        on, before = (before if k else plain.w), plain.w
        gradient, _ = problem.gradient(on, k * BATCH, BATCH)
        plain.step([(gradient, BATCH, 1.0)], 1.0)
    assert result.loss == plain.loss()
    assert result.loss != simulate(alone(0.03), "asp", iterations=steps, objective=problem, lr=LR).loss


def accounts(result: Result) -> None:
    """Every sample once."""
    assert result.samples == sum(r.samples for r in result.ranks) == 30 * 4 * BATCH


@pytest.mark.parametrize("policy", OVERLAPPING)
def test_every_policy_that_overlaps_assigns_each_sample_once(policy: str) -> None:
    piped = simulate(several(), policy, iterations=30, seed=1, depth="auto")
    accounts(piped)
    assert repr(piped) == repr(simulate(several(), policy, iterations=30, seed=1, depth="auto"))
    serial = simulate(several(), policy, iterations=30, seed=1)
    if policy != FIXED:  # it drops more gradients, as more are late
        assert piped.seconds < serial.seconds * (1.02 if policy == "r2sp" else 1.0)
    assert piped.staleness_mean > serial.staleness_mean


def test_rounds_are_computed_on_one_version_older() -> None:
    piped = simulate(several(), "hps", iterations=30, seed=1, depth="auto")
    serial = simulate(several(), "hps", iterations=30, seed=1)
    assert set(serial.staleness) == {0}
    assert set(piped.staleness) <= {0, 1}
    assert piped.staleness[0] <= 2 * 4, "the first round, and claims too late to be prefetched"


def test_saps_keeps_its_bound() -> None:
    result = simulate(several(0.5), "saps:threshold=fixed,bound=6", iterations=30, seed=2, depth="auto")
    accounts(result)
    assert max(result.staleness) <= 6


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("policy", ["asp", "ssp:bound=2", "r2sp", "hps", "saps:threshold=fixed"])
def test_deaths_stops_and_leaves_lose_nothing(policy: str, depth: int) -> None:
    faults = (
        Fault(0, 0.31, "kill", 0.5),
        Fault(1, 0.42, "stop", 0.9),
        Fault(2, 0.53, "leave", 0.4),
        Fault(3, 0.64, "kill", 0.0),
    )
    scenario = replace(several(), faults=faults)
    rules = replace(Policy.known["asp"](), round_timeout_seconds=0.5) if policy == "asp" else policy
    accounts(simulate(scenario, rules, iterations=30, seed=3, depth=depth))


@pytest.mark.parametrize("policy", ["asp", "hps"])
def test_a_worker_may_be_fenced_while_its_parameters_travel(policy: str) -> None:
    rules = replace(Policy.known[policy](), round_timeout_seconds=0.3)
    for hundredth in range(20):
        faults = (Fault(2, 0.4 + hundredth / 100, "stop", 2.0),)
        accounts(simulate(replace(several(), faults=faults), rules, iterations=30, seed=3, depth=3))


def test_an_objective_gives_the_same_result_each_time() -> None:
    first, again = (
        simulate(several(), "ssp", iterations=10, seed=4, objective=Logistic(), depth="auto")
        for _ in range(2)
    )
    assert repr(first) == repr(again)
    assert np.isfinite(first.loss)


@pytest.mark.parametrize("policy", ["bsp", "backup"])
def test_policies_that_cannot_overlap_refuse_it(policy: str) -> None:
    with pytest.raises(InputError, match=f"a pipeline under {policy}"):
        simulate(several(), policy, depth="auto")


def test_transfers_have_a_separate_track_and_cost_no_idle_time() -> None:
    result = simulate(alone(0.04), "asp", iterations=20, depth="auto", timeline=True)
    own = [s for s in result.timeline if s[0] == 0]
    transfers = [s for s in result.timeline if s[0] == 1]
    assert sum(s[1] == "push" for s in transfers) == 20
    assert all(a[3] <= b[2] + 1e-9 for a, b in pairwise(own)), "one thing after the other"
    assert result.idle_share < 0.05
    tracks = {e["args"]["name"] for e in trace([result])["traceEvents"] if e["name"] == "thread_name"}
    assert tracks == {"w, b = 8", "w, transfers"}
    assert gantt(result, 0.0, 1.0, 10)[0].count("#") >= 8
