"""benchmarks/papers/papers.py runs, small and untimed: rows, bars, plots, and a replay that agrees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "papers"


def quick(part: str, out: Path) -> str:
    command = [sys.executable, str(BENCHMARKS / "papers.py"), "--quick", "--only", part, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("part", "entrants"), [("boa", 4 * 2), ("r2sp", 4 * 2), ("saps", 11 * 5)])
def test_races(part: str, entrants: int, tmp_path: Path) -> None:
    text = quick(part, tmp_path)
    tables = text.count("\n|--")
    assert sum(line.startswith("| ") for line in text.splitlines()) == entrants + tables
    assert "(asked: " in text
    assert (tmp_path / f"results-{part}.png").read_bytes().startswith(b"\x89PNG")


def test_task_sizes_bits_and_the_pipeline(tmp_path: Path) -> None:
    text = quick("hps", tmp_path)
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 9
    assert [cell.split()[-1] for cell in rows[1][2:-1]] == ["1.00x"] * 3
    assert "met: plain over all three: " in text


def test_a_straggler(tmp_path: Path, shm: Path) -> None:
    text = quick("straggler", tmp_path)
    assert "imbalance after one re-solve: " in text
    assert "rank 1 slowed by " in text
    assert not list(shm.iterdir())


def test_processes(tmp_path: Path, shm: Path) -> None:
    """The simulator makes the same versions of the same gradients, the core decides the same."""
    rows = [line.split("|") for line in quick("real", tmp_path).splitlines() if line.startswith("| `bsp`")]
    assert [(row[7].strip(), row[8].split()[0]) for row in rows] == [("100%", "0")]
    assert not list(shm.iterdir())
