"""The exact split: equal to brute force, and the properties that any optimum has."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.errors import Infeasible
from pyps.solver.costs import Cost, Costs, Line, Table
from pyps.solver.exact.minmax import Problem, Solution, solve
from pyps.solver.milp.relaxed import relaxed_seconds

MAX_B = 14
ROUNDING = 1e-9
seconds = st.one_of(st.sampled_from([0.25, 0.5, 1.0, 2.0]), st.floats(0.01, 3.0))


@dataclass(frozen=True)
class Worker:
    cost: Cost
    min_batch: int = 1
    max_batch: int = MAX_B
    batch_multiple: int = 1
    required: bool = False
    micro: int = MAX_B

    def seconds(self, batch: int) -> float:
        """Full micro-batches one after another, then the rest, rounded as the arrays round."""
        if self.micro >= MAX_B:
            return self.cost.seconds(batch)
        return float(costs_of([self]).seconds(np.array([batch]))[0])

    def most(self) -> int:
        """Its cap; a table says nothing past its end, and is not accumulated unless it may be."""
        table = self.cost if self.micro >= MAX_B and isinstance(self.cost, Table) else None
        return min(self.max_batch, table.points[-1][0]) if table else self.max_batch

    def batches(self, B: int) -> list[int]:
        """All that it may take of B samples: the definition, not the method."""
        used = [
            b
            for b in range(1, B + 1)
            if self.min_batch <= b <= self.max_batch
            and b % self.batch_multiple == 0
            and math.isfinite(self.seconds(b))
        ]
        return used if self.required else [0, *used]


def costs_of(workers: list[Worker]) -> Costs:
    costs = Costs.stack([w.cost for w in workers])
    if all(w.micro >= MAX_B for w in workers):
        return costs
    return costs.accumulated(np.array([w.micro for w in workers]))


def problem(workers: list[Worker], B: int) -> Problem:
    return Problem.of(
        costs_of(workers),
        B,
        min_batch=[w.min_batch for w in workers],
        max_batch=[w.most() for w in workers],
        batch_multiple=[w.batch_multiple for w in workers],
        required=[w.required for w in workers],
    )


def brute_force(workers: list[Worker], B: int) -> float | None:
    """The least maximum over every split that there is."""
    return min(
        (
            max(w.seconds(b) if b else 0.0 for w, b in zip(workers, split, strict=True))
            for split in itertools.product(*(w.batches(B) for w in workers))
            if sum(split) == B
        ),
        default=None,
    )


@st.composite
def tables(draw: st.DrawFn) -> Table:
    batches = sorted(draw(st.sets(st.integers(1, MAX_B), min_size=1, max_size=5)))
    times = sorted(draw(st.lists(seconds, min_size=len(batches), max_size=len(batches))))
    return Table(tuple(zip(batches, times, strict=True)))


lines = st.builds(Line, seconds, seconds)
knees = st.builds(Line, st.floats(0.0, 0.5), seconds, st.sampled_from([1.0, 2.5]))
flat = st.builds(Line, seconds, st.just(0.0))
workers = st.builds(
    Worker,
    cost=st.one_of(lines, knees, flat, tables()),
    min_batch=st.sampled_from([1, 1, 2, 5, 7]),
    max_batch=st.sampled_from([3, 6, 8, MAX_B]),
    batch_multiple=st.sampled_from([1, 1, 2, 3]),
    required=st.sampled_from([False, False, False, True]),
    micro=st.sampled_from([MAX_B, MAX_B, 2, 5]),
)
plain = st.builds(Worker, cost=st.one_of(lines, knees))
clusters = st.one_of(
    st.lists(workers, min_size=1, max_size=4),
    st.lists(plain, min_size=1, max_size=4),
    st.lists(workers, min_size=1, max_size=2).map(lambda some: [w for w in some for _ in range(2)]),
)


@settings(derandomize=True, deadline=None, max_examples=examples(30, 600))
@given(clusters, st.integers(1, MAX_B), st.randoms(use_true_random=False))
def test_equal_to_brute_force_and_to_itself_permuted(some: list[Worker], B: int, luck: random.Random) -> None:
    best = brute_force(some, B)
    if best is None:
        with pytest.raises(Infeasible):
            solve(problem(some, B))
        return
    found = solve(problem(some, B))
    assert found.iteration_seconds == best
    assert found.batches.sum() == B
    assert all(int(b) in w.batches(B) for w, b in zip(some, found.batches, strict=True))
    shuffled = list(some)
    luck.shuffle(shuffled)
    again = solve(problem(shuffled, B))
    assert again.iteration_seconds == best
    assert sorted(again.batches) == sorted(found.batches)


@settings(derandomize=True, deadline=None, max_examples=examples(22, 150))
@given(clusters, st.integers(1, MAX_B))
def test_the_nearest_batches_that_a_refusal_names_are_the_nearest(some: list[Worker], B: int) -> None:
    try:
        solve(problem(some, B))
    except Infeasible as refusal:
        named = [int(word) for word in refusal.nearest.split() if word.isdigit()]
        if refusal.reason.startswith("global_batch") and named:
            limit = max(named) + MAX_B
            feasible = {b for b in range(1, limit) if brute_force(some, b) is not None}
            assert set(named) <= feasible
            assert min(abs(b - B) for b in feasible) == min(abs(b - B) for b in named)


many = st.integers(2, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.0, 2.0), min_size=n, max_size=n),
        st.lists(st.floats(1e-3, 1.0), min_size=n, max_size=n),
        st.integers(1, 4000),
    )
)
thorough = settings(derandomize=True, deadline=None, max_examples=examples(15, 100))


def lines_split(c: list[float], a: list[float], B: int) -> Solution:
    return solve(Problem.of(Costs.lines(c, a), B))


@thorough
@given(many, st.integers(-20, 20))
def test_the_unit_of_time_does_not_matter(case: tuple[list[float], list[float], int], power: int) -> None:
    c, a, B = case
    factor = 2.0**power  # a power of two changes no bit of any mantissa
    first, scaled = lines_split(c, a, B), lines_split([x * factor for x in c], [x * factor for x in a], B)
    assert scaled.iteration_seconds == factor * first.iteration_seconds
    assert scaled.batches.tolist() == first.batches.tolist()


@thorough
@given(many, st.integers(0, 39), st.floats(0.1, 1.0))
def test_a_faster_worker_never_lengthens_it(
    case: tuple[list[float], list[float], int], which: int, factor: float
) -> None:
    c, a, B = case
    k = which % len(c)
    faster_c, faster_a = list(c), list(a)
    faster_c[k], faster_a[k] = c[k] * factor, a[k] * factor
    assert lines_split(faster_c, faster_a, B).iteration_seconds <= lines_split(c, a, B).iteration_seconds


@thorough
@given(many)
def test_within_one_sample_of_the_relaxed_optimum(case: tuple[list[float], list[float], int]) -> None:
    c, a, B = case
    instance = Problem.of(Costs.lines(c, a), B)
    found = solve(instance)
    bound = relaxed_seconds(instance, found.iteration_seconds)
    assert bound <= found.iteration_seconds <= bound + max(a) + ROUNDING
    closed = (B + sum(one / each for one, each in zip(c, a, strict=True))) / sum(1 / each for each in a)
    if all(closed > x for x in c):  # then no bound binds
        assert bound == pytest.approx(closed, rel=ROUNDING)
    assert found.batches.sum() == B


LBB = [
    ((128, 0.08181), (167, 0.10494)),
    ((128, 0.08149), (167, 0.10414)),
    ((128, 0.08539), (158, 0.10346)),
    ((128, 0.39292), (20, 0.10441)),
]


def test_the_published_cluster() -> None:
    """LBB (doi 10.1007/s11227-023-05886-w), Table 2: there [167, 167, 158, 20] in 104.94 ms."""
    a = [(s1 - s0) / (b1 - b0) for (b0, s0), (b1, s1) in LBB]
    c = [s0 - slope * b0 for slope, ((b0, s0), _) in zip(a, LBB, strict=True)]
    found = lines_split(c, a, 512)
    assert found.batches.tolist() == [166, 167, 159, 20]
    assert found.iteration_seconds == pytest.approx(0.10441)


def test_leaving_a_slow_worker_out_can_be_better() -> None:
    some = [Worker(Line(0.1, 0.01), max_batch=1000), Worker(Line(50.0, 0.01), max_batch=1000)]
    found = solve(problem(some, 100))
    assert found.batches.tolist() == [100, 0]
    assert found.seconds.tolist()[1] == 0.0
    held = solve(problem([some[0], Worker(Line(50.0, 0.01), max_batch=1000, required=True)], 100))
    assert held.batches[1] >= 1


def test_equal_floors_share_instead_of_idling() -> None:
    found = solve(Problem.of(Costs.lines([0.0, 0.0], [0.001, 0.001], 1.0), 100))
    assert found.batches.tolist() == [50, 50]


@pytest.mark.parametrize(
    ("some", "B", "reason", "nearest"),
    [
        ([Worker(Line(1, 1), max_batch=3), Worker(Line(1, 1), max_batch=4)], 8, "maxima sum to 7", "7"),
        (
            [Worker(Line(1, 1), min_batch=3, required=True)] * 2,
            5,
            "minima of the required workers sum to 6",
            "6",
        ),
        ([Worker(Line(1, 1), max_batch=99, batch_multiple=8)] * 3, 20, "batch multiples", "16 or 24"),
        (
            [
                Worker(Line(1, 1), max_batch=99, batch_multiple=6),
                Worker(Line(1, 1), max_batch=99, batch_multiple=4),
            ],
            13,
            "batch multiples",
            "12 or 14",
        ),
        ([Worker(Line(1, 1), min_batch=7), Worker(Line(1, 1), min_batch=8)], 6, "batch multiples", "is 7"),
        ([Worker(Line(1, 1), min_batch=9, max_batch=5)], 6, "maxima sum to 0", "no worker"),
    ],
)
def test_refusals_say_why_and_what_would_do(some: list[Worker], B: int, reason: str, nearest: str) -> None:
    with pytest.raises(Infeasible) as refusal:
        solve(problem(some, B))
    assert reason in refusal.value.reason
    assert nearest in refusal.value.nearest


@pytest.mark.parametrize("bad", [{"batch_multiple": 0}, {"min_batch": -1}, {"max_batch": 2**31}])
def test_bounds_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not a problem"):
        Problem.of(Costs.lines([1.0], [1.0]), 4, **bad)


def test_large_mixed_quanta_and_minima() -> None:
    """Sums and order together, where enumeration cannot reach: valid, and near the lower bound."""
    luck = np.random.default_rng(7)
    n, B = 64, 8191
    multiple, low = np.where(np.arange(n) % 3 == 0, 8, 1), np.where(np.arange(n) % 5 == 0, 32, 1)
    instance = Problem.of(
        Costs.lines(luck.uniform(0.01, 0.1, n), luck.uniform(1e-4, 1e-3, n)),
        B,
        min_batch=low,
        batch_multiple=multiple,
    )
    found = solve(instance)
    used = found.batches[found.batches > 0]
    assert found.batches.sum() == B
    assert (found.batches % multiple == 0).all()
    assert (used >= low[found.batches > 0]).all()
    bound = relaxed_seconds(instance, found.iteration_seconds)
    assert found.iteration_seconds <= bound + 2 * 8 * 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_very_many_workers_are_split_exactly_too(seed: int) -> None:
    luck = np.random.default_rng(seed)
    n = 20_000
    costs = Costs.lines(luck.uniform(0.001, 0.05, n), luck.uniform(1e-4, 5e-3, n), luck.choice([0.0, 0.1], n))
    order = np.argsort(costs.a) if seed else np.arange(n)  # sorted ones, where a sample may mislead
    cap = luck.integers(96, 513, n)
    found = solve(Problem.of(costs.take(order), 64 * n, max_batch=cap))
    t = found.iteration_seconds
    assert found.batches.sum() == 64 * n
    assert found.seconds.max() == t
    assert costs.take(order).largest_batch(t, cap).sum() >= 64 * n
    assert costs.take(order).largest_batch(math.nextafter(t, 0), cap).sum() < 64 * n
