"""benchmarks/papers/gaps.py and staleness.py: their figures are right, at a small size."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

from pyps.formats import Jitter

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(autouse=True)
def import_from_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_without_jitter_gaps_are_even(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = importlib.import_module("gaps")
    monkeypatch.setattr(gaps, "CYCLES", 20)
    variation, cycle = gaps.measured([0.4] * 3, Jitter(), 0)
    assert (variation, cycle) == (pytest.approx(0.0, abs=1e-6), pytest.approx(1.0, abs=1e-6))


def test_the_least_variation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that never exceed the cycle allow even gaps; those that do, do not."""
    gaps = importlib.import_module("gaps")
    monkeypatch.setattr(gaps, "AHEAD", 60)
    assert gaps.least_variation(3, Jitter(spread=0.05), 0) == pytest.approx(0.0, abs=1e-4)
    assert 0.05 < gaps.least_variation(8, Jitter(sigma=0.1), 0) < 0.4


def test_ratios_are_by_seed() -> None:
    staleness = importlib.import_module("staleness")
    slow, fast = (staleness.Timed(1.0, [f * s for s in range(1, 16)], [1.0] * 15) for f in (2.0, 1.0))
    assert staleness.ratio(fast, slow) == "2.00 (2.00 to 2.00)"
    never = staleness.Timed(1.0, [math.inf] * 15, [1.0] * 15)
    assert staleness.ratio(fast, never) == "never"
