"""Uneven batches on FSDP2 and HSDP: emulated devices, compared with their plan.

    python benchmarks/fsdp.py [--steps 60] [--save]

Four gloo ranks whose blocks take 1, 1.4, 2 and 2.9 times as long, with FSDP2's collectives between them. In
two runs the first device becomes twice as slow; 30 steps later its steps count. Each run is compared with its
plan: the exact split for the devices' profiles, plus the seconds of its collectives. Those are measured
first, of FSDP2 and of HSDP, as the time of a step beyond the device's own part when all devices are equal.
"own time" is how far what the Rebalancer measures of a rank is from what its device takes. With --save the
table goes to bench-out/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import ddp
import record

sys.path.insert(0, str(ddp.HERE.parent / "examples" / "ddp"))
from demo import ALIKE, GLOBAL_BATCH, PACES, own_seconds, planned

SLOWS_AT, SOON = 24, 30  # steps: when the first device slows, and how soon all has to be well again
LEAST_SPEEDUP, NEAR = 1.5, 0.07


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; 1 if a threshold is missed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=72, help="of each run")
    parser.add_argument("--scale", type=float, default=1.0, help="of all emulated times")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    with record.others_share() as others:
        well, text = compare(options)
    said = f"{text}\n\nOthers kept {others[0]:.0%} of the machine busy meanwhile."
    print(said, flush=True)
    if options.save:
        record.save_table("fsdp", f"{record.machine()}.\n\n{said}")
    return 0 if well else 1


def compare(options: argparse.Namespace) -> tuple[bool, str]:
    """Measure the collectives of both, plan, and run them all."""
    rows = [["run", "batches", "step, ms", "planned, ms", "off", "own time off"]]
    off, speedups, history, collectives = [], [], [], []
    for name, replicas in (("FSDP2", 1), ("HSDP, 2 x 2", 2)):
        found = of_kind(options, name, replicas)
        rows += found.rows
        off += found.off
        speedups.append(found.speedup)
        collectives.append(f"{found.sync_seconds * 1e3:.1f} ms a step under {name.partition(',')[0]}")
        history += found.history
    text = (
        f"{record.table(rows)}\n\nCollectives take {' and '.join(collectives)}, measured before. "
        f"{min(speedups):.2f} times as fast as equal batches (threshold: {LEAST_SPEEDUP}), off the plan by "
        f"{max(map(abs, off)):.1%} (threshold: {NEAR:.0%}), {SOON} steps after the first device slowed at "
        f"step {SLOWS_AT}, too.\n\n" + "\n".join(f"- {change}" for change in history)
    )
    return min(speedups) >= LEAST_SPEEDUP and max(map(abs, off)) <= NEAR, text


@dataclass(frozen=True)
class Found:
    """The runs of FSDP2 or of HSDP. off: of the plan, by rebalanced run. sync_seconds: of the collectives."""

    rows: list[list[str]]
    off: list[float]
    speedup: float
    sync_seconds: float
    history: list[str]


def of_kind(options: argparse.Namespace, name: str, replicas: int) -> Found:
    """Its collectives, its plan, and its runs: even, rebalanced, and with a device that slows."""
    scale, steps = options.scale, options.steps
    kind = {"replicas": replicas}
    alike = run(options, ALIKE, rebalance=False, steps=steps // 4, **kind)
    sync_seconds = max(0.0, median(alike["seconds"][3:]) - scale * own_seconds(ALIKE[0], GLOBAL_BATCH // 4))
    paces = [scale * pace for pace in PACES]
    plan, slowed = planned(paces, sync_seconds), planned([2 * paces[0], *paces[1:]], sync_seconds)
    even = run(options, PACES, rebalance=False, steps=steps // 3, **kind)
    before = median(even["seconds"][3:])
    found = run(options, PACES, rebalance=True, **kind)
    took = median(found["seconds"][steps // 2 :])
    changed = run(options, PACES, rebalance=True, slows_at=SLOWS_AT, **kind)
    then = median(changed["seconds"][SLOWS_AT + SOON :])
    rows = [
        row(f"{name}, even", even, before, plan.even_split.seconds or 0.0),
        row(name, found, took, plan.iteration_seconds),
        row(f"{name}, the first slows", changed, then, slowed.iteration_seconds),
    ]
    off = [took / plan.iteration_seconds - 1, then / slowed.iteration_seconds - 1]
    history = [f"{name}: {change}" for change in changed["history"]]
    return Found(rows, off, before / took, sync_seconds, history)


def run(options: argparse.Namespace, paces: Sequence[float], rebalance: bool, **more: Any) -> dict[str, Any]:
    """Return what the first rank found, with the own times of all."""
    chosen: dict[str, Any] = {"paces": [options.scale * pace for pace in paces], "rebalance": rebalance}
    chosen |= {
        "fixed_seconds": own_seconds(1.0, 0),
        "sample_seconds": own_seconds(1.0, 1) - own_seconds(1.0, 0),
    }
    chosen |= {"global_batch": GLOBAL_BATCH, "steps": options.steps, "replicas": 1, "slows_at": -1, **more}
    every = ddp.launch("train", chosen, [[]] * len(paces), script="fsdp_ranks.py")
    found = every[0]
    found["off"] = [median(one["off"][5:]) for one in every if len(one["off"]) > 5]
    return found


def row(name: str, found: dict[str, Any], seconds: float, planned_seconds: float) -> list[str]:
    own = f"{min(found['off']):+.1%} to {max(found['off']):+.1%}" if found["off"] else ""
    batches = " ".join(map(str, found["batches"]))
    took = [f"{x * 1e3:.1f}" for x in (seconds, planned_seconds)]
    return [name, batches, *took, f"{seconds / planned_seconds - 1:+.1%}", own]


if __name__ == "__main__":
    sys.exit(main())
