"""benchmarks/papers/papers.py runs, small and untimed: rows, criteria, plots, and a replay that agrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import papers
import pytest

Quick = Callable[[str], str]


@pytest.fixture
def quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Quick:
    """Runs one part and returns its output."""

    def run(part: str) -> str:
        papers.main(["--quick", "--only", part, "--out", str(tmp_path)])
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(("part", "competitors"), [("boa", 4 * 2), ("r2sp", 4 * 2), ("saps", 6 + 7)])
def test_competitors(part: str, competitors: int, tmp_path: Path, quick: Quick) -> None:
    text = quick(part)
    tables = text.count("\n|--")
    assert sum(line.startswith("| ") for line in text.splitlines()) == competitors + tables
    assert "(threshold: " in text
    assert (tmp_path / f"results-{part}.png").read_bytes().startswith(b"\x89PNG")


def test_task_sizes_bits_and_the_pipeline(quick: Quick) -> None:
    text = quick("hps")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 9
    assert [cell.split()[-1] for cell in rows[1][2:-1]] == ["1.00x"] * 3
    assert "met: plain over all three: " in text


@pytest.mark.timed
@pytest.mark.thorough
def test_a_straggler(quick: Quick, shm: Path) -> None:
    text = quick("straggler")
    assert "imbalance after one re-solve: " in text
    assert "rank 1 slowed by " in text
    assert not list(shm.iterdir())


@pytest.mark.thorough
def test_processes(quick: Quick, shm: Path) -> None:
    """The simulator makes the same versions of the same gradients, the core decides the same."""
    rows = [line.split("|") for line in quick("real").splitlines() if line.startswith("| `bsp`")]
    assert [(row[7].strip(), row[8].split()[0]) for row in rows] == [("100%", "0")]
    assert not list(shm.iterdir())


@pytest.mark.thorough
def test_the_same_loss(quick: Quick, shm: Path) -> None:
    """Turns leave nothing to chance: processes that look ahead reach the simulator's loss."""
    row = next(line for line in quick("agreement").splitlines() if line.startswith("| `r2sp`"))
    assert float(row.split("|")[4].strip(" %")) <= 0.5, "only the first pulls depend on who starts first"
    assert not list(shm.iterdir())
