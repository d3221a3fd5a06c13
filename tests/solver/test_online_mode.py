"""One worker's codecs and depth follow its link and device: in a model of a pipeline, without processes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pyps.formats import Mode
from pyps.formats.mode import Pace
from pyps.formats.options import CodecName
from pyps.solver.links import LinkCost, link_cost, step_seconds
from pyps.solver.mode import ModeChoices, bits_of, choices_while_running
from pyps.solver.online.mode import SOON, WINDOW, ModeBalancer, ModeChange, TimedStep

PARAMETERS = 1_000_000
BYTES = 4 * PARAMETERS
LATENCY = 0.001
EXACT = Mode(depth=2)
CODED = Mode(push="int8", pull="int8", depth=3)


def choices(kind: str = "free", mode: Mode = EXACT) -> ModeChoices:
    return choices_while_running([mode], Pace(kind=kind))  # type: ignore[arg-type]


@dataclass
class Pipeline:
    """A worker whose steps take `compute` seconds, over a link of `rate` bytes/s; in rounds, others' take
    `others`.
    """

    kind: str = "free"
    mode: Mode = EXACT
    compute: float = 0.1
    rate: float = BYTES / 0.04
    others: float = 0.0
    noise: float = 0.0
    now: float = 0.0
    luck: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.balancer = ModeBalancer(choices(self.kind, self.mode), self.mode, PARAMETERS, LATENCY)

    def link(self) -> LinkCost:
        cost = link_cost(PARAMETERS, self.rate, LATENCY)
        assert cost is not None
        return cost

    def own(self) -> float:
        """Seconds of a step, if this worker does not wait."""
        mode = self.balancer.mode
        return step_seconds(self.compute, [self.link()], *bits_of(mode), mode.depth)

    def steps(self, count: int, late: float = 1.0) -> list[ModeChange]:
        """The changes of that many steps, each `late` times as long on its way."""
        changes = []
        for _ in range(count):
            mode, link, period = self.balancer.mode, self.link(), max(self.own(), self.others)
            push, pull = (link.one_way_seconds(bits) + LATENCY for bits in bits_of(mode))
            self.now += period
            noisy = [x * late * self.luck.lognormvariate(0, self.noise) for x in (push, pull)]
            compute = self.compute * self.luck.lognormvariate(0, self.noise)
            one = TimedStep(mode, compute, noisy[0], period - self.own(), noisy[1], self.now)
            if (change := self.balancer.hear(one)) is not None:
                changes.append(change)
        return changes


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("kind", ["free", "round"])
def test_nothing_changes_without_a_reason(kind: str, noise: float) -> None:
    assert Pipeline(kind, noise=noise).steps(300) == []


def test_on_a_link_that_shrinks_bits_fall_and_when_it_recovers_they_rise() -> None:
    run = Pipeline()
    run.steps(20)
    run.rate /= 6
    (fell,) = run.steps(WINDOW)
    assert fell.step == 20 + SOON
    assert fell.after == CODED
    assert run.own() == pytest.approx(run.compute)
    assert "16.7 MB/s: f32/f32, depth 2 -> int8/int8, depth 3" in str(fell)
    assert run.steps(100) == []
    run.rate *= 6
    rose = run.steps(3 * WINDOW)
    assert len(rose) <= 2
    assert run.balancer.mode == EXACT
    assert run.steps(100) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_it_change_no_more(seed: int) -> None:
    run = Pipeline(noise=0.05, luck=random.Random(seed))
    run.steps(20)
    run.rate /= 6
    assert 1 <= len(run.steps(200)) <= 2
    run.rate *= 6
    assert 1 <= len(run.steps(200)) <= 2
    assert run.balancer.mode == EXACT


def test_one_late_transfer_changes_nothing() -> None:
    run = Pipeline()
    run.steps(20)
    assert run.steps(1, late=10.0) == []
    assert run.steps(50) == []


def test_a_quicker_device_lets_bits_fall() -> None:
    run = Pipeline()
    run.steps(20)
    run.compute /= 4
    (fell,) = run.steps(WINDOW)
    assert bits_of(fell.after) < (32, 32)
    run.compute *= 4
    run.steps(3 * WINDOW)
    assert run.balancer.mode == EXACT


def test_where_rounds_wait_for_another_worker_it_stays_exact() -> None:
    """Its link needs 0.3 s a step, which is in time while the slowest worker takes 0.4."""
    run = Pipeline("round", others=0.4, rate=BYTES / 0.15)
    assert run.steps(100) == []
    run.others = 0.2
    (fell,) = run.steps(WINDOW)
    assert bits_of(fell.after) < (32, 32)
    assert run.own() <= 0.2
    run.others = 0.4
    run.steps(3 * WINDOW)
    assert run.balancer.mode == EXACT


def test_longer_latency_is_hidden_by_a_deeper_pipeline() -> None:
    """A transfer of 0.13 s, of which the bytes take a little: two may travel at once."""
    choice = choices()
    assert {mode.depth for mode in choice.options()} == {2, 3}
    slow = link_cost(PARAMETERS, BYTES / 0.01, 0.06)
    assert slow is not None
    balancer, changes = ModeBalancer(choice, EXACT, PARAMETERS, 0.06), []
    for k in range(WINDOW):
        one = TimedStep(EXACT, 0.1, slow.one_way_seconds(32) + 0.06, 0.0, slow.one_way_seconds(32) + 0.06, k)
        changes.append(balancer.hear(one))
    assert [change.after for change in changes if change] == [Mode(depth=3)]


def test_choices_keep_the_plans_error() -> None:
    assert set(choices().push) == {"f32", "bf16", "int8"}
    four = Mode(push="int4", pull="bf16", depth=5)
    assert choices(mode=four).push[-1] == "int4"
    assert choices(mode=four).depths == (2, 5)


@pytest.mark.parametrize("codec", ["f16", "nf4"])
def test_a_codec_that_the_planner_does_not_choose_by_itself_is_left_too(codec: CodecName) -> None:
    """A cluster file may state it."""
    mode = Mode(push=codec, pull=codec, depth=2)
    (change,) = Pipeline(mode=mode).steps(WINDOW)
    assert (change.before, change.after.push) == (mode, "f32")
