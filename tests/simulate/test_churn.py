"""Workers that die, come back and are replaced: what is lost, and that no sample is lost or counted twice."""

from __future__ import annotations

import numpy as np
import pytest

from pyps.formats import Churn, Jitter
from pyps.simulate import Fault, Scenario, SimWorker, simulate
from pyps.simulate.faults import churn_faults
from pyps.simulate.metrics import Metrics

CHURN = Churn(every=100.0, away=20.0, until=1000.0, gone=0.1, noticed=0.5)
HOUR = 3600.0


def second(batch: int) -> float:
    return float(batch)


def test_lives_are_as_long_as_stated() -> None:
    found = churn_faults(CHURN, 2000)
    assert found == churn_faults(CHURN, 2000)
    assert found != churn_faults(Churn(every=100.0, away=20.0, until=1000.0, gone=0.1, seed=1), 2000)
    joined = {f.rank for f in found if f.at == 0.0}
    first = [f.at for f in found if f.kind == "kill" and f.rank not in joined]
    of: dict[int, list[Fault]] = {rank: [] for rank in range(2000)}
    for fault in found:
        of[fault.rank].append(fault)
    seconds = np.zeros(2000)  # that the ranks were there
    for rank, own in of.items():
        last = [f.at for f in own if f.kind == "kill" and not f.seconds] or [CHURN.until]
        absent = sum(min(f.seconds, last[0] - f.at) for f in own if f.at < last[0])
        seconds[rank] = last[0] - absent
    deaths = sum(f.kind == "kill" and f.seconds > 0 for f in found)
    assert seconds.sum() / deaths == pytest.approx(CHURN.every, rel=0.05)
    assert min(first) > 0.0
    late = {f.rank for f in found if f.kind == "leave"}
    gone = {f.rank for f in found if f.kind == "kill" and not f.seconds}
    assert len(late) == len(gone) == 200
    assert not late & gone


def test_what_a_death_takes_by_hand() -> None:
    """One worker, steps of 10 s. It dies at 25 s, in its third step, and comes back at 100 s."""
    scenario = Scenario((SimWorker("only", 10, second),), faults=(Fault(0, 25.0, "kill", 75.0),), noticed=5.0)
    result = simulate(scenario, "asp", iterations=10**6, seconds=140.0)
    (rank,) = result.ranks
    assert rank.counted_seconds == pytest.approx(60.0)  # two steps, and four of 40 s
    assert rank.present_seconds == pytest.approx(65.0)
    assert result.useful_share == pytest.approx(60 / 65)


@pytest.mark.parametrize(
    ("policy", "depth"), [("bsp", 1), ("softsync:n=2", 1), ("softsync:n=2", 2), ("saps:threshold=fixed", 2)]
)
def test_every_sample_counts_once(policy: str, depth: int) -> None:
    workers = tuple(
        SimWorker(
            f"w{k}", 4 + k, lambda b, k=k: 0.2 * b / (1 + k % 3), Jitter(sigma=0.2), bandwidth=1e6 * (1 + k)
        )
        for k in range(12)
    )
    faults = tuple(churn_faults(Churn(every=30.0, away=8.0, until=60.0, gone=0.1), len(workers)))
    scenario = Scenario(workers, up_bytes=1e5, down_bytes=1e5, faults=faults, noticed=0.3)
    result = simulate(scenario, policy, iterations=30, depth=depth)
    assert result.samples == 30 * scenario.global_batch
    assert result.repeated == 0
    assert 0.1 < result.useful_share < 1.0


def test_samples_that_count_twice_are_found() -> None:
    metrics = Metrics(1)
    for first, samples in ((10, 5), (0, 10), (12, 2), (20, 1)):
        metrics.count(0, first, samples, 0)
    assert metrics.repeated() == 2
    assert Metrics(1).repeated() == 0


@pytest.mark.parametrize("sigma", [0.0, 0.2])
@pytest.mark.parametrize(
    ("policy", "depth"), [("bsp", 1), ("asp", 2), ("saps:threshold=fixed,abort=true", 1)]
)
def test_micro_batches_at_once_change_no_time(policy: str, depth: int, sigma: float) -> None:
    """With a timeline each micro-batch is an event; a step that a death ends has then drawn less jitter."""
    workers = tuple(
        SimWorker(
            f"w{k}", 12, lambda b, k=k: 0.1 * b * (1 + k), Jitter(sigma=sigma), micro_batch=3, bandwidth=1e6
        )
        for k in range(4)
    )
    faults = () if sigma else tuple(churn_faults(Churn(every=30.0, away=8.0, until=60.0), len(workers)))
    scenario = Scenario(workers, up_bytes=1e6, down_bytes=1e6, faults=faults, local=True)
    each, once = (
        simulate(scenario, policy, iterations=20, depth=depth, timeline=timeline)
        for timeline in (True, False)
    )
    assert (once.seconds, once.samples, once.staleness) == (each.seconds, each.samples, each.staleness)
    assert once.useful_share == each.useful_share
