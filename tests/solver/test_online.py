"""The cost of a device is estimated while it trains: what a batch cannot tell, and surprises."""

from __future__ import annotations

import math
import random
from statistics import mean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.formats import Fit, PlanWorker
from pyps.solver import Cost, Line, Table
from pyps.solver.online.balancer import Balancer, Rules
from pyps.solver.online.decide import (
    LEAST_GAIN,
    Bounds,
    best_split,
    decide,
    gain_worth_a_change,
    round_seconds,
)
from pyps.solver.online.device import BalancedDevice, planned_device
from pyps.solver.online.members import Ranks
from pyps.solver.online.refit import OnlineCost, stretched
from pyps.solver.online.window import quicker, settled, tells, undecided

PROFILE = Line(0.02, 0.005)
SLOPES = (0.5, 2.0)  # of the true one


def slope(cost: Cost) -> float:
    return cost.seconds(101) - cost.seconds(100)


@pytest.mark.parametrize(("added", "factor"), [(0.05, 1.0), (0.25, 1.0), (0.0, 2.0), (0.0, 3.5), (0.0, 0.4)])
def test_one_batch_leaves_the_slope_open_and_another_tells(added: float, factor: float) -> None:
    device, now = OnlineCost(PROFILE), stretched(PROFILE, added, factor)
    device.observe(16, [PROFILE.seconds(16)] * 5)
    device.observe(16, [now.seconds(16)] * 5)
    assert device.changed
    assert device.awaits(8)
    assert not device.awaits(16)
    assert SLOPES[0] <= slope(device.cost) / slope(now) <= SLOPES[1]
    assert device.cost.seconds(16) == pytest.approx(now.seconds(16), rel=0.01)
    device.observe(8, [now.seconds(8)] * 5)
    for batch in (4, 8, 16, 24):
        assert device.cost.seconds(batch) == pytest.approx(now.seconds(batch), rel=0.06)
    assert device.level == pytest.approx(now.seconds(8) / PROFILE.seconds(8), rel=0.01)


@pytest.mark.parametrize(("batch", "first", "second"), [(36, -0.062, 0.057), (38, -0.078, 0.025)])
def test_noise_between_two_near_batches_is_no_slope(batch: int, first: float, second: float) -> None:
    """Two single steps of near batches, of which the smaller seems to take longer."""
    device, now = OnlineCost(PROFILE), stretched(PROFILE, 0.2, 1.0)
    for _ in range(6):
        device.observe(40, [PROFILE.seconds(40) * noise for noise in (0.97, 1.0, 1.03, 0.98, 1.02)])
    device.observe(40, [now.seconds(40) * (1 + first)])
    assert device.changed
    device.observe(batch, [now.seconds(batch) * (1 + second)])
    assert SLOPES[0] <= slope(device.cost) / slope(PROFILE) <= SLOPES[1]


def test_a_change_at_a_new_batch_is_no_slope() -> None:
    """It begins with the window in which the batch changes."""
    device = OnlineCost(PROFILE)
    device.observe(32, [PROFILE.seconds(32)] * 5)
    device.observe(24, [2 * PROFILE.seconds(24)] * 5)
    assert device.changed
    assert slope(PROFILE) <= slope(device.cost) <= 2 * slope(PROFILE)
    assert device.cost.seconds(1) > PROFILE.seconds(1)


def test_a_disturbance_that_is_over_gives_the_first_cost_back() -> None:
    device = OnlineCost(PROFILE)
    for batch in (16, 24):
        device.observe(batch, [PROFILE.seconds(batch)] * 5)
    before = device.cost
    device.observe(24, [0.4] * 5)
    device.observe(20, [1.01 * PROFILE.seconds(20)] * 2)
    assert not device.changed
    assert slope(device.cost) == pytest.approx(slope(before), rel=0.05)


def test_a_small_change_is_followed_with_evidence() -> None:
    device = OnlineCost(Line(0.01, 0.001))
    device.observe(80, [0.09] * 5)
    for _ in range(8):
        device.observe(80, [0.0945] * 5)  # 5 %
    assert not device.changed
    assert device.cost.seconds(80) == pytest.approx(0.0945, rel=0.02)
    assert device.error < 0.006


def test_what_delays_a_single_step_is_no_change() -> None:
    luck, device = random.Random(0), OnlineCost(PROFILE)
    for _ in range(200):
        times = [PROFILE.seconds(16) * luck.lognormvariate(0, 0.02) for _ in range(5)]
        times[luck.randrange(5)] *= 3
        device.observe(16, settled(times, device, 16))
    assert not device.changed
    assert device.cost.seconds(16) == pytest.approx(PROFILE.seconds(16), rel=0.03)


