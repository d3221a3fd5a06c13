"""A learning rate above what a policy bears is told, with about what it would bear; others are not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from run_tools import make_setup
from sampled import sampled

from pyps.formats.records import StepRecord
from pyps.report.rate import rate_advice, risen, step_of
from pyps.report.report import StoreTotals, make_report
from pyps.report.steps import loss_points

D, BATCH, HIDDEN, CLASSES = 10, 32, 32, 10
Gradient = Callable[[np.ndarray, int], tuple[float, np.ndarray]]
Problem = Callable[[np.random.Generator], tuple[np.ndarray, Gradient]]


def least_squares(draw: np.random.Generator) -> tuple[np.ndarray, Gradient]:
    """A start and the gradients of least squares with noise, whose largest curvature is 1."""
    scales = np.sqrt(draw.uniform(0.1, 1.0, D))
    scales[0] = 1.0
    best = draw.standard_normal(D)

    def gradient(w: np.ndarray, share: int) -> tuple[float, np.ndarray]:
        x = draw.standard_normal((share, D)) * scales
        off = x @ (w - best) + 0.3 * draw.standard_normal(share)
        return float((off**2).mean() / 2), x.T @ off / share

    return np.zeros(D), gradient


def network(draw: np.random.Generator) -> tuple[np.ndarray, Gradient]:
    """A start and the gradients of a ReLU network that tells classes apart: its loss is bounded."""
    centres = 2.0 * draw.standard_normal((CLASSES, D))
    shapes = (D, HIDDEN), (HIDDEN, CLASSES)
    start = np.concatenate([(draw.standard_normal(s) / np.sqrt(s[0])).ravel() for s in shapes])

    def gradient(w: np.ndarray, share: int) -> tuple[float, np.ndarray]:
        first, second = w[: D * HIDDEN].reshape(shapes[0]), w[D * HIDDEN :].reshape(shapes[1])
        of = draw.integers(CLASSES, size=share)
        x = centres[of] + draw.standard_normal((share, D))
        hidden = np.maximum(x @ first, 0.0)
        scores = hidden @ second
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        loss = float(-np.log(np.maximum(p[np.arange(share), of], 1e-30)).mean())
        p[np.arange(share), of] -= 1.0
        back = (p @ second.T) * (hidden > 0)
        return loss, np.concatenate([(x.T @ back).ravel(), (hidden.T @ p).ravel()]) / share

    return start, gradient


def trained(
    lr: float, seed: int, workers: int = 4, batches: int = 120, problem: Problem = least_squares
) -> list[StepRecord]:
    """Steps of workers in turn; one worker is synchronous."""
    draw, share = np.random.default_rng(seed), BATCH // workers
    w, gradient = problem(draw)
    pulled, records = deque([w] * workers), list[StepRecord]()
    for k in range(batches * workers):
        loss, g = gradient(pulled.popleft(), share)
        w = w - lr / workers * g
        pulled.append(w)
        end = 1.0 + k
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


@pytest.mark.parametrize("seed", sampled(range(20), *range(6)))
def test_a_good_run_is_not_told(seed: int) -> None:
    draw = np.random.default_rng(seed)
    workers, share = int(draw.choice([1, 4, 16])), float(draw.uniform(0.02, 0.5))
    assert told(trained(share, seed, workers)) == ""


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("lr", [0.05, 0.3])
def test_a_network_that_learns_is_not_told(lr: float, seed: int) -> None:
    assert told(trained(lr, seed, problem=network)) == ""


@pytest.mark.parametrize("lr", [2.0, 3.0, 10.0])
def test_a_network_whose_loss_is_bounded_is_told_though_its_loss_rises_no_further(lr: float) -> None:
    for seed in range(8):
        text = told(trained(lr, seed, problem=network))
        assert f"a learning rate of {lr:.3g} is too large for asp here" in text


def test_a_loss_that_recovers_or_is_below_zero_is_not_told() -> None:
    fell = [2.4, 2.3, 2.2, 2.1, 2.0, 5.5, 7.0, 6.5, 3.7, 1.7, 1.2, 0.9, 0.5, 0.4, 0.3, 0.3, 0.2, 0.2]
    assert risen(fell) is None
    assert risen(fell[:12]) is not None, "before it recovers"
    assert risen([-5.0 + 0.5 * k for k in range(20)]) is None


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
