"""Simulations against closed forms: a policy's times, waits and staleness are known without simulating."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pyps.errors import InputError
from pyps.formats import Jitter
from pyps.simulate import Fault, Logistic, Result, Scenario, SimWorker, Slowdown, compare, simulate
from pyps.simulate.engine import Deadlock
from pyps.store.policies import Policy

BATCHES = (16, 16, 8, 4)
SECONDS = (0.1, 0.11, 0.13, 0.29)  # of a step of its batch


def line(seconds: float, batch: int) -> float:
    return seconds * batch


def workers(jitter: Jitter | None = None) -> tuple[SimWorker, ...]:
    return tuple(
        SimWorker(f"w{k}", b, lambda batch, s=s, b=b: line(s / b, batch), jitter or Jitter())  # type: ignore[misc]
        for k, (b, s) in enumerate(zip(BATCHES, SECONDS, strict=True))
    )


PLAIN = Scenario(workers())
SLOWEST = max(SECONDS)
B = sum(BATCHES)


def test_bsp_takes_as_long_as_the_slowest() -> None:
    result = simulate(PLAIN, "bsp", iterations=20)
    assert result.iteration_seconds == pytest.approx(SLOWEST, rel=1e-6)
    assert result.versions == result.rounds == 20
    for r, seconds in zip(result.ranks, SECONDS, strict=True):
        assert r.compute_seconds == pytest.approx(20 * seconds, rel=1e-6)
        assert r.wait_seconds == pytest.approx(20 * (SLOWEST - seconds), abs=1e-6)
    assert result.idle_share == pytest.approx(1 - sum(SECONDS) / (4 * SLOWEST), rel=1e-6)


@pytest.mark.parametrize("policy", ["asp", "dynsgd", "saps:threshold=fixed", "ssp:bound=inf"])
def test_policies_without_waits_train_at_the_sum_of_speeds(policy: str) -> None:
    result = simulate(PLAIN, policy, iterations=200)
    speed = sum(b / s for b, s in zip(BATCHES, SECONDS, strict=True))
    assert result.iteration_seconds == pytest.approx(B / speed, rel=0.02)
    assert result.idle_share == 0.0
    assert result.staleness_mean == pytest.approx(3, abs=0.1)
    expected = [t * sum(1 / s for s in SECONDS) - 1 for t in SECONDS]
    means = [r.staleness_mean for r in result.ranks]
    assert means == pytest.approx(expected, abs=0.3)


def test_ssp_with_bound_zero_takes_as_long_as_bsp() -> None:
    result = simulate(PLAIN, "ssp:bound=0", iterations=20)
    assert result.seconds == pytest.approx(simulate(PLAIN, "bsp", iterations=20).seconds, rel=1e-9)


def test_a_larger_ssp_bound_takes_less_time() -> None:
    seconds = [simulate(PLAIN, f"ssp:bound={s}", iterations=30).seconds for s in (0, 1, 4, 16)]
    assert seconds == sorted(seconds, reverse=True)


def test_backup_takes_as_long_as_the_slowest_worker_it_waits_for() -> None:
    """But for the last round, of the late worker's samples."""
    result = simulate(PLAIN, "backup:k=1", iterations=30)
    assert result.ranks[3].pushes == 0
    assert result.seconds / (result.rounds - 1) == pytest.approx(sorted(SECONDS)[2], rel=0.01)


def test_hps_ends_rounds_together() -> None:
    """Batches are large, so that rounding to whole samples hardly matters."""
    many = replace(PLAIN, workers=tuple(replace(w, batch=100 * w.batch) for w in PLAIN.workers))
    result = simulate(many, "hps", iterations=60, timeline=True)
    speed = sum(b / s for b, s in zip(BATCHES, SECONDS, strict=True))
    after_the_first = (result.seconds - 100 * SLOWEST) / 59
    assert after_the_first == pytest.approx(100 * B / speed, rel=0.02)
    last = [end - begin for _, kind, begin, end, _ in result.timeline if kind == "compute"][-4:]
    assert max(last) / min(last) < 1.05


