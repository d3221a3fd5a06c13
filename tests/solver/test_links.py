"""Links, turns and pipelines: transfers by bits, R2SP's ring and remedies, H-PS's periods and bits."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from pyps.formats import Bits, Mode
from pyps.formats.options import MAX_DEPTH
from pyps.solver.links import ERROR, WIRE_BYTES, LinkCost, link_cost, step_seconds
from pyps.solver.mode import bits_of, step_of
from pyps.solver.systems.hps import hps_estimate, hps_modes
from pyps.solver.systems.r2sp import fits, r2sp_schedule, remedies
from pyps.store.codec import decode, encode, encoded_bytes

CODECS: dict[Bits, str] = {32: "f32", 16: "bf16", 8: "int8", 4: "int4"}
NUMBERS = 1 << 18


@pytest.mark.parametrize("bits", CODECS)
def test_bytes_and_errors_are_those_of_the_codecs(bits: Bits) -> None:
    values = np.random.default_rng(0).standard_normal(NUMBERS).astype(np.float32)
    data, _ = encode(values, CODECS[bits])
    lost = decode(data, CODECS[bits], NUMBERS) - values
    assert encoded_bytes(CODECS[bits], NUMBERS) / NUMBERS == WIRE_BYTES[bits]
    error = float(np.sqrt((lost**2).mean() / (values**2).mean()))
    assert error == pytest.approx(ERROR[bits], rel=0.03)


def test_transfers_are_pushed_and_pulled() -> None:
    parameters = 1_000_003
    link = link_cost(parameters, 8 * parameters, 0.25)
    assert link is not None
    assert link.seconds() == pytest.approx(2 * (0.25 + 0.5))
    assert link.seconds(8, 32) == pytest.approx(0.5 + 0.5 + 0.5 * 1.015625 / 4)
    bare = link_cost(parameters, 8 * parameters, None)
    assert bare is not None
    assert bare.seconds() == pytest.approx(1.0)
    assert link_cost(None, 8e6, 0.1) is None
    assert link_cost(1_000_000, None, 0.1) is None


def test_a_link_carries_pushes_and_pulls_at_once_and_a_store_here_does_not() -> None:
    link, store = LinkCost(0.3, 1.0), LinkCost(0.3, 1.0, duplex=False)
    assert (link.busy_seconds(), link.busy_seconds(8, 32)) == (1.0, 1.0)
    assert link.seconds() == store.seconds() == store.busy_seconds() == pytest.approx(2.6)
    assert step_seconds(0.1, [link], depth=2) == pytest.approx(2.6)
    assert step_seconds(0.1, [link], depth=3) == pytest.approx(1.3)
    assert step_seconds(0.1, [link], depth=4) == 1.0
    assert step_seconds(0.1, [store], depth=8) == pytest.approx(2.6)
    assert step_seconds(0.1, [link, LinkCost(0.0, 1.5)], depth=8) == 1.5, "both are in use at once"
    assert step_seconds(0.1, [link], 8, 32, depth=8) == 1.0


def both_ways(seconds: float) -> LinkCost:
    """A link whose push and pull take so long together."""
    return LinkCost(0.0, seconds / 2)


def test_turns_are_evenly_spaced_and_feasible_where_they_fit() -> None:
    ring = r2sp_schedule([0, 2, 3, 5], [1.0, 2.0, 1.5, 1.0], [both_ways(x) for x in (0.1, 0.5, 0.1, 0.1)])
    assert ring.feasible is True
    assert (ring.period_seconds, ring.gap_seconds) == (2.5, 0.625)
    assert ring.order == [0, 5, 3, 2]  # the worker that finishes first goes first
    assert ring.offsets_seconds == [0.0, 0.625, 1.25, 1.875]
    assert r2sp_schedule([0, 1], [1.0, 2.0], [both_ways(0.5), None]).feasible is None


def test_a_long_turn_takes_from_the_gaps_of_the_others() -> None:
    ring = r2sp_schedule([0, 1, 2], [1.0, 1.0, 1.0], [both_ways(x) for x in (0.1, 0.7, 0.1)])
    assert ring.feasible is True
    ends = [*ring.offsets_seconds[1:], ring.period_seconds]
    turns = [(0.1, 0.7, 0.1)[rank] for rank in ring.order]
    for start, turn, end in zip(ring.offsets_seconds, turns, ends, strict=True):
        assert start + turn <= end + 1e-12


def test_turns_that_do_not_fit_say_what_would_make_them() -> None:
    compute, links = [1.0, 1.0, 1.0], [both_ways(1.0)] * 3
    jammed = r2sp_schedule([0, 1, 2], compute, links)
    assert jammed.feasible is False
    assert jammed.period_seconds == 3.0
    assert jammed.offsets_seconds == [0.0, 1.0, 2.0]

    def at(batch: int) -> tuple[list[float], list[LinkCost]] | None:
        return None if batch > 100 else ([batch / 10] * 3, links)

    found = remedies(compute, links, 10, at)
    assert (found.global_batch, found.bits, found.links) == (20, 16, 2)
    assert fits([2.0] * 3, [1.0] * 3)
    assert not fits([1.9] * 3, [1.0] * 3)
    assert (
        remedies(compute, links, 10, lambda b: None if b > 15 else ([b / 10] * 3, links)).global_batch is None
    )
    latency_bound = [LinkCost(10.0, 0.1)] * 3
    assert remedies(compute, latency_bound, 10, None).bits is None


def test_overlap_is_estimated_only_where_transfers_are_known() -> None:
    assert hps_modes([1.0, 2.0], [both_ways(0.5), None]) == []
    assert msgspec.to_builtins(hps_estimate([1.0, 2.0], [both_ways(0.5), None], [])) == {}
    links = [both_ways(1.5), both_ways(0.25)]
    designs = hps_modes([1.0, 2.0], links)
    both = hps_estimate([1.0, 2.0], links, designs)
    assert (both.serial_seconds, both.pipelined_seconds) == (2.5, 2.0)
    assert designs == [Mode(depth=2)] * 2


@pytest.mark.parametrize(
    ("link", "depth", "seconds"),
    [
        (LinkCost(0.0, 0.2), 2, 1.0),
        (LinkCost(0.0, 1.0), 3, 1.0),
        (LinkCost(0.0, 1.0, duplex=False), 2, 2.0),
        (LinkCost(1.2, 0.1), 4, 1.0),  # 2.6 s in transfer, hardly any of it on the wire
        (LinkCost(0.0, 0.0), 1, 1.0),
    ],
)
def test_a_pipeline_is_as_deep_as_latency_asks(link: LinkCost, depth: int, seconds: float) -> None:
    (mode,) = hps_modes([1.0], [link])
    assert (mode, step_of(1.0, [link], mode)) == (Mode(depth=depth), seconds)


@pytest.mark.parametrize("budget", [0.0, 0.005, 0.05, 0.2])
def test_bits_are_the_most_exact_ones_at_the_least_period(budget: float) -> None:
    luck = np.random.default_rng(int(1000 * budget))
    for _ in range(20):
        compute = luck.uniform(0.1, 1.0, 3).tolist()
        links = [LinkCost(float(luck.uniform(0, 0.01)), float(luck.uniform(0.01, 2.0))) for _ in range(3)]
        designs = hps_modes(compute, links, budget)
        made = hps_estimate(compute, links, designs)
        allowed = [name for bits, name in CODECS.items() if ERROR[bits] <= budget]
        ways = [
            Mode(push=push, pull=pull, depth=depth)
            for push, pull, depth in itertools.product(allowed, allowed, range(2, MAX_DEPTH + 1))
        ]
        pairs = list(zip(compute, links, strict=True))
        least = max(min(step_of(t, [x], way) for way in ways) for t, x in pairs)
        assert made.quantized_seconds == pytest.approx(least)
        for mode, (t, x) in zip(designs, pairs, strict=True):
            as_fast = [way for way in ways if step_of(t, [x], way) <= least * (1 + 1e-12)]
            assert worst(mode) == min(map(worst, as_fast))
            assert mode.depth == min(way.depth for way in as_fast if bits_of(way) == bits_of(mode))


def worst(mode: Mode) -> float:
    """Return the larger error of a push and a pull."""
    return max(ERROR[bits] for bits in bits_of(mode))
