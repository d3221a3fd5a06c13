"""A simulated run that is rebalanced: what the Balancer changes, when, and what that gains."""

from __future__ import annotations

import pytest

from pyps.simulate import Fault, Result, Scenario, SimWorker, Slowdown, simulate

PACES = (0.004, 0.006, 0.012)  # seconds a sample
BATCHES = (30, 20, 10)
B = sum(BATCHES)
SLOW = Slowdown(begin=10.0, factor=2.0)


def scenario(*slow: Slowdown, faults: tuple[Fault, ...] = ()) -> Scenario:
    """Three workers in balance, of which the first one is slowed."""
    workers = tuple(
        SimWorker(f"w{k}", b, lambda n, a=a: 0.01 + a * n, slowdowns=slow if k == 0 else ())  # type: ignore[misc]
        for k, (b, a) in enumerate(zip(BATCHES, PACES, strict=True))
    )
    return Scenario(workers, faults=faults)


def rebalanced(run: Scenario, policy: str = "bsp", iterations: int = 300) -> Result:
    result = simulate(run, policy, iterations=iterations, rebalance=True)
    assert result.samples == iterations * B
    assert result.replans is not None
    return result


def test_without_a_disturbance_nothing_changes() -> None:
    assert simulate(scenario(), "bsp", iterations=50).replans is None
    assert rebalanced(scenario()).replans == ()


def test_a_slowed_worker_gives_samples_away() -> None:
    alone, result = simulate(scenario(SLOW), "bsp", iterations=300), rebalanced(scenario(SLOW))
    first, *more = result.replans or ()
    assert 10.0 < first.at < 11.0
    assert len(more) <= 1
    assert "rank 0 slowed by 2.0x" in first.reasons[0]
    assert first.before == BATCHES
    assert first.after[0] < BATCHES[0]
    assert sum(first.after) == B
    before, after = (more or [first])[-1].iteration_seconds
    assert after < before
    # All take t seconds: t = 0.02 + 0.008 b0 = 0.01 + 0.006 b1 = 0.01 + 0.012 b2
    best = (B + 0.02 / 0.008 + 0.01 / 0.006 + 0.01 / 0.012) / (1 / 0.008 + 1 / 0.006 + 1 / 0.012)
    assert best <= after < 1.05 * best
    assert result.seconds < 0.85 * alone.seconds


def test_a_rank_that_dies_leaves_its_share_and_takes_it_back() -> None:
    fault = Fault(rank=2, at=5.0, kind="kill", seconds=10.0)
    found = rebalanced(scenario(faults=(fault,))).replans or ()
    assert [one.after[2] for one in found] == [0, BATCHES[2]]
    assert "rank 2 is away" in found[0].reasons[0]
    assert "all ranks are back" in found[1].reasons[0]
    assert 5.0 <= found[0].at < 5.3
    assert 15.0 <= found[1].at < 15.3


def test_where_no_step_waits_a_dead_rank_keeps_its_share() -> None:
    fault = Fault(rank=2, at=5.0, kind="kill", seconds=10.0)
    assert rebalanced(scenario(faults=(fault,)), "asp").replans == ()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_arguments_give_the_same_changes(depth: int) -> None:
    run = scenario(SLOW)
    both = [
        simulate(run, "ssp:bound=2", iterations=100, rebalance=True, depth=depth, seed=3) for _ in range(2)
    ]
    assert both[0].replans == both[1].replans
    assert both[0].seconds == both[1].seconds
    assert both[0].replans
