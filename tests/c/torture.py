"""Builds the store with failpoints and torments it: python tests/c/torture.py --faults 5000 [--lanes 4].

Each case gets faults by its size, and rounds of all cases follow one another until so many are survived. With
--distance 100 --threads 3 a hundred pushes lie between two faults, and threads of a worker share its chunks.
"""

from __future__ import annotations

import argparse
import itertools
import re
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
    """Hold what a store is tormented with: its policy and optimizer, chunks, staging buffers of a worker, the
    parts of the parameters of which each push has one, whether they are kept as bf16, threads of a worker,
    and pushes from one fault to the next, about.
    """

    policy: str
    optimizer: str
    chunks: int = 4
    buffers: int = 2
    clip_norm: float = 0.0
    parts: int = 1
    bf16: bool = False
    threads: int = 1
    distance: int = 0


HALVES = tuple(Case("asp", "sgd", chunks, parts=2) for chunks in (1, 4, 64))
ROUNDED = tuple(
    Case(policy, optimizer, chunks, bf16=True)
    for policy, optimizer, chunks in (("asp", "sgd", 1), ("bsp", "momentum", 4), ("asp", "adamw", 4))
)
WHOLE = tuple(
    Case(policy, optimizer, chunks, buffers, clip_norm)
    for policy, optimizer in itertools.product(("asp", "bsp"), ("sgd", "momentum", "adamw"))
    for chunks, buffers, clip_norm in ((4, 4, 0.0), (1, 1, CLIP_NORM), (64, 2, CLIP_NORM), (4096, 1, 0.0))
)
CASES = (*HALVES, *ROUNDED, *WHOLE)


def faults_of(case: Case, faults: int) -> int:
    """How many of `faults` one store gets. With each come a few pushes, or `distance`, which add up to 889 to
    a parameter; the sums must stay whole numbers up to 2^24, which a float holds. Steps of bf16 are computed
    anew by each process that begins.
    """
    most = (1_500 if case.bf16 else 15_000) // max(case.distance, 15)
    return max(8, 1000 // case.chunks if case.chunks > 4 else min(most, faults // 20))


def torture(program: Path, case: Case, faults: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Run one torture in a segment folder of its own, which must be empty afterwards."""
    sizes = str(case.chunks), str(case.buffers), str(case.clip_norm), str(case.parts), str(int(case.bf16))
    sizes += (str(case.threads), str(case.distance))
    return programs.run(program, case.policy, case.optimizer, str(faults), str(seed), *sizes)


def schedule(faults: int, seed: int, threads: int, distance: int) -> list[tuple[Case, int, int]]:
    """Stores, their faults and seeds: rounds of all cases, until they have `faults` together. With pushes
    between faults the largest stores, of which a push takes 60 ms, are left out.
    """
    stores: list[tuple[Case, int, int]] = []
    cases, total = itertools.cycle([case for case in CASES if not distance or case.chunks <= 64]), 0
    while total < faults:
        case = replace(next(cases), threads=threads, distance=distance)
        stores.append((case, faults_of(case, faults), seed + len(stores)))
        total += stores[-1][1]
    return stores


def counted(output: str) -> tuple[int, int]:
    """Kills and pushes of one store, by what it printed."""
    found = re.search(r"(\d+) of them kills; \d+ tickets, (\d+) acknowledged", output)
    assert found is not None, output
    return int(found[1]), int(found[2])


def main() -> int:
    """Run the cases; exit code 1 at the first one not survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each worker, which share its chunks")
    parser.add_argument("--distance", type=int, default=0, help="pushes from one fault to the next, about")
    parser.add_argument("--sanitizer", choices=("none", "address"), default="none")
    parser.add_argument("--lanes", type=int, default=1, help="stores at once: most processes only wait")
    options = parser.parse_args()
    stores = schedule(options.faults, options.seed, options.threads, options.distance)
    survived = kills = pushes = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.lanes) as pool:
        program = programs.build(Path(folder), "torture", options.sanitizer)
        runs = pool.map(lambda store: torture(program, *store), stores)
        for (case, faults, seed), done in zip(stores, runs, strict=True):
            print(done.stdout, done.stderr, sep="", end="", flush=True)
            if done.returncode:
                print(f"{case}, seed {seed}: failed with {done.returncode}", flush=True)
                pool.shutdown(cancel_futures=True)
                return 1
            survived += faults
            killed, pushed = counted(done.stdout)
            kills, pushes = kills + killed, pushes + pushed
    print(f"{survived:,} faults survived in {len(stores)} stores, seeds {options.seed} to {stores[-1][2]}:")
    print(f"{pushes:,} pushes acknowledged, {kills:,} processes killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
