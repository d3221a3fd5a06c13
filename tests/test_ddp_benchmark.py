"""benchmarks/ddp.py runs, untimed: pairs of steps with plain DDP and with the hook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "ddp.py"


def test_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "hook", "--pairs", "1", "--width", "16", "--batch", "4"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "overhead" in done.stdout, done.stderr
    assert "1 pairs" in done.stdout
