"""Builds the store with failpoints and torments it: python tests/c/torture.py --faults 5000 [--seed 1]."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "-std=c11",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-D_GNU_SOURCE",
    "-DPYPS_FAILPOINTS",
    "-ffp-contract=off",
]


def build(folder: Path) -> Path:
    """Compile the whole core and torture.c into `folder`; the program's path."""
    program = folder / "torture"
    sources = [*sorted((ROOT / "csrc").glob("*.c")), ROOT / "tests" / "c" / "torture.c"]
    command = ["cc", *FLAGS, "-DPYPS_FAILPOINTS", *map(str, sources), "-o", str(program), "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    return program


def torture(
    program: Path, policy: str, optimizer: str, faults: int, seed: int
) -> subprocess.CompletedProcess[str]:
    """Run one torture in a segment folder of its own, which must be empty afterwards."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        environment = {**os.environ, "PYPS_SHM_DIR": shm}
        command = [str(program), policy, optimizer, str(faults), str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        left = os.listdir(shm)
    if left and done.returncode == 0:
        return subprocess.CompletedProcess(command, 1, done.stdout, f"segments left: {left}")
    return done


def main() -> int:
    """Equal parts under each policy and optimizer; exit code 1 at the first not survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    cases = list(itertools.product(("asp", "bsp"), ("sgd", "momentum", "adamw")))
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for policy, optimizer in cases:
            done = torture(program, policy, optimizer, -(-options.faults // len(cases)), options.seed)
            print(done.stdout, done.stderr, sep="", end="", flush=True)
            if done.returncode:
                print(f"{policy} {optimizer}: failed with {done.returncode}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
