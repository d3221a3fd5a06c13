"""The C core's own tests: bits of the kernels, and workers killed and stopped at the store's failpoints."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import programs
import pytest
import torture

FAULTS = 100  # in each case; `make torture` has 5,000


@pytest.fixture(scope="module")
def program(programs_folder: Path) -> Path:
    path: Path = torture.build(programs_folder)
    return path


CASES = [
    ("asp", "adamw", 0.0), ("bsp", "sgd", 0.0), ("bsp", "momentum", torture.CLIP_NORM),
    ("backup", "adamw", torture.CLIP_NORM), ("ssp", "sgd", torture.CLIP_NORM), ("dssp", "momentum", 0.0),
    ("saps", "momentum", 0.0), ("r2sp", "adamw", 0.0), ("hps", "sgd", torture.CLIP_NORM),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "optimizer", "clip_norm"), CASES)
def test_no_push_is_lost_or_doubled_at_any_crash(
    program: Path, policy: str, optimizer: str, clip_norm: float
) -> None:
    done = torture.torture(program, policy, optimizer, FAULTS, seed=2026, clip_norm=clip_norm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{policy} {optimizer}: {FAULTS} faults survived" in done.stdout


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
