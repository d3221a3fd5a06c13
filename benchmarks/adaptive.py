"""A global batch that grows with the gradients' noise, against batches that stay, on an emulated cluster.

    python benchmarks/adaptive.py [--seeds 3] [--docs]

Four gloo ranks train on the digits until a loss is reached; time is virtual, that of devices which take 1,
1.4, 2 and 2.9 times as long. Batches that stay have the fastest split and the same rule for the learning rate
(AdaScale, from the batch at first). With --docs the table goes to docs/results/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import log
from statistics import median
from typing import Any

import ddp
import record

sys.path.insert(0, str(ddp.HERE.parent / "examples" / "ddp"))
from common import FIXED_SECONDS, SAMPLE_SECONDS
from demo import PACES

FIRST, FIXED = 32, (32, 64, 128, 256, 512)
TARGET, RATE, OVERHEAD_SECONDS = 0.08, 0.2, 0.013
MOST_SAMPLES = 1.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; 1 if a threshold is missed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=80, help="at most")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args(arguments)
    ways: dict[str, dict[str, Any]] = {f"{batch}": {"batch": batch, "adaptive": False} for batch in FIXED}
    ways |= {
        "adaptive": {"batch": FIRST, "adaptive": True},
        "adaptive, efficiency 0.95": {"batch": FIRST, "adaptive": True, "least_efficiency": 0.95},
    }
    found = {name: [run(options, seed, way) for seed in range(options.seeds)] for name, way in ways.items()}
    well, text = summary(found, options)
    print(text, flush=True)
    if options.docs:
        record.write_section("adaptive", f"{record.machine()}.\n\n{text}")
    return 0 if well else 1


def run(options: argparse.Namespace, seed: int, way: dict[str, Any]) -> dict[str, Any]:
    """Samples and seconds to the target, between epochs by the logarithm of the loss; the batches."""
    chosen: dict[str, Any] = {
        "paces": PACES,
        "fixed_seconds": FIXED_SECONDS,
        "sample_seconds": SAMPLE_SECONDS,
    }
    chosen |= {"overhead_seconds": OVERHEAD_SECONDS, "rate": RATE, "target": TARGET, "base_batch": FIRST}
    chosen |= {"epochs": options.epochs, "seed": seed, "rule": "adascale", "least_efficiency": 0.0}
    chosen |= {"most": max(FIXED), **way}
    epochs: Any = ddp.launch("train", chosen, [[]] * len(PACES), script="adaptive_ranks.py")[0]
    if len(epochs) < 2 or epochs[-1][3] > TARGET:
        return {"samples": float("inf"), "seconds": float("inf"), "batches": [e[1] for e in epochs]}
    (samples, _, seconds, loss), (then, _, later, less) = epochs[-2:]
    share = (log(loss) - log(TARGET)) / (log(loss) - log(less))
    reached = {"samples": samples + share * (then - samples), "seconds": seconds + share * (later - seconds)}
    return reached | {"batches": [e[1] for e in epochs]}


def summary(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> tuple[bool, str]:
    rows = [["global batch", "samples to the loss", "seconds to it", "batches"]]
    middle = {}
    for name, runs in found.items():
        samples, seconds = (median(one[part] for one in runs) for part in ("samples", "seconds"))
        middle[name] = samples, seconds
        path = [b for k, b in enumerate(runs[0]["batches"]) if k == 0 or b != runs[0]["batches"][k - 1]]
        rows.append([name, f"{samples:,.0f}", f"{seconds:.1f}", " ".join(map(str, path))])
    fixed = [middle[str(batch)] for batch in FIXED]
    quickest, fewest = min(fixed, key=lambda one: one[1]), min(fixed)[0]
    samples, seconds = middle["adaptive"]
    bounded = middle["adaptive, efficiency 0.95"][0]
    text = (
        f"{record.table(rows)}\n\nDigits to a loss of {TARGET}, {options.seeds} seeds, medians. The adaptive "
        f"batch takes {seconds / quickest[1]:.2f} of the quickest fixed one's time (threshold: 1) and "
        f"{samples / quickest[0]:.2f} of its samples (threshold: {MOST_SAMPLES}), {samples / fewest:.2f} of "
        f"the fewest of any; with an efficiency of 0.95, {bounded / fewest:.2f} of those."
    )
    return seconds < quickest[1] and samples <= MOST_SAMPLES * quickest[0], text


if __name__ == "__main__":
    sys.exit(main())
