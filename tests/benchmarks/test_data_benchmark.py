"""benchmarks/data.py at a size of seconds: loading overlaps, and the report names a slow loader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "data.py"


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.thorough
def test_a_slow_loader_is_named_and_gives_samples_away() -> None:
    """Not how long iterations last, which a busy machine decides: that is the benchmark's."""
    command = [sys.executable, str(BENCHMARK), "--cases", "6", "--iterations", "20", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "rank 0 is held up by its data" in done.stdout, done.stderr
    assert "- met: the same with `--rebalance`: samples move away from rank 0" in done.stdout
