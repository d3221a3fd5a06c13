"""benchmarks/solver.py runs, untimed: a row for every case, each with an optimum."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "solver.py"


def test_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--runs", "1", "--highs-limit", "0"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert sum("exact" in row for row in rows) == 6
    assert all(float(row[-1]) > 0 for row in rows)
