"""Planner, simulator and emulation have one model of a link that workers share."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.simulate.clock import LinkClass, Network
from pyps.solver.links import FairShares, LinkCost

BYTES_PER_SECOND = 1e6
SECOND = 10**9
Sent = list[tuple[int, int]]  # milliseconds, bytes
messages = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 500_000)), min_size=1, max_size=6)


def emulated(sent: Sent) -> list[float]:
    """When each message has passed, in seconds."""
    shares, ends = FairShares(), [0.0] * len(sent)
    numbers: dict[int, int] = {}
    waiting = sorted(range(len(sent)), key=lambda k: sent[k][0])
    while waiting or numbers:
        until = {k: shares.end(number, BYTES_PER_SECOND) for k, number in numbers.items()}
        comes = [sent[waiting[0]][0] * 10**6] if waiting else []
        now = min([at for at in until.values() if at is not None] + comes)
        shares.advance(now, BYTES_PER_SECOND)
        for k, number in list(numbers.items()):
            if shares.end(number, BYTES_PER_SECOND) is None:
                ends[k] = now / SECOND
                del numbers[k]
        while waiting and sent[waiting[0]][0] * 10**6 <= now:
            k = waiting.pop(0)
            numbers[k] = shares.add(now, sent[k][1], BYTES_PER_SECOND)
    return ends


def simulated(sent: Sent) -> list[float]:
    network, ends = Network(float("inf"), [LinkClass(BYTES_PER_SECOND, shared=True)]), [0.0] * len(sent)
    waiting, left = sorted(range(len(sent)), key=lambda k: sent[k][0]), len(sent)
    while left:
        times = [network.next_end(), sent[waiting[0]][0] * 10**6 if waiting else None]
        now = min(at for at in times if at is not None)
        for k in network.finished(now):
            ends[k], left = now / SECOND, left - 1
        while waiting and sent[waiting[0]][0] * 10**6 <= now:
            k = waiting.pop(0)
            network.add(now, 0, sent[k][1], k)
    return ends


@given(messages)
@settings(max_examples=examples(18, 60), deadline=None)
def test_emulation_and_simulator_agree(sent: Sent) -> None:
    assert emulated(sent) == pytest.approx(simulated(sent), abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_comes_together_passes_in_the_planners_time(count: int) -> None:
    """The planner counts the sum of a round's pushes."""
    link = LinkCost(0.0, 0.1)
    assert emulated([(0, 100_000)] * count) == pytest.approx([count * link.one_way_seconds(32)] * count)
