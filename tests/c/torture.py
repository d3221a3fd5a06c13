"""Builds the store with failpoints and torments it: python tests/c/torture.py --faults 5000 [--seed 1].

Each case gets faults by its size, and rounds of all cases follow one another until so many are survived.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import programs

CLIP_NORM = 100.0  # far below the norm of torture.c's gradient


def build(folder: Path) -> Path:
    """Compile the whole core and torture.c into `folder`; the program's path."""
    return programs.build(folder, "torture")


@dataclass(frozen=True)
class Case:
    """What a store is tormented with: its policy and optimizer, chunks, staging buffers of a worker, the
    parts of the parameters of which each push has one, whether they are kept as bf16, and threads of a
    worker.
    """

    policy: str
    optimizer: str
    chunks: int = 4
    buffers: int = 2
    clip_norm: float = 0.0
    parts: int = 1
    bf16: bool = False
    threads: int = 1


HALVES = tuple(Case("asp", "sgd", chunks, parts=2) for chunks in (1, 4, 64))
ROUNDED = tuple(
    Case(policy, optimizer, chunks, bf16=True)
    for policy, optimizer, chunks in (("asp", "sgd", 1), ("bsp", "momentum", 4), ("asp", "adamw", 4))
)
WHOLE = tuple(
    Case(policy, optimizer, chunks, buffers, clip_norm)
    for policy, optimizer in itertools.product(("asp", "bsp"), ("sgd", "momentum", "adamw"))
    for chunks, buffers, clip_norm in ((4, 2, 0.0), (1, 1, CLIP_NORM), (64, 2, CLIP_NORM), (4096, 1, 0.0))
)
CASES = (*HALVES, *ROUNDED, *WHOLE)


def faults_of(case: Case, faults: int) -> int:
    """How many of `faults` one store gets. With each come a few pushes, which add up to 889 to a parameter;
    the sums must stay whole numbers up to 2^24, which a float holds.
    """
    return max(8, 1000 // case.chunks if case.chunks > 4 else min(1000, faults // 20))


def torture(program: Path, case: Case, faults: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Run one torture in a segment folder of its own, which must be empty afterwards."""
    sizes = str(case.chunks), str(case.buffers), str(case.clip_norm), str(case.parts), str(int(case.bf16))
    sizes += (str(case.threads),)
    return programs.run(program, case.policy, case.optimizer, str(faults), str(seed), *sizes)


def main() -> int:
    """Run the cases; exit code 1 at the first one not survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each worker, which share its chunks")
    options = parser.parse_args()
    survived, turn = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        while survived < options.faults:
            case = replace(CASES[turn % len(CASES)], threads=options.threads)
            faults = faults_of(case, options.faults)
            done = torture(program, case, faults, options.seed + turn)
            print(done.stdout, done.stderr, sep="", end="", flush=True)
            if done.returncode:
                print(f"{case}, seed {options.seed + turn}: failed with {done.returncode}")
                return 1
            survived, turn = survived + faults, turn + 1
    print(f"{survived:,} faults survived in {turn} stores, seeds {options.seed} to {options.seed + turn - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
