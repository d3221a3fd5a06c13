"""Which totals sets of integers sum to: against enumeration."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pyps.solver.exact.subset_sum import Choice, nearest_sums, sums_to

quick = settings(derandomize=True, deadline=None, max_examples=200)


@st.composite
def choice(draw: st.DrawFn) -> Choice:
    step = draw(st.integers(1, 4))
    low = step * draw(st.integers(0, 4))
    return Choice(low, low + step * draw(st.integers(0, 4)), step, draw(st.booleans()))


def values(one: Choice) -> set[int]:
    return {*range(one.low, one.high + 1, one.step)} | ({0} if one.skip else set())


@quick
@given(st.lists(choice(), max_size=4), st.integers(0, 70))
def test_every_total_is_found_or_not_as_enumeration_says(choices: list[Choice], total: int) -> None:
    sums = {sum(picked) for picked in itertools.product(*map(values, choices))}
    found = sums_to(choices, total)
    assert (found is not None) == (total in sums)
    if found is not None:
        assert sum(found) == total
        assert all(value in values(one) for value, one in zip(found, choices, strict=True))


@quick
@given(st.lists(choice(), min_size=1, max_size=4), st.integers(1, 70))
def test_the_nearest_totals_are_the_nearest(choices: list[Choice], total: int) -> None:
    sums = {sum(picked) for picked in itertools.product(*map(values, choices))} - {0}
    if total in sums or total < min(sums, default=total):
        return
    below, above = [s for s in sums if s < total], [s for s in sums if s > total]
    assert nearest_sums(choices, total) == [f(s) for f, s in ((max, below), (min, above)) if s]


def test_big_totals_are_exact() -> None:
    coins = [Choice(0, 10**6, 6), Choice(0, 10**6, 10), Choice(0, 10**6, 15)]
    assert sums_to(coins, 29) is None  # the largest that 6, 10 and 15 do not make
    found = sums_to(coins, 1_000_001)
    assert found is not None
    assert sum(found) == 1_000_001
