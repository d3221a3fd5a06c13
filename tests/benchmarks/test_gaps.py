"""benchmarks/papers/gaps.py: its figures are right, at a small size."""

from __future__ import annotations

import importlib
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
