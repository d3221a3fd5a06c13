"""What checkpoints cost a run: python benchmarks/checkpoint.py [--pairs 5] [--size NAME] [--docs].

Two ranks of one thread each train with AdamW on a machine of two cores, so that a save has no idle core to
use. Runs of `pyps run` with and without checkpoints alternate, and the time of all their steps is compared:
what a pair differs by, over the saves, is what one save costs. That over the default interval must stay below
3 %, and the table has the shortest interval that does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from record import machine, milliseconds, others_share, table, write_section

from pyps.checkpoint.folder import FOLDER, find_checkpoint
from pyps.formats import Device, Fit, ModelInfo, Point, Profile, read_cluster, write_json
from pyps.formats.events import read_events
from pyps.formats.records import read_run
from pyps.report.report import iteration_times, version_times
from pyps.run import RunOptions, run
from pyps.run.interval import interval_of
from pyps.run.spec import CHECKPOINT_EVERY, EVENTS
from pyps.solver.plan import make_plan

WORKER = Path(__file__).resolve().parent / "checkpoint_worker.py"
RANKS = 2
WARM_UP = 5  # first iterations, which also touch memory for the first time
BOUND = 0.03


@dataclass(frozen=True)
class Size:
    """A model of square layers; the samples of a rank's step; steps between two saves, and saves of a run."""

    layers: int
    width: int
    batch: int
    every: int
    saves: int = 3

    @property
    def parameters(self) -> int:
        return self.layers * self.width**2

    @property
    def iterations(self) -> int:
        """The last save begins `every` iterations before the end, and the one at the end is not training."""
        return self.every * (self.saves + 1)


SIZES = {"25M": Size(24, 1024, 32, 20), "1M": Size(16, 256, 64, 200)}


@dataclass(frozen=True)
class Measured:
    """A run: seconds of its iterations, of each save from the version that it is due at, and its bytes."""

    iterations: list[float]
    saves: list[float]
    bytes: int


@dataclass(frozen=True)
class Pair:
    """Two runs that followed one another: with checkpoints and without."""

    saved: Measured
    bare: Measured

    @property
    def share(self) -> float:
        """Of step time lost, with a save every so many iterations."""
        return sum(self.saved.iterations) / sum(self.bare.iterations) - 1

    @property
    def cost(self) -> float:
        """Seconds of training that one save costs."""
        return (sum(self.saved.iterations) - sum(self.bare.iterations)) / len(self.saved.saves)


def measure(size: Size, folder: Path, *, saves: bool) -> Measured:
    """One run of a size, with checkpoints or without."""
    run_dir = folder / "run"
    options = RunOptions(
        samples=size.iterations * size.batch * RANKS,
        args=[str(size.layers), str(size.width)],
        run_dir=run_dir,
        checkpoint_every=size.every,
        keep_checkpoints=1 if saves else 0,
    )
    run(write_plan(size, folder), WORKER, options)
    records = read_run(run_dir)
    times = iteration_times(records, size.batch * RANKS)[WARM_UP:]
    if not saves:
        return Measured(times, [], 0)
    due = {version: done for version, (done, _) in version_times(records).items()}
    written = [
        (e.version or 0, e.monotonic_seconds) for e in read_events(run_dir / EVENTS) if e.kind == "checkpoint"
    ]
    seconds = [at - due[v // size.every * size.every] for v, at in written if v < size.iterations]
    files = [path for path in find_checkpoint(run_dir / FOLDER).iterdir() if path.is_file()]
    return Measured(times, seconds, sum(path.stat().st_size for path in files))


def write_plan(size: Size, folder: Path) -> Path:
    """A plan of equal ranks; what the profile predicts of them is not used."""
    points = [Point(batch=b, seconds=0.01 * b) for b in (8, 16, 32)]
    fit = Fit(
        kind="affine", fixed_seconds=0.0, per_sample_seconds=0.01, trusted_min_batch=8, trusted_max_batch=32
    )
    model = ModelInfo(name="layers", parameters=size.parameters)
    profile = Profile(device=Device(name="core"), model=model, points=points, fit=fit)
    write_json(folder / "core.json", profile)
    cluster = folder / "cluster.toml"
    cluster.write_text(
        f"[job]\nglobal_batch = {size.batch * RANKS}\n"
        f'[[worker]]\nname = "core"\ncount = {RANKS}\nprofile = "core.json"\n'
    )
    write_json(folder / "plan.json", make_plan(read_cluster(cluster), [profile]))
    return folder / "plan.json"


def measure_pairs(size: Size, count: int) -> list[Pair]:
    """Pairs of runs; which of the two is first alternates."""
    found = []
    for number in range(count):
        runs = {}
        for saves in (number % 2 == 0, number % 2 == 1):
            with tempfile.TemporaryDirectory(prefix="pyps-checkpoint-") as name:
                runs[saves] = measure(size, Path(name), saves=saves)
        found.append(Pair(runs[True], runs[False]))
        print(f"{found[-1].share:+.2%}, {found[-1].cost * 1e3:+.0f} ms a save", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--size", choices=SIZES, nargs="*", default=list(SIZES))
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    default = interval_of(CHECKPOINT_EVERY, "checkpoint_every").seconds
    heading = ["parameters", "step ms", "save ms", "MB", "steps between saves", "step time lost"]
    rows, worst = [[*heading, "one save costs ms", "3 % at", f"lost at {CHECKPOINT_EVERY}"]], 0.0
    with others_share() as busy:
        for name in options.size:
            size = SIZES[name]
            pairs = measure_pairs(size, options.pairs)
            shares, costs = [pair.share for pair in pairs], [pair.cost for pair in pairs]
            cost = max(0.0, statistics.median(costs))
            worst = max(worst, cost / default)
            rows.append(
                [
                    f"{size.parameters:,}",
                    milliseconds([t for pair in pairs for t in pair.bare.iterations]),
                    milliseconds([t for pair in pairs for t in pair.saved.saves]),
                    f"{pairs[0].saved.bytes / 1e6:.1f}",
                    str(size.every),
                    f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})",
                    milliseconds(costs),
                    f"{cost / BOUND:.1f} s",
                    f"{cost / default:.3%}",
                ]
            )
    met = worst <= BOUND
    text = (
        f"{machine()}; others kept {busy[0]:.0%} of it busy; {options.pairs} pairs. At the default interval, "
        f"{CHECKPOINT_EVERY}, at most {worst:.3%} is lost (at most {BOUND:.0%}: "
        f"{'met' if met else 'missed'}).\n\n{table(rows)}"
    )
    print(text)
    if options.docs:
        write_section("checkpoint", text)
    return int(not met)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