def test_two_surprises_in_a_row_count_at_once() -> None:
    device = OnlineCost(PROFILE)
    usual = PROFILE.seconds(16)
    device.observe(16, [usual] * 5)
    assert settled([usual, usual, 2 * usual], device, 16) == [usual, usual, 2 * usual]
    assert settled([usual, 2 * usual, 2 * usual], device, 16) == [2 * usual] * 2
    assert not tells([usual, 2 * usual], device, 16)
    assert not tells([2 * usual, usual / 1.05], device, 16)
    assert tells([usual, 2 * usual, 2.1 * usual], device, 16)
    assert undecided([usual, 2 * usual], device, 16)
    assert not undecided([2 * usual, 2 * usual], device, 16)
    assert not undecided([2 * usual, usual], device, 16)


def test_a_clearly_quicker_step_is_a_change_alone() -> None:
    device = OnlineCost(PROFILE)
    usual = PROFILE.seconds(16)
    assert not quicker([usual / 2], device, 16)  # nothing is known yet
    device.observe(16, [usual] * 5)
    assert tells([usual, usual / 2], device, 16)
    for times in ([usual, usual / 2], [usual, 2 * usual]):
        assert undecided(times, device, 16)
        assert settled(times, device, 16, confirmed=1) == times[-1:]
    for _ in range(20):
        device.observe(16, [usual * (1 + 0.05 * (-1) ** k) for k in range(6)])
    assert not quicker([usual / 1.2], device, 16)  # its steps scatter


def test_without_a_profile_the_fixed_part_may_be_nearly_all() -> None:
    device, true = OnlineCost.of(None), Line(0.1, 0.0005)
    for batch in (64, 90):
        device.observe(batch, [true.seconds(batch)] * 5)
    device.observe(64, [true.seconds(64)] * 5)
    for batch in (32, 64, 128):
        assert device.cost.seconds(batch) == pytest.approx(true.seconds(batch), rel=0.1)


@settings(derandomize=True, deadline=None, max_examples=examples(18, 60))
@given(st.lists(st.tuples(st.integers(1, 200), st.floats(1e-5, 50.0)), min_size=1, max_size=12))
def test_any_times_give_a_cost(observed: list[tuple[int, float]]) -> None:
    for prior in (None, PROFILE, Table(((1, 0.1), (10, 0.2), (100, 0.5)))):
        device = OnlineCost.of(prior)
        for batch, seconds in observed:
            device.observe(batch, [seconds] * 3)
            known = [device.cost.seconds(b) for b in (1, 10, 100)]
            assert all(math.isfinite(s) and s > 0 for s in known)
            assert known == sorted(known)
            assert device.error >= 0
            low, high = device.expects(batch)
            assert low <= high


def test_a_wrong_slope_before_a_change_is_mended_after_it() -> None:
    """A rank went back and forth between 1 and 160 samples: each time looked like another change."""
    prior = Line(0.02, 0.0016)
    device, now = OnlineCost(prior), stretched(prior, 0.0, 1.9)
    for batch, seconds in (
        (97, 0.1844),
        (123, 0.2166),
        (115, 0.2010),
    ):  # which tell of a slope that is too low
        device.observe(batch, [seconds] * 30)
    device.observe(115, [now.seconds(115)] * 2)
    assert device.unsure
    others = [Line(0.0, 0.0008), Line(0.0, 0.0012), Line(0.0, 0.0027)]
    split, sizes, taken = (115, 151, 171, 75), [Bounds(most=512, required=True)] * 4, []
    for _ in range(4):
        unsure = [device.unsure, *[False] * 3]
        move = decide(split, [device.cost, *others], [1.0] * 4, sizes, 0.03, 0, unsure=unsure)
        split = move.after if move else split
        taken.append(split[0])
        device.observe(split[0], [now.seconds(split[0])] * 2)
    truth = [now, *others]
    assert min(taken) >= 115 // 3
    assert taken[-1] == taken[-2]
    assert round_seconds(truth, split) < 1.05 * round_seconds(truth, best_split(512, truth, sizes))


def test_less_gain_is_worth_a_change_as_evidence_grows() -> None:
    assert gain_worth_a_change(0.05, 0.05) == pytest.approx(0.10)
    assert gain_worth_a_change(0.05, 0.02) == pytest.approx(0.05)
    assert gain_worth_a_change(0.05, 0.004) == pytest.approx(0.012)
    assert gain_worth_a_change(0.05, 0.004, corrected=True) == pytest.approx(0.036)
    assert gain_worth_a_change(0.05, 0.0) == LEAST_GAIN


