"""What tests share: a folder of segments of their own that must be empty at the end, and the built wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.fixture(scope="session")
def programs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs.build() keeps the core's objects for the whole run, one compilation a sanitizer."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what git would give: the source folder gets no build products."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "-w", str(out), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built
