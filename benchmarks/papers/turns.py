"""Measure whether a run of R2SP takes the plan's turns: python benchmarks/papers/turns.py [--save]

Four emulated devices, planned by pyps-plan and run by `pyps run --policy r2sp`: as planned, with the order
turned round, and with gaps half as long again. Each plan is run several times. A run's devices are those of
its profiles, so the planned gaps must hold to within 10 % and the order always.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from benchmark_tools import record
from papers_real import CLUSTERS, write_plan

from pyps.formats import Plan, read_plan, write_json
from pyps.formats.records import read_run
from pyps.report.steps import applied_steps
from pyps.run import RunOptions, run

CLUSTER, CYCLES, MAX_DEVIATION = "four", 25, 0.1
WORKER = Path(__file__).resolve().parents[1] / "builtin_worker.py"


@dataclass(frozen=True)
class Change:
    """Hold what is changed in the plan's ring before it is run."""

    name: str
    turned: bool = False
    gap_factor: float = 1.0

    def of(self, plan: Plan) -> Plan:
        order = plan.r2sp.order[::-1] if self.turned else plan.r2sp.order
        gap = plan.r2sp.gap_seconds * self.gap_factor
        return msgspec.structs.replace(
            plan, r2sp=msgspec.structs.replace(plan.r2sp, order=order, gap_seconds=gap)
        )


CHANGES = (
    Change("as planned"),
    Change("order turned round", turned=True),
    Change("gaps of 1.5 times", gap_factor=1.5),
)


def row(change: Change, number: int, folder: Path) -> tuple[list[str], bool]:
    """One run: its figures, and whether it took the plan's turns."""
    plan, out = folder / f"{number}.json", folder / f"run-{number}-{change.name.replace(' ', '-')}"
    write_plan(CLUSTER, plan)
    planned = change.of(read_plan(plan))
    write_json(plan, planned)
    cluster = CLUSTERS / f"{CLUSTER}.toml"
    options = RunOptions(
        samples=CYCLES * planned.global_batch,
        policy="r2sp",
        args=["digits_mlp", "cpu"],
        run_dir=out,
        throttle_from=cluster,
    )
    report = run(plan, WORKER, options)
    turns = report.turns
    assert turns is not None
    assert turns.gap_seconds is not None
    assert turns.gap_deviation is not None
    at = [step.admitted_at for step in applied_steps(read_run(out))][len(turns.order) :]
    gaps = np.array([b - a for a, b in pairwise(at)])
    low, high = np.percentile(gaps, (10, 90)) * 1e3
    met = turns.kept and abs(turns.gap_deviation) <= MAX_DEVIATION
    cells = [
        change.name,
        ", ".join(map(str, turns.order)),
        f"{turns.out_of_order} of {turns.turns}",
        f"{turns.planned_gap_seconds * 1e3:.1f}",
        f"{turns.gap_seconds * 1e3:.1f} ({low:.1f} to {high:.1f})",
        f"{turns.gap_deviation:+.1%}",
        "yes" if met else "**no**",
    ]
    return cells, met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--runs", type=int, default=3, help="Of each plan.")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    heading = ["plan", "order", "out of order", "gap planned, ms", "median (10 % to 90 %)", "off by", "met"]
    rows, met = [heading], True
    with tempfile.TemporaryDirectory() as folder, record.others_share() as others:
        for change in CHANGES:
            for number in range(options.runs):
                cells, held = row(change, number, Path(folder))
                rows.append(cells)
                met = met and held
                print(*cells, sep="  ", flush=True)
    text = f"{record.machine()}, others {others[0]:.0%}. {CYCLES} cycles of four emulated devices.\n\n"
    text += record.table(rows)
    print(text)
    if options.save:
        record.save_table("turns", text, "papers.md")
    if not met:
        sys.exit("a run did not take the plan's turns")


if __name__ == "__main__":
    main()
