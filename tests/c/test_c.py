"""The C core's own tests: bits of the kernels, and workers killed and stopped at the store's failpoints."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import programs
import pytest
import torture
from sampled import sampled

pytestmark = pytest.mark.timeout(300)  # the first test of a sanitizer builds the core

FAULTS = 100  # in each case; `make torture` has 5,000


@pytest.fixture(scope="module")
def program(programs_folder: Path) -> Path:
    path: Path = torture.build(programs_folder)
    return path


CASES = [
    torture.Case("asp", "adamw"),
    torture.Case("asp", "sgd", chunks=1, buffers=1),
    torture.Case("asp", "adamw", clip_norm=torture.CLIP_NORM, threads=3),
    torture.Case("bsp", "momentum", clip_norm=torture.CLIP_NORM, threads=2),
    torture.Case("asp", "sgd", parts=2),
    torture.Case("asp", "adamw", bf16=True),
    torture.Case("bsp", "sgd"),
    torture.Case("bsp", "momentum", chunks=1, buffers=1, clip_norm=torture.CLIP_NORM),
    torture.Case("backup", "adamw", clip_norm=torture.CLIP_NORM),
    torture.Case("quorum", "momentum", clip_norm=torture.CLIP_NORM),
    torture.Case("ssp", "sgd", chunks=64, clip_norm=torture.CLIP_NORM),
    torture.Case("dssp", "momentum"),
    torture.Case("saps", "momentum", buffers=1),
    torture.Case("r2sp", "adamw"),
    torture.Case("hps", "sgd", clip_norm=torture.CLIP_NORM),
    torture.Case("asp", "momentum", threads=3, distance=20),
]


@pytest.mark.parametrize("case", sampled(CASES, 0, 2, 3, 5, 7, 10), ids=str)
def test_no_push_is_lost_or_doubled_at_any_crash(program: Path, case: torture.Case) -> None:
    done = torture.torture(program, case, FAULTS, seed=2026)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{case.policy} {case.optimizer}: {FAULTS} faults survived" in done.stdout


@pytest.mark.parametrize("name", programs.DEATHS)
def test_the_others_go_on_after_two_deaths_or_stops(programs_folder: Path, name: str) -> None:
    done = programs.run(programs.build(programs_folder, "deaths"), name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", programs.WAITS)
def test_waiting(programs_folder: Path, name: str) -> None:
    done = programs.run(programs.build(programs_folder, "waits"), name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", programs.OUTCOMES)
def test_what_becomes_of_a_push_that_failed(programs_folder: Path, name: str) -> None:
    done = programs.run(programs.build(programs_folder, "outcomes"), name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.promise("appends to nothing but journals")
@pytest.mark.parametrize("name", programs.MISUSE)
def test_what_is_wrong_is_an_error(programs_folder: Path, name: str) -> None:
    done = programs.run(programs.build(programs_folder, "misuse"), name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_instruction_set_has_the_scalar_bits(programs_folder: Path) -> None:
    program, seen = programs.build(programs_folder, "kernels"), []
    for isa in ("scalar", "avx2", "avx512", "neon"):
        done = programs.run(program, PYPS_ISA=isa)
        assert done.returncode == 0, done.stdout
        seen.append(done.stdout.strip())
    assert seen[0] == "scalar"
    assert len(set(seen)) > 1, "this processor has none of the vector kernels"


@pytest.mark.skipif(
    platform.machine() == "aarch64"
    or not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64-static")),
    reason="needs aarch64-linux-gnu-gcc and qemu-aarch64-static",
)
def test_neon_has_the_scalar_bits_in_emulation(tmp_path: Path) -> None:
    program = programs.build(tmp_path, "kernels", compiler=("aarch64-linux-gnu-gcc", "-static"))
    command = ["qemu-aarch64-static", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "neon\n")
