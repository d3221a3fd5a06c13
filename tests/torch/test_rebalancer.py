"""The split follows devices that change, soon, once, and not noise; simulated, and between real ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from statistics import median
from typing import ClassVar, cast

import ddp_balance_jobs as jobs
import pytest
import torch
from device import DEVICE
from ranks import Ranks
from sampled import examples, sampled

from pyps.errors import Infeasible, InputError
from pyps.formats import Device, ModelInfo, Point, Profile
from pyps.metrics import Reading, Sink
from pyps.solver import Cost, Line
from pyps.solver.online.balancer import Balancer
from pyps.solver.online.decide import Bounds, Split, best_split, decide, gain_worth_a_change, round_seconds
from pyps.solver.online.device import BalancedDevice
from pyps.solver.online.refit import OnlineCost, stretched
from pyps.solver.online.window import settled
from pyps.torch import GradientNoise, Moves, Rebalancer, SplitChange, to_sink
from pyps.torch.compute_timer import ComputeTimer

WINDOW, DEADBAND, LAG = 5, 0.03, 3
SPEEDS = (1.0, 1.4, 2.0, 2.9)
WITHIN, NARROW = ([Bounds(most=most, required=True)] * 4 for most in (256, 60))
NEAR = 1.05  # of the optimum's time
IN_STEPS = 20
LATER = int(DEVICE.type == "cuda")  # by so many steps a GPU's own time of one is known later

torch.set_num_threads(1)


def devices(step: int, slowed: int = 100) -> list[Line]:
    """Four of them; the first takes twice as long from a step on."""
    first = 2.0 if step >= slowed else 1.0
    return [Line(0.010 * s * f, 0.0008 * s * f) for s, f in zip(SPEEDS, (first, 1, 1, 1), strict=True)]


@cache
def best_seconds(costs: tuple[Line, ...]) -> float:
    """A round's time with the best split."""
    return round_seconds(costs, best_split(256, costs, WITHIN))


