"""benchmarks/checkpoint.py, small: a run with checkpoints and one without, and what their steps say."""

from __future__ import annotations

from pathlib import Path

import checkpoint
import pytest
from sampled import sampled

SMALL = checkpoint.Size(layers=2, width=32, batch=4, every=10)


@pytest.mark.parametrize("saves", sampled([True, False]))
def test_a_run(shm: Path, tmp_path: Path, saves: bool) -> None:
    found = checkpoint.measure(SMALL, tmp_path, 1, saves=saves)
    assert len(found.steps) == 2 * SMALL.every - 1
    assert (found.bytes > 3 * 4 * SMALL.parameters) == saves
    assert len(found.saves) <= saves


def test_the_steps_after_a_save_are_compared_with_those_before_the_next() -> None:
    """Versions 2 to 16 took so long; saves are due at 4, 8 and 12."""
    steps = [1.0, 1.0, 1.0, 5.0, 3.0, 1.0, 1.0, 7.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0]
    measured = checkpoint.Measured(steps, [], 0)
    assert measured.pairs(4) == [(8.0, 2.0), (8.0, 2.0), (10.0, 2.0)]
    assert checkpoint.costs(measured, 4) == [6.0, 6.0, 8.0]
