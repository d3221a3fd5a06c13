"""Links against the fluid model solved step by step with exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.simulate.clock import LinkClass, Network

SECOND = 10**9


def max_min(limits: list[tuple[Fraction, list[int]]], server: Fraction) -> dict[int, Fraction]:
    """The rate of each transfer: all rise together until a link is full. `limits`: the bandwidth of each link
    and the transfers that cross it.
    """
    rates: dict[int, Fraction] = {}
    links = [(server, [k for _, members in limits for k in members]), *limits]
    while open_ := [k for k in links[0][1] if k not in rates]:
        shares = []
        for capacity, members in links:
            free = [k for k in members if k in open_]
            if free:
                shares.append(
                    ((capacity - sum(rates.get(k, Fraction(0)) for k in members)) / len(free), free)
                )
        share, free = min(shares)
        rates |= dict.fromkeys(free, share)
    return rates


def finish_times(
    transfers: list[tuple[int, int, int]], classes: list[tuple[int, bool]], server: int
) -> dict[int, Fraction]:
    """(begin in seconds, class, bytes) -> when each ends, by steps from event to event."""
    left = {k: Fraction(size) for k, (_, _, size) in enumerate(transfers)}
    ended: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(ended) < len(transfers):
        active = [k for k, t in enumerate(transfers) if t[0] <= now and k not in ended]
        begins = [Fraction(t[0]) for t in transfers if t[0] > now]
        limits = []
        for index, (capacity, shared) in enumerate(classes):
            members = [k for k in active if transfers[k][1] == index]
            groups = [members] if shared else [[k] for k in members]
            limits += [(Fraction(capacity), group) for group in groups if group]
        rates = max_min(limits, Fraction(server)) if active else {}
        until = min([now + left[k] / rates[k] for k in active] + begins)
        for k in active:
            left[k] -= rates[k] * (until - now)
            if left[k] == 0:
                ended[k] = until
        now = until
    return ended


def simulated(
    transfers: list[tuple[int, int, int]], classes: list[tuple[int, bool]], server: int
) -> dict[int, float]:
    network = Network(server, [LinkClass(capacity, shared) for capacity, shared in classes])
    ended: dict[int, float] = {}
    begins = sorted(range(len(transfers)), key=lambda k: transfers[k][0])
    now = 0
    while len(ended) < len(transfers):
        next_end = network.next_end()
        next_begin = transfers[begins[0]][0] * SECOND if begins else None
        now = min(t for t in (next_end, next_begin) if t is not None)
        for k in network.finished(now):
            ended[k] = now / SECOND
        while begins and transfers[begins[0]][0] * SECOND <= now:
            k = begins.pop(0)
            network.add(now, transfers[k][1], transfers[k][2], k)
    assert network.concurrent == 0
    return ended


@settings(max_examples=examples(18, 60), deadline=None)
@given(
    transfers=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(1, 2000)), min_size=1, max_size=12
    ),
    capacities=st.lists(st.tuples(st.integers(50, 600), st.booleans()), min_size=3, max_size=3),
    server=st.integers(100, 1500),
)
def test_shares_are_max_min_fair(
    transfers: list[tuple[int, int, int]], capacities: list[tuple[int, bool]], server: int
) -> None:
    exact = finish_times(transfers, capacities, server)
    found = simulated(transfers, capacities, server)
    for k, seconds in exact.items():
        assert found[k] == pytest.approx(float(seconds), rel=1e-6, abs=1e-6)


def test_transfers_without_private_limits_share_equally() -> None:
    network = Network(100.0, [LinkClass()])
    for k in range(4):
        network.add(0, 0, 50.0, k)
    assert network.next_end() == 2 * SECOND
    assert sorted(network.finished(2 * SECOND)) == [0, 1, 2, 3]
    assert network.next_end() is None
    assert network.peak == 4
    network = Network(math.inf, [LinkClass(10.0)])
    network.add(0, 0, 50.0, 0)
    assert network.next_end() == 5 * SECOND
