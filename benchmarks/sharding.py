"""Compare CPU seconds of a step with unlike shares of memory with DDP, ZeroRedundancyOptimizer and FSDP2.

    python benchmarks/sharding.py [--rounds 9] [--save]

Two gloo ranks with one thread each train 25 M parameters, in float32 with AdamW. All ways take their steps in
turn, in one run. The ratio to a rival is the median of the rounds' ratios. With --save the table goes to
bench-out/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import ddp
import record

# A way, its rival, and the most that it may take in proportion.
BOUNDS = (
    ("shard_optimizer, 1:1", "DDP", 1.05),
    ("shard_optimizer, 2:1", "DDP", 1.05),
    ("shard, 1:1", "FSDP2", 0.8),
    ("shard, 2:1", "FSDP2", 0.8),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all ways; 1 if a bound is not kept."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each way in a round")
    parser.add_argument("--width", type=int, default=1024, help="of the model: 8 blocks of 3 width^2")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    chosen = {"rounds": options.rounds, "steps": options.steps, "width": options.width}
    with record.others_share() as others:
        found = ddp.launch(
            "steps", {**chosen, "blocks": 8, "batch": 16}, [[], []], script="sharding_ranks.py"
        )[0]
    well, text = said(found)
    text = f"{text}\n\nOthers kept {others[0]:.0%} of the machine busy meanwhile."
    print(text, flush=True)
    if options.save:
        record.save_table("sharding", f"{record.machine()}.\n\n{text}")
    return 0 if well else 1


def said(found: dict[str, Any]) -> tuple[bool, str]:
    """Return whether all bounds are kept, and the table."""
    seconds: dict[str, list[list[float]]] = found["seconds"]
    rivals = {way: (rival, most) for way, rival, most in BOUNDS}
    rows, well = [["way", "CPU, ms a step", "wall, ms", "in proportion", "range", "at most"]], True
    for way, took in seconds.items():
        cells = [way, *(record.milliseconds([one[k] for one in took]) for k in (0, 1))]
        if way in rivals:
            rival, most = rivals[way]
            ratios = [own[0] / other[0] for own, other in zip(took, seconds[rival], strict=True)]
            well = well and median(ratios) <= most
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            cells += [f"{median(ratios):.3f} of {rival}", spread, f"{most:g}"]
        rows.append([*cells, *[""] * (len(rows[0]) - len(cells))])
    size = f"{found['parameters'] / 1e6:.1f} M parameters"
    return well, f"{record.table(rows)}\n\n{size}, 2 gloo ranks, medians and ranges of the rounds."


if __name__ == "__main__":
    sys.exit(main())
