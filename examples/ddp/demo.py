"""Before and after on four emulated devices, with torchrun: python examples/ddp/demo.py

The devices take 1, 1.4, 2 and 2.9 times as long. In a third run the fastest becomes twice as slow; 20 steps
later its steps count. Each run is compared with its plan: the exact split for the devices' profiles, plus the
seconds to reduce gradients. Those are measured first, as the time of a step beyond the device's own part when
all devices are equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import FIXED_SECONDS, SAMPLE_SECONDS, network
from rich.console import Console
from rich.table import Table

from pyps.formats import Cluster, Device, Job, ModelInfo, Plan, Point, Profile, SyncCost, WorkerGroup
from pyps.profiler.curve import select_fit
from pyps.solver.plan import make_plan

HERE = Path(__file__).resolve().parent
PACES = (1.0, 1.4, 2.0, 2.9)
ALIKE = (2.0,) * len(PACES)
GLOBAL_BATCH, EPOCHS = 256, 10
SLOWS_AT, SOON = 24, 20  # steps: when the first device slows, and how soon all has to be well again
LEAST_SPEEDUP, NEAR = 1.6, 0.05
DEADLINE_SECONDS = 180
HEADING = ("run", "batches", "step", "planned", "off", "accuracy")


def run(script: str, paces: Sequence[float], epochs: int = EPOCHS, **environment: str) -> dict[str, Any]:
    """The last line of JSON that a script prints under torchrun."""
    ranks = f"--nproc-per-node={len(paces)}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, str(HERE / script)]
    chosen = {"OMP_NUM_THREADS": "1", "PACES": ",".join(map(str, paces)), "EPOCHS": str(epochs)}
    env = {**os.environ, **chosen, **environment}
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=env)
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


@dataclass(frozen=True)
class Row:
    """One run: its batches, the median step and the plan's, in seconds, and the accuracy."""

    name: str
    batches: Sequence[int]
    seconds: float
    planned_seconds: float
    accuracy: float

    @property
    def off(self) -> float:
        return self.seconds / self.planned_seconds - 1

    def cells(self) -> list[str]:
        took = (f"{x * 1000:.1f} ms" for x in (self.seconds, self.planned_seconds))
        return [" ".join(map(str, self.batches)), *took, f"{self.off:+.1%}", f"{self.accuracy:.1%}"]


@dataclass(frozen=True)
class Comparison:
    """The three runs, what was changed in the last one, and the seconds of bringing gradients together."""

    rows: list[Row]
    history: list[str]
    sync_seconds: float

    @property
    def speedup(self) -> float:
        return self.rows[0].seconds / self.rows[1].seconds

    @property
    def worst(self) -> float:
        return max(abs(row.off) for row in self.rows[1:])

    @property
    def well(self) -> bool:
        return self.speedup >= LEAST_SPEEDUP and self.worst <= NEAR

    def summary(self) -> str:
        return (
            f"Reducing gradients takes {self.sync_seconds * 1000:.1f} ms, measured before. "
            f"{self.speedup:.2f} times as fast as equal batches (threshold: {LEAST_SPEEDUP}), "
            f"off the plan by {self.worst:.1%} (threshold: {NEAR:.0%})."
        )


def row(name: str, found: dict[str, Any], planned_seconds: float, since: int = 0) -> Row:
    return Row(name, found["batches"], settled(found, since), planned_seconds, found["accuracy"])


def compare() -> Comparison:
    """Measure the reduction, plan, and run the three."""
    alike = run("after.py", ALIKE, epochs=4)
    sync_seconds = settled(alike) - own_seconds(ALIKE[0], GLOBAL_BATCH // len(ALIKE))
    plan = planned(PACES, sync_seconds)
    slowed = planned((2 * PACES[0], *PACES[1:]), sync_seconds)
    before, after = run("before.py", PACES), run("after.py", PACES)
    changed = run("after.py", PACES, SLOWS_AT=str(SLOWS_AT))
    before["batches"] = [GLOBAL_BATCH // len(PACES)] * len(PACES)
    rows = [
        row("DDP, equal batches", before, plan.even_split.seconds or 0.0),
        row("uneven, found in training", after, plan.iteration_seconds),
        row("the first slows twofold", changed, slowed.iteration_seconds, SLOWS_AT + SOON),
    ]
    return Comparison(rows, changed["history"], sync_seconds)


def main() -> int:
    found = compare()
    table = Table(*HEADING, box=None)
    for row in found.rows:
        table.add_row(row.name, *row.cells())
    console = Console(highlight=False)
    console.print(table)
    for line in found.history:
        console.print(" ", line)
    console.print(found.summary())
    return 0 if found.well else 1


if __name__ == "__main__":
    sys.exit(main())
