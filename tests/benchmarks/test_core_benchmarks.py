"""The benchmarks of the C core run, small and untimed: every row is there, and nothing was torn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("quick_start")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def output(name: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / name), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_core(shm: Path) -> None:
    text = output("core.py", "--parameters", "5000", "--rounds", "1")
    for row in ("memcpy", "encode int4, feedback", "exchange, SGD", "torch AdamW, fused", "SGD push"):
        assert f"| {row} " in text
    assert not list(shm.iterdir())


@pytest.mark.thorough
def test_master(shm: Path) -> None:
    text = output("master.py", "--seeds", "1", "--epochs", "1", "--parameters", "50000")
    for row in ("sgd, 0.05", "adamw, 0.001", "momentum"):
        assert f"| {row} " in text
    assert not list(shm.iterdir())


def test_pulls(shm: Path) -> None:
    text = output("pulls.py", "--pulls", "5000")
    row = next(line for line in text.splitlines() if "writers push" in line)
    assert int(row.split("|")[3].replace(",", "")) > 0, "no pushes meanwhile"
    assert not list(shm.iterdir())


def test_pages(shm: Path) -> None:
    text = output("pages.py", "--parameters", "50000", "--table", "64000", "--rounds", "1")
    for row in ("push, sgd", "pull, adamw", "pull, 100 rows of 0 MB"):
        assert f"| {row} " in text
    assert not list(shm.iterdir())


@pytest.mark.thorough
def test_remote(shm: Path) -> None:
    text = output("remote.py", "--parameters", "5000", "--rounds", "1")
    for row in (
        "bare socket",
        "gloo send + recv",
        "pyps exchange, encrypted",
        "pyps exchange, int4 and int8",
    ):
        assert f"| {row} " in text
    assert not list(shm.iterdir())
