"""Which ranks are stragglers: slower than the others, or than themselves, by versions and by time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyps.formats import Jitter
from pyps.simulate import Scenario, SimWorker, simulate
from pyps.store.stragglers import StepPace, Straggler, stragglers


def of_run(seconds: list[float], policy: str) -> list[Straggler]:
    """The stragglers among workers with equal batches, of a simulated run."""
    workers = tuple(
        SimWorker(f"w{k}", 8, lambda _, t=t: t, Jitter(sigma=0.1))  # type: ignore[misc]
        for k, t in enumerate(seconds)
    )
    result = simulate(Scenario(workers), policy, iterations=50, seed=1)
    paces = [StepPace(t, rank.staleness_mean) for t, rank in zip(seconds, result.ranks, strict=True)]
    pushes = sum(rank.pushes for rank in result.ranks) / result.versions
    return stragglers(paces, len(seconds), pushes)


@pytest.mark.parametrize("policy", ["asp", "saps", "dynsgd"])
@pytest.mark.parametrize("slow", [1, 3, 28, 60])
def test_static_stragglers_show_by_their_versions(policy: str, slow: int) -> None:
    found = of_run([1.0] * 4 + [10.0] * slow, policy)
    assert found == [Straggler()] * 4 + [Straggler("static", "static")] * slow


@pytest.mark.parametrize("policy", ["softsync:n=4", "quorum:k=28,grace=0"])
def test_so_they_do_where_a_version_takes_several_pushes(policy: str) -> None:
    assert of_run([1.0] * 4 + [10.0] * 28, policy) == [Straggler()] * 4 + [Straggler("static", "static")] * 28


def test_less_than_a_version_is_not_late() -> None:
    rounds = [StepPace(1.0, 0.4), StepPace(1.0, 0.1, 1.0, 1.0)]
    assert stragglers(rounds, 2, pushes=2.0) == [Straggler()] * 2


@pytest.mark.parametrize("policy", ["bsp", "r2sp", "asp", "softsync", "quorum"])
def test_equal_workers_have_none(policy: str) -> None:
    assert of_run([1.0] * 8, policy) == [Straggler()] * 8


@pytest.mark.parametrize("policy", ["bsp", "r2sp"])
def test_where_all_wait_they_show_by_time_alone(policy: str) -> None:
    assert of_run([1.0] * 3 + [10.0], policy)[3] == Straggler("", "static")


def test_a_dynamic_straggler_is_late_by_its_own_measure() -> None:
    usual = StepPace(1.0, 3.0)
    paces = [usual, usual, usual, StepPace(1.0, 3.0, seconds_now=4.0, versions_now=12.0)]
    assert stragglers(paces, 4) == [Straggler()] * 3 + [Straggler("dynamic", "dynamic")]
    waits = StepPace(1.0, 3.0, seconds_now=1.9, versions_now=6.0)
    assert stragglers([usual, usual, usual, waits], 4)[3] == Straggler(), "twice is no straggler yet"


def test_words() -> None:
    assert str(Straggler()) == ""
    assert str(Straggler("static", "static")) == "static straggler by version and time"
    assert str(Straggler("static", "dynamic")) == "static straggler by version, dynamic straggler by time"
    assert str(Straggler("", "dynamic")) == "dynamic straggler by time"


@given(st.lists(st.tuples(*[st.floats(0.0, 1e6)] * 4), min_size=1, max_size=6), st.floats(0.01, 100.0))
def test_units_of_time_and_order_do_not_matter(numbers: list[tuple[float, ...]], unit: float) -> None:
    paces = [StepPace(*row) for row in numbers]
    found = stragglers(paces, len(paces))
    assert stragglers(paces[::-1], len(paces)) == found[::-1]
    binary = 2.0 ** round(unit)
    scaled = [StepPace(p.seconds * binary, p.versions, p.seconds_now * binary, p.versions_now) for p in paces]
    assert stragglers(scaled, len(paces)) == found


def test_a_rank_without_a_step_is_none() -> None:
    assert stragglers([StepPace(1.0, 1.0), StepPace(0.0, 0.0, 50.0, 50.0)], 2)[1] == Straggler()
