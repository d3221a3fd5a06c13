"""benchmarks/simulate.py runs, untimed: a row for every case."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "simulate.py"


def test_it_runs(tmp_path: Path) -> None:
    plot = tmp_path / "growth.png"
    command = [
        sys.executable,
        str(BENCHMARK),
        "--workers",
        "3",
        "5",
        "--iterations",
        "2",
        "--plot",
        str(plot),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sum(line.startswith("| ") for line in done.stdout.splitlines()) == 1 + 4 * 2 * 2
    assert "events to the power of: ssp " in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
