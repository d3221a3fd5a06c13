"""Costs: the arrays compute what the scalars compute, bit for bit, and the inverse is exact."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.solver.costs import Cost, Costs, Line, Table

CAP = 60
quick = settings(derandomize=True, deadline=None, max_examples=examples(22, 150))
seconds = st.one_of(st.sampled_from([0.25, 0.5, 1.0, 3.0]), st.floats(1e-6, 1e3))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    batches = sorted(draw(st.sets(st.integers(1, CAP), min_size=1, max_size=6)))
    times = sorted(draw(st.lists(seconds, min_size=len(batches), max_size=len(batches))))
    return Table(tuple(zip(batches, times, strict=True)))


slopes = st.one_of(st.just(0.0), st.floats(1e-18, 1e-12), seconds)
costs = st.one_of(
    st.builds(Line, seconds, slopes),
    st.builds(Line, st.just(0.0), seconds, seconds),
    st.builds(Line, st.floats(-1.0, 0.0), seconds, seconds),
    tables(),
)


@quick
@given(st.lists(costs, min_size=1, max_size=8), st.integers(1, CAP + 5))
def test_arrays_give_the_bits_of_the_scalars(some: list[Cost], batch: int) -> None:
    stacked = Costs.stack(some)
    assert stacked.seconds(np.full(len(some), batch)).tolist() == [cost.seconds(batch) for cost in some]
    picked = np.array([len(some) - 1, 0, 0])
    assert stacked.take(picked).seconds(np.full(3, batch)).tolist() == [
        some[k].seconds(batch) for k in picked
    ]


@quick
@given(costs)
def test_costs_never_fall(cost: Cost) -> None:
    times = [cost.seconds(b) for b in range(1, CAP + 5)]
    assert times == sorted(times)
    assert times[0] > 0


@quick
@given(st.lists(costs, min_size=1, max_size=8), st.integers(0, 9), st.integers(1, CAP), seconds)
def test_the_inverse_is_exact(some: list[Cost], which: int, at: int, t: float) -> None:
    cost = some[which % len(some)]
    cap = np.full(len(some), CAP)
    exact_time = cost.seconds(at)
    for limit in (t, exact_time, math.nextafter(exact_time, 0)):
        if not math.isfinite(limit):
            continue
        found = Costs.stack(some).largest_batch(limit, cap)
        expected = [max([b for b in range(1, CAP + 1) if c.seconds(b) <= limit], default=0) for c in some]
        assert found.tolist() == expected


def in_parts(cost: Cost, micro: int, batch: int) -> float:
    """The definition: full micro-batches one after another, then the rest."""
    full, rest = divmod(batch - 1, micro)
    return full * cost.seconds(micro) + cost.seconds(rest + 1)


@quick
@given(costs, st.integers(1, CAP), st.integers(1, 2 * CAP), seconds)
def test_accumulation_is_micro_batches_one_after_another(cost: Cost, micro: int, cap: int, t: float) -> None:
    whole = Costs.stack([cost]).accumulated(np.array([micro]))
    micro = int(whole.micro[0]) if whole.micro is not None else 0  # a table may end before
    times = [float(whole.seconds(np.array([b]))[0]) for b in range(1, cap + 1)]
    assert times == sorted(times)
    assert times == pytest.approx([in_parts(cost, micro, b) for b in range(1, cap + 1)], rel=1e-12)
    assert times[:micro] == [cost.seconds(b) for b in range(1, min(micro, cap) + 1)]
    for limit in (t, times[-1], times[len(times) // 2], math.nextafter(times[-1], 0)):
        expected = max([b for b in range(1, cap + 1) if times[b - 1] <= limit], default=0)
        assert whole.largest_batch(limit, np.array([cap])).tolist() == [expected]


@quick
@given(st.lists(costs, min_size=1, max_size=8), st.integers(1, CAP), seconds, seconds, st.booleans())
def test_what_comes_once_is_added_once(
    some: list[Cost], micro: int, transfer: float, t: float, in_micro_batches: bool
) -> None:
    plain = Costs.stack(some)
    if in_micro_batches:
        plain = plain.accumulated(np.full(len(some), micro))
    sent, cap = replace(plain, transfer=np.full(len(some), transfer)), np.full(len(some), CAP)
    times = np.array([plain.seconds(np.full(len(some), b)) + transfer for b in range(1, CAP + 1)])
    assert np.array_equal(times, [sent.seconds(np.full(len(some), b)) for b in range(1, CAP + 1)])
    for limit in (t, transfer, t + transfer, float(times[micro - 1, 0])):
        if math.isfinite(limit):
            assert sent.largest_batch(limit, cap).tolist() == (times <= limit).sum(axis=0).tolist()


def test_a_slope_too_small_to_invert_is_still_exact() -> None:
    flat = Line(1.0, 1e-17)
    cap = np.array([1_000_000])
    step = next(b for b in (10 * k for k in range(1, 10**5)) if flat.seconds(b) > 1.0)
    last = max(b for b in range(step - 10, step + 1) if flat.seconds(b) == 1.0)
    assert Costs.stack([flat]).largest_batch(1.0, cap).tolist() == [last]


def test_lines_from_arrays_are_stacked_lines() -> None:
    made, stacked = (
        Costs.lines([1.0, 2.0], [0.5, 0.25], 1.5),
        Costs.stack([Line(1, 0.5, 1.5), Line(2, 0.25, 1.5)]),
    )
    batch = np.array([3, 7])
    assert made.seconds(batch).tolist() == stacked.seconds(batch).tolist()


def test_a_table_ends_where_its_measurements_end() -> None:
    table = Table(((4, 1.0), (8, 2.0)))
    assert [table.seconds(b) for b in (1, 4, 6, 8, 9)] == [1.0, 1.0, 1.5, 2.0, math.inf]
    both = Costs.stack([table, Line(0.0, 1.0)])
    assert both.last_batch(np.array([50, 50])).tolist() == [8, 50]


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, -1e-9), (1.0, math.inf), (-1.0, 0.5), (0.0, 0.0)])
def test_what_is_no_line_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="not a cost"):
        Line(*bad)
    with pytest.raises(ValueError, match="not a cost: worker 1"):
        Costs.lines([1.0, bad[0]], [1.0, bad[1]])


@pytest.mark.parametrize(
    "points",
    [(), ((0, 1.0),), ((2, 1.0), (2, 2.0)), ((1, 2.0), (2, 1.0)), ((1, math.nan),), ((1, 0.0),)],
)
def test_what_is_no_table_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"table|seconds"):
        Table(points)