def test_r2sp_cycles_with_the_slowest_and_spreads_transfers() -> None:
    """A gradient that crosses a link waits for its turn before it travels, as in a run."""
    ring = Scenario(workers(), up_bytes=1e6, down_bytes=1e6, server_bandwidth=1e9)
    result = simulate(ring, "r2sp", iterations=50)
    bsp = simulate(ring, "bsp", iterations=50)
    assert (result.peak_transfers, bsp.peak_transfers) == (1, 4)
    assert result.iteration_seconds <= 1.07 * (SLOWEST + 0.002)


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("seed", [0, 1])
def test_r2sp_keeps_even_gaps_under_jitter(count: int, seed: int) -> None:
    many = tuple(SimWorker(f"w{k}", 8, lambda b: 0.05 * b, Jitter(spread=0.1)) for k in range(count))
    result = simulate(Scenario(many), "r2sp", iterations=150, seed=seed, timeline=True)
    pushes = [seconds for _, seconds in result.pushed_at][5 * count : -2 * count]  # while all workers train
    gaps = np.diff(pushes)
    cycles = np.diff(pushes[::count])
    assert gaps.std() / gaps.mean() <= 0.15
    assert cycles.mean() <= 1.07 * 0.4
    ranks = [rank for rank, _ in result.pushed_at]
    assert all((b - a) % count == 1 % count for a, b in pairwise(ranks))


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_a_link_that_binds_sets_the_pace(policy: str) -> None:
    """Half a second of transfers each way in a global batch, against 0.29 s of compute at most."""
    size = 0.5e9 / 4
    tight = Scenario(workers(), up_bytes=size, down_bytes=size, server_bandwidth=1e9)
    result = simulate(tight, policy, iterations=20)
    if policy == "bsp":  # pulls together, then computes; the first ones push while the slowest computes
        assert 0.5 + SLOWEST + size / 1e9 <= result.iteration_seconds <= 0.5 + SLOWEST + 0.5
    else:
        pushes = sum(result.staleness.values())
        assert result.seconds >= pushes * size / 1e9


def test_transfers_have_latency_and_private_or_shared_links() -> None:
    slow_link = tuple(replace(w, bandwidth=1e8, latency=0.005) for w in workers()[:1])
    result = simulate(Scenario(slow_link, up_bytes=1e6, down_bytes=2e6), "bsp", iterations=10)
    assert result.iteration_seconds == pytest.approx(0.1 + 0.01 + 0.02 + 2 * 0.005, rel=1e-6)
    shared = tuple(replace(w, host="rack") for w in (workers()[0],) * 2)
    both = Scenario(shared, up_bytes=1e6, down_bytes=1e6, hosts={"rack": 1e8})
    assert simulate(both, "bsp", iterations=10).iteration_seconds == pytest.approx(0.1 + 0.04, rel=1e-6)


def test_equal_seeds_give_equal_bits() -> None:
    jitter = Jitter(sigma=0.3, spike_share=0.1, spike_factor=5.0, drift=0.2, drift_seconds=3.0)
    scenario = Scenario(workers(jitter), up_bytes=1e6, down_bytes=1e6, server_bandwidth=1e8)

    def run(seed: int) -> Result:
        objective = Logistic(seed=seed)
        return simulate(scenario, "saps", iterations=30, seed=seed, objective=objective, timeline=True)

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_jitter_has_its_mean_and_its_spikes() -> None:
    one = (SimWorker("w", 1, lambda b: 1.0, Jitter(sigma=0.5)),)
    assert simulate(Scenario(one), "asp", iterations=5000).seconds / 5000 == pytest.approx(1.0, abs=0.03)
    one = (SimWorker("w", 1, lambda b: 1.0, Jitter(spike_share=0.1, spike_factor=11.0)),)
    assert simulate(Scenario(one), "asp", iterations=5000).seconds / 5000 == pytest.approx(2.0, abs=0.15)
    one = (SimWorker("w", 1, lambda b: 0.01, Jitter(drift=0.5, drift_seconds=1.0)),)
    result = simulate(Scenario(one), "asp", iterations=1000, timeline=True)
    steps = [end - begin for _, kind, begin, end, _ in result.timeline if kind == "compute"]
    assert min(steps) == pytest.approx(0.005, rel=0.01)
    assert max(steps) == pytest.approx(0.015, rel=0.01)


