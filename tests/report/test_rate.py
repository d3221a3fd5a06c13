"""A learning rate above what a policy bears is told, with about what it would bear; others are not."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from run_tools import make_setup

from pyps.formats.records import StepRecord
from pyps.report.rate import rate_advice, step_of
from pyps.report.report import StoreTotals, make_report
from pyps.report.steps import loss_points

D, BATCH = 10, 32


def trained(
    lr: float, seed: int, workers: int = 4, batches: int = 120, curvature: float = 1.0
) -> list[StepRecord]:
    """Steps of workers in turn on least squares with noise; one worker is synchronous."""
    draw, share = np.random.default_rng(seed), BATCH // workers
    scales = np.sqrt(curvature * draw.uniform(0.1, 1.0, D))
    scales[0] = np.sqrt(curvature)
    best, w = draw.standard_normal(D), np.zeros(D)
    pulled, records = deque([w] * workers), list[StepRecord]()
    for k in range(batches * workers):
        x = draw.standard_normal((share, D)) * scales
        off = x @ (pulled.popleft() - best) + 0.3 * draw.standard_normal(share)
        w = w - lr / workers * (x.T @ off / share)
        pulled.append(w)
        loss, end = float((off**2).mean() / 2), 1.0 + k
        step, version, late = k // workers, k + 1, min(k, workers - 1)
        spans = [("compute", k, end)]
        records.append(
            StepRecord(
                k % workers, 1, step, 0, 0, k * share, share, share, version, late, 1, loss, spans, lr=lr
            )
        )
        if not loss < 1e30:
            break
    return records


def told(records: list[StepRecord]) -> str:
    return rate_advice("asp", records, loss_points(records, BATCH), BATCH)


@pytest.mark.parametrize("seed", range(20))
def test_a_good_run_is_not_told(seed: int) -> None:
    draw = np.random.default_rng(seed)
    workers, share = int(draw.choice([1, 4, 16])), float(draw.uniform(0.02, 0.5))
    assert told(trained(share, seed, workers)) == ""


@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize("over", [1.5, 3.0])
def test_a_rate_beyond_the_limit_is_told_with_the_limit(workers: int, over: float) -> None:
    limit = workers * step_of(1.0, workers - 1.0)
    text = told(trained(over * limit, 1, workers))
    assert f"a learning rate of {over * limit:.3g} is too large for asp here" in text
    assert float(text.split()[-1]) == pytest.approx(limit, rel=0.4)


def test_the_limit_is_that_of_theory() -> None:
    assert step_of(1.0, 0.0) == pytest.approx(2.0)
    assert step_of(1.0, 1.0) == pytest.approx(1.0)
    assert step_of(1.0, 7.0) == pytest.approx(2 * np.sin(np.pi / 30))
    assert step_of(1.5, 0.0) == pytest.approx(2.5)


def test_a_report_tells_it() -> None:
    limit = 4 * step_of(1.0, 3.0)
    setup = make_setup(dict.fromkeys(range(4), BATCH // 4), policy="asp")
    for over, lines in ((2.0, 1), (0.2, 0)):
        report = make_report(setup, trained(over * limit, 1), [], StoreTotals(), "finished")
        assert len([line for line in report.advice if "too large for asp here" in line]) == lines
