"""Before and after on four emulated devices, with torchrun: python examples/ddp/demo.py

The devices take 1, 1.4, 2 and 2.9 times as long. Half-way through a third run, the fastest becomes twice as
slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import FIXED_SECONDS, SAMPLE_SECONDS
from rich.console import Console
from rich.table import Table

from pyps.solver import Line
from pyps.solver.decide import best_split, round_seconds

HERE = Path(__file__).resolve().parent
PACES = (1.0, 1.4, 2.0, 2.9)
GLOBAL_BATCH, EPOCHS, SLOWS_AT = 256, 10, 24
LEAST_SPEEDUP, NEAR = 1.6, 0.05
DEADLINE_SECONDS = 180


def run(script: str, **environment: str) -> dict[str, Any]:
    """The last line of JSON that a script prints under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={len(PACES)}",
    ]
    done = subprocess.run(
        [*command, str(HERE / script)], capture_output=True, text=True, timeout=DEADLINE_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PACES": ",".join(map(str, PACES)),
             "EPOCHS": str(EPOCHS), **environment},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def best(paces: tuple[float, ...]) -> tuple[tuple[int, ...], float]:
    """The exact split for the emulated devices, and its round's seconds."""
    costs = [Line(FIXED_SECONDS * pace, SAMPLE_SECONDS * pace) for pace in paces]
    split = best_split(GLOBAL_BATCH, costs, [1] * len(costs), [GLOBAL_BATCH] * len(costs))
    return split, round_seconds(costs, split)


def main() -> int:
    plan, slowed = best(PACES), best((2.0, *PACES[1:]))
    before, after = run("before.py"), run("after.py")
    changed = run("after.py", SLOWS_AT=str(SLOWS_AT))
    table = Table("run", "batches", "step", "the plan", "accuracy", box=None)
    even = [GLOBAL_BATCH // len(PACES)] * len(PACES)
    for name, found, batches, planned in (
        ("DDP, equal batches", before, even, None),
        ("uneven, found while training", after, after["batches"], plan),
        ("and the first slows twofold", changed, changed["batches"], slowed),
    ):
        seconds = f"{planned[1] * 1000:.1f} ms" if planned else ""
        table.add_row(
            name, " ".join(map(str, batches)), f"{found['step_seconds'] * 1000:.1f} ms", seconds,
            f"{found['accuracy']:.1%}",
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    for line in changed["history"]:
        console.print(" ", line)
    speedup = before["step_seconds"] / after["step_seconds"]
    off = [abs(f["step_seconds"] / p[1] - 1) for f, p in ((after, plan), (changed, slowed))]
    console.print(
        f"{speedup:.2f}x faster (bar: {LEAST_SPEEDUP}), off the plan by {max(off):.1%} ({NEAR:.0%})"
    )
    return 0 if speedup >= LEAST_SPEEDUP and max(off) <= NEAR else 1


if __name__ == "__main__":
    sys.exit(main())