def test_a_slowdown_begins_and_ends() -> None:
    one = (SimWorker("w", 1, lambda b: 0.1, slowdowns=(Slowdown(1.0, 2.0, factor=2.0, added=0.05),)),)
    result = simulate(Scenario(one), "asp", iterations=30, timeline=True)
    for _, _, begin, end, _ in result.timeline:
        assert end - begin == pytest.approx(0.3 if 1.0 <= begin < 2.0 else 0.1, rel=1e-6)


@pytest.mark.parametrize("policy", Policy.known)
@pytest.mark.parametrize("kind", ["stop", "kill", "leave"])
def test_faults_lose_no_sample(policy: str, kind: str) -> None:
    faults = (Fault(1, 1.05, kind, 2.0), Fault(3, 2.0, kind, 0.5))
    result = simulate(replace(PLAIN, faults=faults), policy, iterations=40)
    assert result.samples == 40 * B
    assert sum(r.samples for r in result.ranks) == 40 * B


@pytest.mark.parametrize("policy", Policy.known)
def test_training_goes_on_without_a_dead_worker(policy: str) -> None:
    faults = (Fault(0, 1.0, "kill"), Fault(2, 1.5, "stop", 1e6))
    short = Policy.known[policy](round_timeout_seconds=3.0)
    result = simulate(replace(PLAIN, faults=faults), short, iterations=30, seconds=600.0)
    assert result.samples == 30 * B


@pytest.mark.parametrize("first", ["kill", "leave"])
@pytest.mark.parametrize("second", ["kill", "leave", "stop"])
def test_a_fault_of_a_worker_that_is_away_has_no_effect(first: str, second: str) -> None:
    away = Fault(1, 1.0, first, 2.0)
    once = simulate(replace(PLAIN, faults=(away,)), "asp", iterations=40)
    twice = simulate(
        replace(PLAIN, faults=(away, Fault(1, 1.5, second, 1.7))), "asp", iterations=40, seconds=60
    )
    assert twice.samples == 40 * B
    assert twice.seconds == once.seconds


def test_a_successor_waits_for_its_own_transfer() -> None:
    alone = Scenario((SimWorker("w", 4, lambda b: 0.1, bandwidth=1e6),), down_bytes=1e6)
    faults = (Fault(0, 0.5, "kill", 0.1),)  # in the middle of a pull
    result = simulate(replace(alone, faults=faults), "asp", iterations=2, timeline=True)
    pulls = [end - begin for _, kind, begin, end, _ in result.timeline if kind == "pull"]
    assert pulls == [pytest.approx(1.0, rel=1e-6)] * 3, "the successor's first, and one in each exchange"


def test_a_successor_is_not_stopped_where_the_dead_worker_was() -> None:
    faults = (Fault(1, 1.0, "stop", 50.0), Fault(1, 1.1, "kill", 0.2))
    result = simulate(replace(PLAIN, faults=faults), "asp", iterations=40)
    assert result.ranks[1].pushes > 0.8 * result.ranks[0].pushes


