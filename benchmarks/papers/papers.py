"""The claims of the four papers, measured: each system against rivals tuned the same way, over several seeds.

    python benchmarks/papers/papers.py [--quick] [--save] [--only PART ...] [--clusters NAME ...] [--resume]

Simulations are of the clusters in benchmarks/clusters/ in virtual time, with real gradients (digits_mlp.py);
`real` runs the same clusters as processes that last as long as their cost models say. --save keeps the
tables in bench-out/.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import papers_plot
from acceptance import boa, hps, r2sp
from benchmark_tools import record
from papers_agreement import agreement
from papers_deep import deep
from papers_real import real
from papers_rivals import rivals
from papers_saps import processes, saps
from papers_straggler import straggler
from ringmaster import ringmaster
from tuning import Budget

PAGE = "papers.md"
PARTS = {
    "boa": boa,
    "rivals": rivals,
    "saps": saps,
    "deep": deep,
    "processes": processes,
    "ringmaster": ringmaster,
    "r2sp": r2sp,
    "hps": hps,
    "straggler": straggler,
    "real": real,
    "agreement": agreement,
}
QUICK = Budget(seeds=(1, 2), tuning=(101,), processes=1, quick=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen parts, print them, and with --save write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds: whether it works, no figures")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--clusters", nargs="+", default=[], help="of the tuned parts: only these")
    parser.add_argument("--resume", action="store_true", help="take what a run that was cut off has tuned")
    parser.add_argument("--out", type=Path, default=Path("papers-out"), help="where runs and plots go")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    kept = chosen.out / "tuned"
    if not chosen.resume:
        shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(exist_ok=True)
    budget = QUICK if chosen.quick else Budget(kept=kept, clusters=tuple(chosen.clusters))
    for name in chosen.only:
        began, worked = time.monotonic(), processor_seconds()
        found = PARTS[name](budget, chosen.out)
        if found.curves:
            papers_plot.curves(chosen.out / f"results-{name}.png", found.curves)
        if found.pairs:
            papers_plot.pairs(chosen.out / f"results-{name}.png", found.pairs)
        took = f"{time.monotonic() - began:.0f} s, {processor_seconds() - worked:.0f} s of processor time"
        took = "" if chosen.resume else f"; took {took}"
        text = f"{record.machine()}{took}.\n\n{found.text()}"
        print(f"## {name}\n\n{text}\n", flush=True)
        if chosen.save:
            record.save_table(name, text, PAGE)


def processor_seconds() -> float:
    """Return the seconds of this process and of the finished processes that it started."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


if __name__ == "__main__":
    main()
