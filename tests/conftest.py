"""What tests of the store share: a folder of segments of their own that must be empty again at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new PYPS_SHM_DIR (on tmpfs where there is one); fails the test that leaves a segment behind."""
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix="test-pyps-", dir=parent))
    monkeypatch.setenv("PYPS_SHM_DIR", str(folder))
    left: list[str] = []
    try:
        yield folder
        left = sorted(path.name for path in folder.iterdir())
    finally:
        shutil.rmtree(folder)
    assert not left, f"segments left behind: {left}"