def simulate(
    priors: list[Cost] | None, steps: int, noise: float, seed: int, at: Callable[[int], list[Line]] = devices
) -> tuple[list[tuple[int, Split]], list[float]]:
    """The changes (step, split), and by step the round's true time over the best one's."""
    luck = random.Random(seed)
    learned = [OnlineCost.of(priors[k] if priors else None) for k in range(4)]
    split: Split = best_split(256, priors, WITHIN) if priors else (64, 64, 64, 64)
    coming: tuple[int, Split] | None = None
    corrected = False
    planned_at = [1.0] * 4
    changes, over, seen = [], [], [[] for _ in range(4)]
    for step in range(1, steps + 1):
        costs = at(step)
        if coming and coming[0] == step:
            split, coming, seen = coming[1], None, [[] for _ in range(4)]
            changes.append((step, split))
        over.append(round_seconds(costs, split) / best_seconds(tuple(costs)))
        for k, cost in enumerate(costs):
            hiccup = 3.0 if luck.random() < 0.02 else 1.0
            seen[k].append(cost.seconds(split[k]) * hiccup * (1 + abs(luck.gauss(0, noise))))
        if step % WINDOW == 0 and coming is None:
            if all(len(s) > WINDOW // 2 for s in seen):
                for k in range(4):
                    learned[k].observe(split[k], settled(seen[k], learned[k], split[k]))
                believed = [device.cost for device in learned]
                paces = [device.level / then for device, then in zip(learned, planned_at, strict=True)]
                unsure = [device.unsure for device in learned]
                corrected = corrected and not any(unsure)
                least = gain_worth_a_change(DEADBAND, max(device.error for device in learned), corrected)
                move = decide(split, believed, paces, WITHIN, least, step, unsure=unsure)
                if move:
                    planned_at = [device.level for device in learned]
                    coming, corrected = (step + LAG, move.after), not any(unsure)
            seen = [[] for _ in range(4)]
    return changes, over


@pytest.mark.parametrize("first", sampled(range(100, 105)))
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stall_does_not_take_a_rank_s_samples(first: int, length: int) -> None:
    """Some steps that take 40 times as long are no device of that speed; soon all is as before."""

    def at(step: int) -> list[Line]:
        stalled = 40.0 if first <= step < first + length else 1.0
        costs = devices(0)
        return [Line(costs[0].fixed_seconds * stalled, costs[0].per_sample_seconds * stalled), *costs[1:]]

    usual = best_split(256, devices(0), WITHIN)
    changes, over = simulate([*devices(0)], 160, 0.01, 0, at)
    assert all(3 * split[0] >= usual[0] for _, split in changes)
    assert len(changes) <= 2
    assert max(over[first + 20 :]) < NEAR


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("seed", sampled(range(5)))
def test_back_near_the_optimum_and_no_oscillation(noise: float, profiled: bool, seed: int) -> None:
    priors: list[Cost] | None = [*devices(0)] if profiled else None
    changes, over = simulate(priors, 320, noise, seed)
    assert max(over[100 + IN_STEPS - 1 : 320]) < NEAR
    after = [step for step, _ in changes if step >= 100]
    assert 1 <= len(after) <= 2
    assert max(over[30:99]) < NEAR
    assert len(changes) - len(after) <= (1 if profiled else 3)
    assert all(sum(split) == 256 for _, split in changes)


@pytest.mark.parametrize("speeds", [(1.0, 1.0), SPEEDS])
def test_steps_that_scatter_by_half_move_hardly_anything(speeds: tuple[float, ...]) -> None:
    """Where nothing but noise is new, in windows as the ranks of DDP report them; no rank has a profile."""
    costs = [Line(0.010 * speed, 0.0008 * speed) for speed in speeds]
    for seed in range(examples(4, 10)):
        luck, split = random.Random(seed), (64,) * len(speeds)
        devices = [BalancedDevice(bounds=Bounds(required=True)) for _ in costs]
        balancer = Balancer(devices, split, Moves(WINDOW, DEADBAND))
        for step in range(1, 81):
            for device, cost, batch in zip(devices, costs, split, strict=True):
                device.hear(batch, cost.seconds(batch) * luck.uniform(0.5, 1.5))
            if step % WINDOW == 0:
                own = zip(devices, split, strict=True)
                readings = [device.read(WINDOW, False, batch, batch) for device, batch in own]
                change, _ = balancer.decide_read(readings, step)
                if change is not None:
                    balancer.adopt(change, [reading.estimate.level for reading in readings])
                    split = change.after
        assert len(balancer.history) <= 3


def test_profiles_of_the_wrong_level_are_put_right_at_once() -> None:
    wrong: list[Cost] = [stretched(line, 0, f) for line, f in zip(devices(0), (3, 1, 1, 2), strict=True)]
    changes, over = simulate(wrong, 60, 0.01, 1)
    assert len(changes) == 1
    assert max(over[10:]) < NEAR


def test_a_move_says_why() -> None:
    then, now = devices(0), devices(100)
    split = best_split(256, then, WITHIN)
    paces = [2.0, 1.0, 1.0, 1.02]
    move = decide(split, now, paces, WITHIN, DEADBAND, 420)
    assert move is not None
    assert move.reasons == (f"rank 0 slowed by 2.0x at step 420: {split[0]} -> {move.after[0]}",)
    assert sum(move.after) == 256
    assert decide(move.after, now, paces, WITHIN, DEADBAND, 421) is None
    assert decide(split, now, paces, NARROW, DEADBAND, 420) is None  # 256 does not fit: what runs, runs
    with pytest.raises(Infeasible):
        best_split(256, now, NARROW)


@pytest.mark.parametrize(
    ("slows", "loaders", "profiled", "streamed"),
    sampled(
        [
            (24, 0, True, False),
            (25, 0, False, False),
            (26, 2, False, False),
            (27, 0, False, True),
            (28, 2, True, True),
        ],
        2,
        3,
    ),
)
def test_between_ranks(ranks: Ranks, slows: int, loaders: int, profiled: bool, streamed: bool) -> None:
    """slows: the round in which a device does; requests come before, in and after the reports of a window."""
    results = ranks.run(4, jobs.balanced, SPEEDS, range(slows, 100), 60, loaders, profiled, streamed)
    first = results[0]
    for result in results[1:]:
        assert result["history"] == first["history"]
        assert result["splits"] == first["splits"]
    assert sorted(k for result in results for k in result["seen"]) == list(range(first["length"]))
    assert all(sum(split) == 64 for split in first["splits"])
    print("\n".join(first["history"]))
    assert sum("rank 0 slowed by 2.0x" in said for said in first["history"]) == 1
    if not loaders:  # two slow rounds, one in which the request travels, then the new split
        own = [split[0] for split in first["splits"]]
        assert own[slows - 1] == own[slows + 2 + LATER] > own[slows + 3 + LATER]
    best = jobs.best_seconds(SPEEDS, slowed=True)
    reached = [max(times) / best for times in zip(*(r["seconds"] for r in results), strict=True)]
    late = reached[slows + IN_STEPS :]
    assert median(late) < NEAR
    assert len(first["history"]) <= (2 if profiled else 4)
    assert first["scalars"]["replans"] == len(first["history"])
    assert first["report"].count("\n") == 4


@pytest.mark.parametrize("recovers", sampled(range(40, 45)))
def test_a_quicker_round_is_no_hiccup(ranks: Ranks, recovers: int) -> None:
    """Wherever a window ends: one round in which it is seen, one for the request, the new split."""
    result = ranks.run(4, jobs.balanced, SPEEDS, range(20, recovers), 60, 0, True, False)[0]
    own = [split[0] for split in result["splits"]]
    assert own[recovers - 1] == own[recovers + 1 + LATER] < own[recovers + 2 + LATER]
    assert own[-1] == own[0]


@pytest.mark.parametrize("stalls", sampled(range(40, 45)))
def test_a_batch_that_was_not_timed_does_not_move_again(ranks: Ranks, stalls: int) -> None:
    """A request that is under way when a change holds lets all decide once more, on what they knew."""
    job = (SPEEDS, range(stalls, stalls + 2), 60, 0, True, False, 20.0)
    own = [split[0] for split in ranks.run(4, jobs.balanced, *job)[0]["splits"]]
    assert 3 * min(own) >= own[0]


@pytest.mark.timed
@pytest.mark.parametrize(("normed", "meets"), [(False, False), (True, False), (False, True)])
def test_the_wait_for_a_slow_rank_is_not_a_rank_s_own_time(ranks: Ranks, normed: bool, meets: bool) -> None:
    slow, quick = ranks.run(2, jobs.timed, 0.1, 6, normed, meets)
    assert min(slow) >= 0.1
    assert min(quick) < 0.1


@pytest.mark.timed
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_loading_is_own_time_and_waits_for_buffers_and_a_logged_loss_are_not(
    ranks: Ranks, workers: int, every: int
) -> None:
    slow, quick = ranks.run(2, jobs.timed_loading, 0.1, workers, every)
    assert len(slow) == len(quick) == 10
    assert sorted(slow)[2] >= 0.08  # a worker may have been ahead by a batch
    assert sorted(quick)[-3] < 0.05


@pytest.mark.timed
@pytest.mark.parametrize("logs", [1, 5])
def test_a_run_with_buffers_and_a_logged_loss_finds_the_split_in_which_none_waits(
    ranks: Ranks, logs: int
) -> None:
    """The slowest rank took 2.5 times as long as with the best split."""
    best = [29, 15, 4]
    for split in ranks.run(3, jobs.followed, [10, 28, 10], best, 0.06, logs):
        assert sum(split) == sum(best)
        assert max(a / b for a, b in zip(split, best, strict=True)) < 0.6 * 2.5, split


@pytest.mark.timed
@pytest.mark.parametrize("of", [0, 1])
def test_a_gan_s_samples_move_to_the_fast_device(ranks: Ranks, of: int) -> None:
    """Two optimizers and three reductions a step, whichever model's GlobalMean the Rebalancer has."""
    slow, quick = ranks.run(2, jobs.balanced_gan, [3.0, 1.0], 40, of)
    assert slow["split"] == quick["split"] == [14, 50]  # 0.0498 and 0.049 s
    assert slow["changes"] == quick["changes"] >= 1
    assert slow["epoch"] == quick["epoch"] == 1
    assert sorted(slow["seen"] + quick["seen"]) == list(range(40 * jobs.BATCH))


@pytest.mark.parametrize("meets", [False, True])
def test_the_waits_of_a_gan_s_two_reductions_are_not_own_time(ranks: Ranks, meets: bool) -> None:
    slow, quick = ranks.run(2, jobs.timed_gan, 0.1, 4, meets)
    assert min(slow) >= 0.1
    assert min(quick) < 0.05


def test_a_store_that_ends_after_the_last_step_is_no_error_but_before_another(ranks: Ranks) -> None:
    assert ranks.run(2, jobs.store_is_gone) == [["", "Connection reset by peer"]] * 2


@pytest.mark.parametrize(("more", "warnings"), [(7, 1), (0, 0), (None, 0)])
def test_a_profile_of_another_model_is_named(ranks: Ranks, more: int | None, warnings: int) -> None:
    for found in ranks.run(2, jobs.unlike_profile, more):
        assert len(found) == warnings
        assert all("the profile is of 'other' with " in text for text in found)


def test_batch_norm_of_each_rank_alone_is_named_once(ranks: Ranks) -> None:
    first, second = ranks.run(2, jobs.warned, False)
    assert ["UnevenSyncBatchNorm.convert(model)" in text for text in first] == [True]
    assert not second
    assert ranks.run(2, jobs.warned, True) == [[], []]


@pytest.mark.parametrize(
    ("weighs", "split", "expected"),
    [(False, [5, 3], ["but no GlobalMean is in use"]), (True, [5, 3], []), (False, [4, 4], [])],
)
def test_a_call_that_was_forgotten_is_named(
    ranks: Ranks, weighs: bool, split: list[int], expected: list[str]
) -> None:
    for warned in ranks.run(2, jobs.forgets, weighs, split):
        assert len(warned) == len(expected)
        assert all(part in one for part, one in zip(expected, warned, strict=True))


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"window.*4.*odd"):
        Rebalancer(None, None, moves=Moves(window=4))  # type: ignore[arg-type]


