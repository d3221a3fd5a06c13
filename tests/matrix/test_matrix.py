"""Whatever a user combines is refused before anything trains, or equals its simulation, or ends in the same
bits, and every sample counts once. tests/matrix/cells.py says what is combined.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import running
from cells import Cell
from matrix import Judged, judged, sampled, whole
from mutants import MUTANTS, ROOT, Mutant
from zygote import Zygote

# A store whose server was killed is lost, as it should be.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:store .* was lost:UserWarning")]
PARTS = 24
LATE_SECONDS = 0.08


@pytest.mark.parametrize("cell", sampled(), ids=str)
def test_a_cell(
    cell: Cell, shm: Path, tmp_path: Path, worker_processes: Zygote, run_cells: list[Judged]
) -> None:
    found = judged(cell, tmp_path, worker_processes)
    run_cells.append(found)
    assert not found.faults, "\n".join(found.faults)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_triples(
    part: int, shm: Path, tmp_path: Path, worker_processes: Zygote, run_cells: list[Judged]
) -> None:
    """In parts, as it takes seconds to find the cells."""
    found = []
    for number, cell in enumerate(whole()[part::PARTS]):
        (folder := tmp_path / str(number)).mkdir()
        found.append(judged(cell, folder, worker_processes))
    run_cells += found
    assert not "\n".join(f"{one.cell}: {fault}" for one in found for fault in one.faults)


@pytest.mark.parametrize("policy", ["backup:k=1", "quorum:k=1"])
@pytest.mark.parametrize("fault", ["none", "resume"])
def test_a_late_worker_is_no_fault(
    policy: str, fault: str, shm: Path, tmp_path: Path, worker_processes: Zygote
) -> None:
    """Its round is a mean of fewer samples, each of which counts for more."""
    steps = itertools.count(1)

    def computing(rank: int) -> None:
        time.sleep(LATE_SECONDS if next(steps) % 5 == 0 else 0.001 * rank)

    with patch.object(running, "computing", computing):
        assert not judged(Cell(policy=policy, fault=fault), tmp_path, worker_processes).faults


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.path)
def test_the_faults_that_can_be_put_back_still_can(mutant: Mutant) -> None:
    """python tests/matrix/mutants.py says which the matrix finds."""
    assert (ROOT / mutant.path).read_text().count(mutant.old) == 1
