"""Builds the store with failpoints and torments it: python tests/c/torture.py --faults 5000 [--seed 1]."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import programs

CLIP_NORM = 100.0  # far below the norm of torture.c's gradient


def build(folder: Path) -> Path:
    """Compile the whole core and torture.c into `folder`; the program's path."""
    return programs.build(folder, "torture")


def torture(
    program: Path, policy: str, optimizer: str, faults: int, seed: int, clip_norm: float = 0.0
) -> subprocess.CompletedProcess[str]:
    """Run one torture in a segment folder of its own, which must be empty afterwards."""
    return programs.run(program, policy, optimizer, str(faults), str(seed), str(clip_norm))


def main() -> int:
    """Equal parts under each policy and optimizer; exit code 1 at the first not survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    cases = list(itertools.product(("asp", "bsp"), ("sgd", "momentum", "adamw"), (0.0, CLIP_NORM)))
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for policy, optimizer, clip_norm in cases:
            faults = -(-options.faults // len(cases))
            done = torture(program, policy, optimizer, faults, options.seed, clip_norm)
            print(done.stdout, done.stderr, sep="", end="", flush=True)
            if done.returncode:
                print(f"{policy} {optimizer}: failed with {done.returncode}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