def profile(fixed: float, each: float, most: int | None = None) -> Profile:
    points = [Point(batch=b, seconds=fixed + each * b) for b in (8, 16, 64)]
    return Profile(device=Device(name="x"), model=ModelInfo(name="m"), points=points, max_batch=most)


def test_the_present_ranks_agree_on_a_split(ranks: Ranks) -> None:
    fast, slow = profile(0.01, 0.001), profile(0.01, 0.003)
    unbounded: list[int | None] = [None] * 4
    assert ranks.run(2, jobs.agreed, 64, [fast, slow], unbounded) == [(48, 16)] * 2
    assert ranks.run(3, jobs.agreed, 64, [fast, slow, fast], unbounded) == [(28, 9, 27)] * 3
    assert ranks.run(2, jobs.agreed, 64, [profile(0.01, 0.001, 40), slow], unbounded) == [(40, 24)] * 2
    assert ranks.run(3, jobs.agreed, 64, [None] * 3, [None, 10, None]) == [(27, 10, 27)] * 3
    for said in ranks.run(2, jobs.agreed, 64, [fast, None], unbounded):
        assert said.startswith("InputError: agreed_split: profile: found none on ranks [1]")
    for said in ranks.run(2, jobs.agreed, 64, [fast, slow], [10, 20]):
        assert said.startswith("Infeasible")
    for said in ranks.run(3, jobs.agreed, 2, [None] * 3, unbounded):
        assert said.startswith("Infeasible: global_batch 2: the minima of the required workers sum to 3")


