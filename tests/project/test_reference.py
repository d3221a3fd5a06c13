"""docs/reference/ is what its sources say now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_is_up_to_date() -> None:
    script = ROOT / "docs" / "make_reference.py"
    checked = subprocess.run(
        [sys.executable, str(script), "--check"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert checked.returncode == 0, checked.stderr + " (run: .venv/bin/python docs/make_reference.py)"