def test_a_loss_within_the_deadband_does_not_last() -> None:
    """2.4 % with 1 % of noise: nothing is certain at first."""
    luck = random.Random(3)
    truth = [Line(0.01, 0.001 * k) for k in (1.0, 1.3, 1.9, 2.5)]
    bounds = [Bounds(most=400, required=True)] * 4
    best = best_split(400, truth, bounds)
    split = (best[0] + 4, best[1], best[2], best[3] - 4)
    devices, least = [OnlineCost(cost) for cost in truth], []
    for _ in range(10):
        for device, cost, batch in zip(devices, truth, split, strict=True):
            device.observe(batch, [cost.seconds(batch) * luck.lognormvariate(0, 0.01) for _ in range(7)])
        least.append(gain_worth_a_change(0.05, max(device.error for device in devices)))
        move = decide(split, [d.cost for d in devices], [1.0] * 4, bounds, least[-1], 0)
        split = move.after if move else split
    times = [cost.seconds(batch) for cost, batch in zip(truth, split, strict=True)]
    assert max(times) / mean(times) - 1 < 0.015
    assert least[-1] < 0.024


def test_decisions_keep_minima_and_multiples() -> None:
    costs, bounds = [Line(0.01, 0.001 * k) for k in (1, 2, 10)], [Bounds(8, 64, 8, required=True)] * 3
    move = decide((32, 24, 8), costs, [1.0] * 3, bounds, 0.03, 0)
    assert move is None or all(b % 8 == 0 and b >= 8 for b in move.after)
    slowed = [Line(0.01, 0.004), *costs[1:]]
    moved = decide((32, 24, 8), slowed, [1.0] * 3, bounds, 0.03, 0)
    assert moved is not None
    assert moved.after == (16, 40, 8)


def test_windows_of_three_steps_show_how_much_steps_scatter() -> None:
    luck, device = random.Random(0), OnlineCost(Line(0.01, 0.001))
    for _ in range(30):
        device.observe(64, [0.074 * luck.lognormvariate(0, 0.03) for _ in range(3)])
    assert 0.02 < device.scatter < 0.05


def test_steps_that_scatter_widely_move_nothing() -> None:
    """Half as long to one and a half times as long, at random: no device has changed."""
    luck = random.Random(5)
    truth = [Line(0.01, 0.001 * k) for k in (1.0, 1.3, 1.9, 2.5)]
    split = best_split(400, truth, [Bounds(most=400, required=True)] * 4)
    balancer = Balancer([BalancedDevice(cost) for cost in truth], split, Rules())
    ranks = Ranks({rank: rank for rank in range(4)}, split)
    for step in range(200):
        for device, cost, batch in zip(balancer.devices, truth, split, strict=True):
            device.hear(batch, cost.seconds(batch) * luck.uniform(0.5, 1.5))
        assert balancer.look(ranks, step, step) is None


def test_a_device_that_drifts_is_followed_closely() -> None:
    """One that slows by 0.2 % a step, whose steps scatter by 2 %: a mean of forty steps lags behind it."""
    seconds, off = [PROFILE.seconds(40) * (1 + 0.002 * step) for step in range(210)], []
    for seed in range(5):
        luck, device = random.Random(seed), OnlineCost(PROFILE)
        for step in range(0, 210, 7):
            device.observe(40, [own * luck.lognormvariate(0, 0.02) for own in seconds[step : step + 7]])
            off.append(abs(device.cost.seconds(40) / seconds[step + 6] - 1))
    assert mean(off) < 0.011


@pytest.mark.parametrize("known", [True, False])
def test_a_planned_worker_in_micro_batches_is_known_by_its_compute(known: bool) -> None:
    """In a pipeline its transfers overlap with that, and may take longer than its steps."""
    bounds = {"trusted_min_batch": 1, "trusted_max_batch": 64}
    fit = Fit(kind="affine", fixed_seconds=0.004, per_sample_seconds=0.001, **bounds) if known else None

    def device(predicted: float, depth: int) -> BalancedDevice:
        worker = PlanWorker(
            rank=0,
            name="w",
            batch=10,
            micro_batch=4,
            accumulation=3,
            weight=1.0,
            predicted_seconds=predicted,
            link_seconds=0.08,
            fit=fit,
        )
        return planned_device(worker, depth)

    compute = 3 * 0.004 + 10 * 0.001
    assert device(compute, 8).estimate.cost.seconds(10) == pytest.approx(compute)
    assert device(compute + 0.08, 1).estimate.cost.seconds(10) == pytest.approx(compute + 0.08)


def test_what_a_checkpoint_keeps_of_a_device_is_all() -> None:
    """Also the slope that it had before it changed: the next change is judged by it."""
    device, again = BalancedDevice(PROFILE), BalancedDevice(PROFILE)
    for batch, seconds in ((40, 0.26), (80, 0.50), (80, 0.90)):
        device.online.observe(batch, [seconds] * 7)
    assert device.online.first_slope != 1.0
    again.online = msgspec.json.decode(msgspec.json.encode(device.online), type=OnlineCost)
    for each in (device, again):
        each.online.observe(80, [1.6] * 7)
    assert again.online.cost == device.online.cost
    assert again.online.expects(40) == device.online.expects(40)
