"""Which totals sets of integers sum to: against enumeration."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.solver.exact.subset_sum import Progression, nearest_sums, subset_sum

quick = settings(derandomize=True, deadline=None, max_examples=examples(30, 200))


@st.composite
def progression(draw: st.DrawFn) -> Progression:
    step = draw(st.integers(1, 4))
    low = step * draw(st.integers(0, 4))
    return Progression(low, low + step * draw(st.integers(0, 4)), step, draw(st.booleans()))


def values(one: Progression) -> set[int]:
    return {*range(one.first, one.last + 1, one.step)} | ({0} if one.skip else set())


@quick
@given(st.lists(progression(), max_size=4), st.integers(0, 70))
def test_every_total_is_found_or_not_as_enumeration_says(sets: list[Progression], total: int) -> None:
    sums = {sum(picked) for picked in itertools.product(*map(values, sets))}
    found = subset_sum(sets, total)
    assert (found is not None) == (total in sums)
    if found is not None:
        assert sum(found) == total
        assert all(value in values(one) for value, one in zip(found, sets, strict=True))


@quick
@given(st.lists(progression(), min_size=1, max_size=4), st.integers(1, 70))
def test_the_nearest_totals_are_the_nearest(sets: list[Progression], total: int) -> None:
    sums = {sum(picked) for picked in itertools.product(*map(values, sets))} - {0}
    if total in sums or total < min(sums, default=total):
        return
    below, above = [s for s in sums if s < total], [s for s in sums if s > total]
    assert nearest_sums(sets, total) == [f(s) for f, s in ((max, below), (min, above)) if s]


def test_big_totals_are_exact() -> None:
    coins = [Progression(0, 10**6, 6), Progression(0, 10**6, 10), Progression(0, 10**6, 15)]
    assert subset_sum(coins, 29) is None  # the largest that 6, 10 and 15 do not make
    found = subset_sum(coins, 1_000_001)
    assert found is not None
    assert sum(found) == 1_000_001
