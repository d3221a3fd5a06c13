"""The models of the protocol, tests/c/*.pml, searched to their last states; and their mutants."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sampled import sampled

MODELS = Path(__file__).parent
MEGABYTES = 1024  # a search that wants more stops, short of its states
DEPTH = 10_000

pytestmark = pytest.mark.skipif(not shutil.which("spin"), reason="needs spin, the model checker")


def search(folder: Path, model: str, **macros: object) -> tuple[int, int, str]:
    """Search a model with these macros, in `folder`: its errors, its states and what the search wrote."""
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run(["spin", *defines, "-a", str(MODELS / model)], cwd=folder, check=True, capture_output=True)
    optimized = "-O0" if "MUTANT" in macros else "-O1"  # a mutant's fault is found after few states
    # no partial order reduction: it does not know that a process may be killed at any step
    flags = [optimized, "-w", "-DSAFETY", "-DNOREDUCE", f"-DMEMLIM={MEGABYTES}"]
    subprocess.run(["cc", *flags, "pan.c", "-o", "pan"], cwd=folder, check=True)
    command = ["./pan", f"-m{DEPTH}"]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    errors, states = re.search(r"errors: (\d+)", output), re.search(r"(\d+) states, stored", output)
    assert errors, output
    assert states, output
    return int(errors[1]), int(states[1]), output


SIZES = {  # as Spin 6.5.2 counts states: another number is another protocol
    "buffers are reused": ("chunk.pml", {"PUSHES": 2}, 3_975_410),
    "a buffer goes from chunk to chunk": ("chunk.pml", {"CHUNKS": 2, "PUSHES": 1}, 1_634_665),
    "no process waits for the dead": ("chunk.pml", {"PUSHES": 1, "SPARES": 3}, 180_391),
    "a push passes a chunk": ("chunk.pml", {"PUSHES": 2, "PASSES": 1}, 886_169),  # PUSHES 3: 5,679,525
    # CHUNKS 2 and PUSHES 2: more than 9,772,869
    "a thread takes chunks": ("chunk.pml", {"CHUNKS": 2, "PUSHES": 1, "SPARES": 4, "CREW": 1}, 493_467),
    "a thread helps again": ("chunk.pml", {"PUSHES": 2, "SPARES": 5, "CREW": 1}, 1_484_293),
    "one norm for every chunk of a round": ("clip.pml", {}, 484_178),
    "what is in a round or a ticket keeps its pages": ("leave.pml", {}, 1_087_945),
    "a late joiner dies": ("chunk.pml", {"PUSHES": 2, "DEATHS": 1}, 1_898_780),  # DEATHS 2: 3,419,580
}


@pytest.mark.parametrize("size", sampled(SIZES, 2))
def test_no_interleaving_and_no_death_breaks_the_protocol(tmp_path: Path, size: str) -> None:
    model, macros, expected = SIZES[size]
    errors, states, output = search(tmp_path, model, **macros)
    assert errors == 0, output
    version = subprocess.run(["spin", "-V"], capture_output=True, text=True, check=True).stdout
    assert states == expected or "Version 6.5.2" not in version, output
    assert "max search depth too small" not in output
    assert "Search not completed" not in output


TORN = "holds["  # a buffer that is read does not hold what its word says
MUTANTS = {
    "NO_RECHECK": TORN,
    "NO_HAZARDS": TORN,
    "NO_GENERATION": TORN,
    "NO_COMPARE": "words[",  # a version is doubled
    "NO_CHUNK": TORN,
    "NO_COMPLETION": "admitted",  # a push is lost
    "NO_RELEASE": "owners[",  # a buffer is lost
    "STOPPED": TORN,
    "HELP_FIRST": "found",  # there is no buffer left
}
CREW_MUTANTS = {
    "NO_WAIT": "version",  # a call returns before its thread has done
    "ONE_SLOT": "invalid array index",  # a buffer that is written is given away
    "NO_HAND": "owners[",  # a buffer is lost
}
OVERWRITTEN = "gradient=="  # a gradient that is read is of another round, or gone
NORM_MUTANTS = {
    "NO_RECHECK": OVERWRITTEN,
    "NO_HAZARDS": OVERWRITTEN,
    "NO_CLEAR": "sums[",  # a sum is of another round
    "LATE_CLEAR": "sums[",
    "PARTIAL": "sums[",
    "NO_RELEASE": "admitted",  # the next round never begins
    "STOPPED": OVERWRITTEN,
}

LEAVE_MUTANTS = ["TWO_LOOKS", "NO_ROUND", "NO_HAZARDS"]


@pytest.mark.parametrize("mutant", sampled(MUTANTS, 1, 5))
def test_a_fault_in_the_protocol_is_found(tmp_path: Path, mutant: str) -> None:
    chunks, deaths = (2 if mutant == "NO_CHUNK" else 1), (2 if mutant == "HELP_FIRST" else 0)
    found = search(tmp_path, "chunk.pml", CHUNKS=chunks, MUTANT=mutant, DEATHS=deaths)
    assert_found(MUTANTS[mutant], *found)


@pytest.mark.parametrize("mutant", sampled(CREW_MUTANTS))
def test_a_fault_in_sharing_a_call_with_a_thread_is_found(tmp_path: Path, mutant: str) -> None:
    found = search(tmp_path, "chunk.pml", CHUNKS=2, PUSHES=1, SPARES=4, CREW=1, MUTANT=mutant)
    assert_found(CREW_MUTANTS[mutant], *found)


@pytest.mark.parametrize("mutant", sampled(NORM_MUTANTS, 1))
def test_a_fault_in_finding_the_norm_is_found(tmp_path: Path, mutant: str) -> None:
    assert_found(NORM_MUTANTS[mutant], *search(tmp_path, "clip.pml", MUTANT=mutant))


@pytest.mark.parametrize("mutant", sampled(LEAVE_MUTANTS))
def test_a_fault_in_giving_staging_back_is_found(tmp_path: Path, mutant: str) -> None:
    assert_found(OVERWRITTEN, *search(tmp_path, "leave.pml", MUTANT=mutant))


def assert_found(violated: str, errors: int, _: int, output: str) -> None:
    assert errors == 1, output
    found = re.search(r"assertion violated (.*) \(at depth", output)
    assert found, output
    assert violated in found[1]