class Balanced:
    """Hold what an observer reads of a Rebalancer."""

    steps = 7
    history: ClassVar = [SplitChange(5, (8, 8), (10, 6), 1.0, 0.8, ("rank 1 slowed by 2.0x",), (0, 7))]

    def readings(self) -> list[Reading]:
        return [Reading("replans", 1.0), Reading("batch", 10.0, 0), Reading("batch", 6.0, 1)]


class Kept(Sink):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.readings: dict[tuple[str, int | None], float] = {}
        self.notes: list[tuple[int, str]] = []

    def write(self, step: int, readings: Iterable[Reading]) -> None:
        self.readings |= {(r.name, r.rank): r.value for r in readings}

    def note(self, step: int, text: str) -> None:
        self.notes.append((step, text))

    def close(self) -> None:
        pass


def test_an_observer_writes_to_a_sink() -> None:
    sink, balance = Kept(), cast(Rebalancer, Balanced())
    observe = to_sink(sink)
    observe(balance), observe(balance)
    assert sink.readings == {("replans", None): 1.0, ("batch", 0): 10.0, ("batch", 1): 6.0}
    assert sink.notes == [(5, str(Balanced.history[0]))]
    noise = GradientNoise.__new__(GradientNoise)
    noise.load_state_dict({"sums": [6.0, 0.5, 1.0]})
    to_sink(sink, noise)(balance)
    assert sink.readings["noise_scale", None] == 12.0


def test_a_loop_that_takes_two_rounds_a_step(ranks: Ranks) -> None:
    """Both rounds of a step have the same split, and every sample is taken once."""
    found = ranks.run(2, jobs.accumulated_by_hand, [1.0, 3.0], 30)
    assert all(
        len(a) == len(b) for one in found for a, b in zip(one["seen"][::2], one["seen"][1::2], strict=True)
    )
    assert sorted(k for one in found for rows in one["seen"] for k in rows) == list(range(jobs.BATCH * 60))
    assert found[0]["changes"] >= 1
    assert found[0]["split"][0] > 1.8 * found[0]["split"][1]
    assert found[0]["epoch"] == 1


class OnDevice:
    """A hook on a device that this machine may lack."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)


@pytest.mark.parametrize("name", ["mps", "xpu:1"])
def test_a_device_that_cannot_be_timed_is_refused(name: str) -> None:
    """Their calls return before the work is done: the times would be those of its launch."""
    with pytest.raises(InputError, match=f"Rebalancer: device: found {name}; expected cpu or cuda"):
        ComputeTimer(OnDevice(name))
