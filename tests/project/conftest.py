"""The reference, which git does not keep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def reference() -> Path:
    """docs/reference, as `make reference` writes it."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_reference.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return ROOT / "docs" / "reference"