def test_steps_longer_than_the_round_timeout_are_said_to_be() -> None:
    pair = tuple(SimWorker(f"w{k}", 4, lambda b: 0.5) for k in range(2))
    rules = Policy.known["backup"](round_timeout_seconds=0.3)
    with pytest.raises(
        Deadlock, match=r"no step has ended since 2\.500 s.* longer than 0\.3 s, the round timeout"
    ):
        simulate(Scenario(pair), rules, iterations=3, seconds=1000.0)


# Objective.


def test_one_worker_is_gradient_descent_by_hand() -> None:
    objective = Logistic()
    alone = Scenario((SimWorker("w", 50, lambda b: 0.1),))
    results = [simulate(alone, policy, iterations=30, objective=objective, lr=0.3) for policy in Policy.known]
    w = objective.start()
    for step in range(30):
        w = w - 0.3 / 50 * (np.zeros_like(w) + 50 * (1.0 * objective.gradient(w, 50 * step, 50)[0]))
    assert {r.loss for r in results} == {objective.loss(w)}


def test_unequal_batches_under_bsp_are_the_whole_batch() -> None:
    objective = Logistic()
    split = simulate(PLAIN, "bsp", iterations=20, objective=objective)
    whole = simulate(Scenario((SimWorker("w", B, lambda b: 0.1),)), "bsp", iterations=20, objective=objective)
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)


def test_curves_fall_and_targets_stop() -> None:
    results = compare(PLAIN, ["bsp", "asp"], iterations=200, objective=Logistic(), lr=0.5)
    for result in results:
        assert result.curve[0][2] == pytest.approx(math.log(5))
        assert result.loss < 0.6
    target = 0.8
    stopped = simulate(PLAIN, "asp", iterations=200, objective=Logistic(), lr=0.5, target_loss=target)
    assert stopped.seconds_to(target) == results[1].seconds_to(target)
    assert stopped.samples < results[1].samples
    assert results[0].seconds_to(0.0) is None


def test_torch_and_numpy_objectives_agree() -> None:
    torch = pytest.importorskip("torch")
    from pyps.simulate import TorchObjective
    from pyps.tasks import TrainingTask

    numpy_side = Logistic()
    model = torch.nn.Linear(20, 5, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    task = TrainingTask(model, lambda b: (None, None), torch.nn.functional.cross_entropy)
    x, y = torch.from_numpy(numpy_side.x), torch.from_numpy(numpy_side.labels)
    results = [
        simulate(PLAIN, "asp", iterations=20, objective=objective)
        for objective in (numpy_side, TorchObjective(task, x, y))
    ]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-9)


def test_refusals() -> None:
    with pytest.raises(InputError, match="iterations"):
        simulate(PLAIN, iterations=0)
    with pytest.raises(InputError, match="target_loss"):
        simulate(PLAIN, target_loss=1.0)
    with pytest.raises(InputError, match="workers"):
        Scenario(())
    with pytest.raises(InputError, match="batch"):
        Scenario((SimWorker("w", 0, lambda b: 1.0),))
    with pytest.raises(InputError, match="host"):
        Scenario((SimWorker("w", 1, lambda b: 1.0, host="rack"),))


def test_recorded_steps_come_before_the_cost_model() -> None:
    worker = SimWorker("w", 4, lambda b: 1.0, recorded=(0.5, 0.25))
    result = simulate(Scenario((worker,)), "asp", iterations=3, timeline=True)
    lasted = [end - begin for _, kind, begin, end, _ in result.timeline if kind == "compute"]
    assert lasted == pytest.approx([0.5, 0.25, 1.0])


def test_hps_gives_no_worker_more_than_its_memory_holds() -> None:
    limits = (10, 16, 8, 0)
    made = tuple(replace(w, max_samples=most) for w, most in zip(PLAIN.workers, limits, strict=True))
    result = simulate(Scenario(made), "hps", iterations=40)
    assert result.samples == 40 * B
    for r, most in zip(result.ranks[:3], limits, strict=False):
        assert r.samples <= most * r.pushes
    assert result.ranks[3].samples > 40 * (B - sum(limits)) - B
