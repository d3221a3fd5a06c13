"""The C core's own tests: bits of the kernels, and workers killed and stopped at the store's failpoints."""

from __future__ import annotations

import importlib.util
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


def test_every_instruction_set_has_the_scalar_bits(tmp_path: Path) -> None:
    program = tmp_path / "kernels"
    sources = [*sorted((C.parent.parent / "csrc").glob("kernels*.c")), C / "kernels.c"]
    command = ["cc", *torture.FLAGS, *map(str, sources), "-o", str(program), "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip() in ("scalar", "avx2")
