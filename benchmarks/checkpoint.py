"""Measure what checkpoints cost a run: python benchmarks/checkpoint.py [--saves 10] [--size NAME] [--save].

Two ranks of one thread each train with AdamW on a machine of two cores, so that a save has no idle core to
use. Of the steps from one save to the next, the first half runs while the save is made and the other half
does not: the two halves are a pair, and what they differ by is what a save costs. The same pairs of a run
without checkpoints show how much the machine itself varies. The cost over the default interval must stay
below 3 %; the table has the shortest interval at which it does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from record import machine, milliseconds, others_share, save_table, table

from pyps.checkpoint.folder import FOLDER, find_checkpoint
from pyps.formats import Device, Fit, ModelInfo, Point, Profile, read_cluster, write_json
from pyps.formats.events import EVENTS, read_events
from pyps.formats.records import read_run
from pyps.report.steps import iteration_times, version_times
from pyps.run import RunOptions, run
from pyps.run.options import CHECKPOINT_EVERY, interval_of
from pyps.solver.plan import make_plan

WORKER = Path(__file__).resolve().parent / "checkpoint_worker.py"
RANKS = 2
BOUND = 0.03


@dataclass(frozen=True)
class Size:
    """A model of square layers; the samples of a rank's step; steps from one save to the next."""

    layers: int
    width: int
    batch: int
    every: int

    @property
    def parameters(self) -> int:
        return self.layers * self.width**2


SIZES = {"25M": Size(24, 1024, 32, 30), "1M": Size(16, 256, 64, 150)}


@dataclass(frozen=True)
class Measured:
    """A run: seconds of each of its steps from the second on; of each save, from the step at which it is due
    until the checkpoint is durable; a checkpoint's bytes.
    """

    steps: list[float]
    saves: list[float]
    bytes: int

    def pairs(self, every: int) -> list[tuple[float, float]]:
        """Seconds of the first and of the second half of the steps from one save to the next."""
        half, found = every // 2, []
        for due in range(every, len(self.steps) + 2 - every, every):  # step k + 1 ends after steps[:k]
            after = self.steps[due - 1 : due - 1 + 2 * half]
            found.append((sum(after[:half]), sum(after[half:])))
        return found


def costs(measured: Measured, every: int) -> list[float]:
    """The seconds that each save cost."""
    return [first - second for first, second in measured.pairs(every)]


def measure(size: Size, folder: Path, count: int, *, saves: bool) -> Measured:
    """One run of so many saves, or as long a one without any."""
    run_dir, versions = folder / "run", size.every * (count + 1)
    options = RunOptions(
        samples=versions * size.batch * RANKS,
        args=[str(size.layers), str(size.width)],
        run_dir=run_dir,
        checkpoint_every=size.every,
        keep_checkpoints=1 if saves else 0,
    )
    run(write_plan(size, folder), WORKER, options)
    records = read_run(run_dir)
    steps = iteration_times(records, size.batch * RANKS)
    if not saves:
        return Measured(steps, [], 0)
    due = {version: done for version, (done, _) in version_times(records).items()}
    events = [event for event in read_events(run_dir / EVENTS) if event.kind == "checkpoint"]
    written = [(event.version or 0, event.monotonic_seconds) for event in events]
    seconds = [at - due[v // size.every * size.every] for v, at in written if v < versions]
    files = [path for path in find_checkpoint(run_dir / FOLDER).iterdir() if path.is_file()]
    return Measured(steps, seconds, sum(path.stat().st_size for path in files))


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--size", choices=SIZES, nargs="*", default=list(SIZES))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    default = interval_of(CHECKPOINT_EVERY, "checkpoint_every").seconds
    heading = ["parameters", "step ms", "checkpoint MB", "save ms", "one save costs ms", "without saves"]
    rows, worst = [[*heading, f"lost at {CHECKPOINT_EVERY}", f"{BOUND:.0%} at"]], 0.0
    with others_share() as busy:
        for name in options.size:
            size, found = SIZES[name], []
            for saves in (True, False):
                with tempfile.TemporaryDirectory(prefix="pyps-checkpoint-") as folder:
                    found.append(measure(size, Path(folder), options.saves, saves=saves))
            saved, bare = found
            cost = max(0.0, statistics.median(costs(saved, size.every)))
            worst = max(worst, cost / default)
            rows.append(
                [
                    f"{size.parameters:,}",
                    f"{1e3 * statistics.median(bare.steps):.1f}",
                    f"{saved.bytes / 1e6:.1f}",
                    milliseconds(saved.saves),
                    quartiles(costs(saved, size.every)),
                    quartiles(costs(bare, size.every)),
                    f"{cost / default:.3%}",
                    f"{cost / BOUND:.1f} s",
                ]
            )
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    text = (
        f"{machine()}; others kept {busy[0]:.0%} of it busy. {options.saves} saves of each size; costs are "
        f"medians with quartiles.\n\n{table(rows)}\n\n- {'met' if worst <= BOUND else 'missed'}: at the "
        f"default interval, {CHECKPOINT_EVERY}, {worst:.3%} of the time is lost (threshold: {BOUND:.0%})"
    )
    print(text)
    if options.save:
        save_table("checkpoint", text)
    return int(worst > BOUND)


def quartiles(seconds: list[float]) -> str:
    low, middle, high = (1e3 * x for x in np.percentile(seconds, (25, 50, 75)))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
