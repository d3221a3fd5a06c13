"""benchmarks/checkpoint.py, small: a run with checkpoints and one without, and what a pair of them says."""

from __future__ import annotations

from pathlib import Path

import checkpoint
import pytest

SMALL = checkpoint.Size(layers=2, width=32, batch=4, every=10, saves=1)


@pytest.mark.parametrize("saves", [True, False])
def test_a_run(shm: Path, tmp_path: Path, saves: bool) -> None:
    found = checkpoint.measure(SMALL, tmp_path, saves=saves)
    assert len(found.iterations) == SMALL.iterations - 1 - checkpoint.WARM_UP
    assert (found.bytes > 3 * 4 * SMALL.parameters) == saves
    assert len(found.saves) <= SMALL.saves * saves


def test_a_pair() -> None:
    saved = checkpoint.Measured([0.1, 0.4, 0.1, 0.2], [1.0, 2.0], 5)
    pair = checkpoint.Pair(saved, checkpoint.Measured([0.1] * 4, [], 0))
    assert (pair.share, pair.cost) == (pytest.approx(1.0), pytest.approx(0.2))
