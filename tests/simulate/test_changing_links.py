"""A link that shrinks and recovers in virtual time, and workers whose codecs and depth follow it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pyps.errors import InputError
from pyps.formats import Mode
from pyps.formats.mode import CODEC_BITS
from pyps.simulate import Result, Scenario, SimWorker, simulate
from pyps.solver.links import LinkSlowdown

SIZE = 8e6  # bytes of the model
SHRUNK = LinkSlowdown(begin=6.0, end=18.0, factor=5.0)


def scenario(*slow: LinkSlowdown, compute: float = 0.12) -> Scenario:
    """A message takes 40 ms; the first worker's link shrinks."""
    near, far = (
        SimWorker(f"w{k}", 16, lambda b: compute, bandwidth=SIZE / 0.04, mode=Mode(depth=2)) for k in range(2)
    )
    return Scenario((replace(near, link_slowdowns=slow), far), up_bytes=SIZE, down_bytes=SIZE)


def run(of: Scenario, policy: str = "hps", iterations: int = 250, *, follows: bool = True) -> Result:
    codec = "plan" if follows else None
    return simulate(of, policy, iterations=iterations, depth=2, rebalance=follows, codec=codec)  # type: ignore[arg-type]


def test_a_message_on_its_way_goes_on_at_the_new_pace() -> None:
    """Serially: 40 ms, 120 ms and 40 ms; then a slowdown by 5 begins 20 ms after the first pull."""
    slow = LinkSlowdown(begin=0.02, end=math.inf, factor=5.0)
    alone = Scenario(
        (SimWorker("w", 16, lambda b: 0.12, bandwidth=SIZE / 0.04, link_slowdowns=(slow,)),), SIZE, SIZE
    )
    assert simulate(alone, "asp", iterations=1).seconds == pytest.approx(0.02 + 0.1 + 0.12 + 0.2, abs=1e-6)


@pytest.mark.parametrize("policy", ["hps", "asp"])
def test_bits_fall_on_the_link_that_shrinks_and_rise_when_it_recovers(policy: str) -> None:
    stays, follows = (run(scenario(SHRUNK), policy, follows=on) for on in (False, True))
    assert stays.mode_changes == ()
    assert {one.rank for one in follows.mode_changes} == {0}
    fell = [one for one in follows.mode_changes if one.at < 18.0]
    rose = [one for one in follows.mode_changes if one.at >= 18.0]
    assert 6.0 < fell[0].at < 9.0
    assert max(CODEC_BITS[fell[-1].change.after.push], CODEC_BITS[fell[-1].change.after.pull]) <= 16
    assert (rose[-1].change.after.push, rose[-1].change.after.pull) == ("f32", "f32")
    assert rose[-1].at < 21.0
    assert len(follows.mode_changes) <= 5
    assert follows.samples == stays.samples
    undisturbed = run(scenario(), policy).seconds
    assert follows.seconds < 1.06 * undisturbed
    if policy == "hps":
        assert stays.seconds > 1.25 * undisturbed


def test_nothing_changes_where_links_do_not() -> None:
    assert run(scenario()).mode_changes == ()
    assert run(scenario(), "ssp:bound=2").mode_changes == ()


def test_the_others_keep_their_bits_and_a_device_counts_too() -> None:
    """When both devices become quicker, the transfers are the longest part: both links carry fewer bits."""
    quick = scenario(compute=0.03)
    found = run(quick)
    assert {one.rank for one in found.mode_changes} == {0, 1}
    assert found.iteration_seconds < 0.6 * run(quick, follows=False).iteration_seconds


def test_a_link_that_is_not_the_workers_own_is_refused() -> None:
    worker = SimWorker("w", 16, lambda b: 0.1, link_slowdowns=(SHRUNK,))
    with pytest.raises(
        InputError, match=r"w\.link: found a slower link; expected a bandwidth of the worker's"
    ):
        Scenario((worker,), SIZE, SIZE)
    with pytest.raises(InputError, match="behind rack"):
        Scenario((replace(worker, host="rack"),), SIZE, SIZE, hosts={"rack": 1e6})
