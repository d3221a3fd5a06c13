"""Before and after on four emulated devices, with torchrun: python examples/ddp/demo.py

The devices take 1, 1.4, 2 and 2.9 times as long. Half-way through a third run, the fastest becomes twice as
slow; 20 steps later its steps are counted. Each run stands beside its plan: the exact split of the devices' profiles, and the seconds of bringing
gradients together. These are measured first, as what a step takes beyond a device's own part if all are alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import FIXED_SECONDS, SAMPLE_SECONDS, network
from rich.console import Console
from rich.table import Table

from pyps.formats import Cluster, Device, Job, ModelInfo, Plan, Point, Profile, SyncCost, WorkerGroup
from pyps.profiler.select import select_fit
from pyps.solver.plan import make_plan

HERE = Path(__file__).resolve().parent
PACES = (1.0, 1.4, 2.0, 2.9)
ALIKE = (2.0,) * len(PACES)
GLOBAL_BATCH, EPOCHS = 256, 10
SLOWS_AT, SOON = 24, 20  # steps: when the first device slows, and how soon all has to be well again
LEAST_SPEEDUP, NEAR = 1.6, 0.05
DEADLINE_SECONDS = 180


def run(script: str, paces: Sequence[float], epochs: int = EPOCHS, **environment: str) -> dict[str, Any]:
    """The last line of JSON that a script prints under torchrun."""
    ranks = f"--nproc-per-node={len(paces)}"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, str(HERE / script)],
        capture_output=True, text=True, timeout=DEADLINE_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PACES": ",".join(map(str, paces)),
             "EPOCHS": str(epochs), **environment},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def settled(found: dict[str, Any], since: int = 0) -> float:
    """The median step from a step on, or of the second half: batches have been found by then."""
    seconds = found["seconds"]
    return median(seconds[since or len(seconds) // 2 :])


def own_seconds(pace: float, batch: int) -> float:
    return pace * (FIXED_SECONDS + SAMPLE_SECONDS * batch)


def profile(pace: float) -> Profile:
    points = [Point(batch=b, seconds=own_seconds(pace, b)) for b in (16, 64, 192)]
    model = ModelInfo(name="digits", parameters=sum(p.numel() for p in network().parameters()))
    return Profile(device=Device(name=f"x{pace}"), model=model, points=points, fit=select_fit(points))


def planned(paces: Sequence[float], sync_seconds: float) -> Plan:
    """The planner's answer for these devices, all of them in use."""
    steps = 2 * (len(paces) - 1)  # of a ring
    groups = [WorkerGroup(name=f"x{pace}-{k}", profile="", required=True) for k, pace in enumerate(paces)]
    sync = SyncCost(kind="ring", latency=sync_seconds / steps, bandwidth=1e15)
    cluster = Cluster(job=Job(global_batch=GLOBAL_BATCH), worker=groups, sync=sync)
    return make_plan(cluster, [profile(pace) for pace in paces])


def main() -> int:
    alike = run("after.py", ALIKE, epochs=4)
    sync_seconds = settled(alike) - own_seconds(ALIKE[0], GLOBAL_BATCH // len(ALIKE))
    plan = planned(PACES, sync_seconds)
    slowed = planned((2 * PACES[0], *PACES[1:]), sync_seconds)
    before, after = run("before.py", PACES), run("after.py", PACES)
    changed = run("after.py", PACES, SLOWS_AT=str(SLOWS_AT))
    even = [GLOBAL_BATCH // len(PACES)] * len(PACES)
    rows = (
        ("DDP, equal batches", settled(before), even, plan.even_split.seconds or 0.0),
        ("uneven, found in training", settled(after), after["batches"], plan.iteration_seconds),
        (
            "the first slows twofold",
            settled(changed, SLOWS_AT + SOON),
            changed["batches"],
            slowed.iteration_seconds,
        ),
    )
    table = Table("run", "batches", "step", "planned", "off", "accuracy", box=None)
    off = [found / seconds - 1 for _, found, _, seconds in rows]
    accuracies = [found["accuracy"] for found in (before, after, changed)]
    for (name, found, batches, seconds), error, accuracy in zip(rows, off, accuracies, strict=True):
        told = f"{found * 1000:.1f} ms", f"{seconds * 1000:.1f} ms", f"{error:+.1%}"
        table.add_row(name, " ".join(map(str, batches)), *told, f"{accuracy:.1%}")
    console = Console(highlight=False)
    console.print(table)
    for line in changed["history"]:
        console.print(" ", line)
    speedup, worst = rows[0][1] / rows[1][1], max(map(abs, off[1:]))
    console.print(f"bringing gradients together takes {sync_seconds * 1000:.1f} ms, measured before")
    console.print(
        f"{speedup:.2f}x faster (bar: {LEAST_SPEEDUP}), off the plan by {worst:.1%} (bar: {NEAR:.0%})"
    )
    return 0 if speedup >= LEAST_SPEEDUP and worst <= NEAR else 1


if __name__ == "__main__":
    sys.exit(main())
