"""The C core's own tests: bits of the kernels, and workers killed and stopped at the store's failpoints."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

C = Path(__file__).parent / "c"
FAULTS = 100  # in each case; `make torture` has 5,000

spec = importlib.util.spec_from_file_location("torture", C / "torture.py")
assert spec is not None
assert spec.loader is not None
torture = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torture)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = torture.build(tmp_path_factory.mktemp("torture"))
    return path


@pytest.mark.parametrize(("policy", "optimizer"), [("asp", "adamw"), ("bsp", "sgd"), ("bsp", "momentum")])
def test_no_push_is_lost_or_doubled_whoever_dies_where(program: Path, policy: str, optimizer: str) -> None:
    done = torture.torture(program, policy, optimizer, FAULTS, seed=2026)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{policy} {optimizer}: {FAULTS} faults survived" in done.stdout


def kernels_program(folder: Path, *compiler: str) -> Path:
    csrc, program = C.parent.parent / "csrc", folder / "kernels"
    sources = [*sorted(csrc.glob("kernels*.c")), csrc / "codec.c", csrc / "error.c", C / "kernels.c"]
    command = [*compiler, *torture.FLAGS, *map(str, sources), "-o", str(program), "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    return program


def test_every_instruction_set_has_the_scalar_bits(tmp_path: Path) -> None:
    program, seen = kernels_program(tmp_path, "cc"), []
    for isa in ("scalar", "avx2", "avx512", "neon"):
        environment = {**os.environ, "PYPS_ISA": isa}
        done = subprocess.run([str(program)], capture_output=True, text=True, check=False, env=environment)
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
    program = kernels_program(tmp_path, "aarch64-linux-gnu-gcc", "-static")
    command = ["qemu-aarch64-static", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "neon\n")
