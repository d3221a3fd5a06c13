"""Builds the store with failpoints and torments it: python tests/c/torture.py --faults 5000 [--lanes 4].

Each case gets faults by its size, and rounds of all cases follow one another until so many are survived.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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


def schedule(faults: int, seed: int, threads: int) -> list[tuple[Case, int, int]]:
    """Stores, their faults and seeds: rounds of all cases, until they have `faults` together."""
    stores: list[tuple[Case, int, int]] = []
    cases, total = itertools.cycle(CASES), 0
    while total < faults:
        case = next(cases)
        stores.append((replace(case, threads=threads), faults_of(case, faults), seed + len(stores)))
        total += stores[-1][1]
    return stores


def main() -> int:
    """Run the cases; exit code 1 at the first one not survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each worker, which share its chunks")
    parser.add_argument("--lanes", type=int, default=1, help="stores at once: most processes only wait")
    options = parser.parse_args()
    stores, survived = schedule(options.faults, options.seed, options.threads), 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.lanes) as pool:
        program = build(Path(folder))
        runs = pool.map(lambda store: torture(program, *store), stores)
        for (case, faults, seed), done in zip(stores, runs, strict=True):
            print(done.stdout, done.stderr, sep="", end="", flush=True)
            if done.returncode:
                print(f"{case}, seed {seed}: failed with {done.returncode}", flush=True)
                pool.shutdown(cancel_futures=True)
                return 1
            survived += faults
    print(f"{survived:,} faults survived in {len(stores)} stores, seeds {options.seed} to {stores[-1][2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
