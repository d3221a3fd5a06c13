"""benchmarks/solver.py runs, untimed: a row for every case and every size up to a thousand workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "solver.py"


def test_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--runs", "1", "--rival-limit", "0.3", "--most-workers", "1000"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert sum(row.startswith(("| lines ", "| knees ")) for row in rows) == 2
    assert sum("quanta and a" in row for row in rows) == 3
    assert sum("shares by memory" in row for row in rows) == 1
    assert "HiGHS, ms" in done.stdout
    assert "CBC, ms" in done.stdout
    assert rows[-1].startswith("| 1,000 ")
