"""Measure whether data loading overlaps with training: python benchmarks/data.py [--iterations N]
[--repeats N] [--save].

Three emulated devices (a step of b samples lasts exactly T(b)) train on a data set of 1 ms a sample, with two
loader processes for each rank. An iteration should last as long as the longer of compute and loading:
within 10 %, where either is the longer one. In the last cases one rank's samples take 6 ms: the report must
name it and say what to change, and with rebalancing samples must move away from it until the iteration is
within 10 % of what the best split gives.

Compute and loading count as measured in the run, medians by rank: on a busy machine a loader process that
waits for a core takes longer than its samples. The table also has the nominal times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from record import machine, milliseconds, others_share, save_table, table

from pyps.formats import Device, Fit, ModelInfo, Point, Profile, read_cluster, write_json
from pyps.formats.records import read_run
from pyps.report.report import Report
from pyps.report.steps import iteration_times
from pyps.run import RunOptions, run
from pyps.solver.plan import make_plan

WORKER = Path(__file__).resolve().parent / "data_worker.py"
LOADERS = 2
SAMPLE, SLOW_SAMPLE = 0.001, 0.006  # seconds
BOUND = 1.10
Devices = tuple[tuple[float, float], ...]  # fixed seconds, and seconds a sample

COMPUTE_BOUND: Devices = ((0.02, 0.0012), (0.02, 0.0016), (0.02, 0.0028))
LOADER_BOUND: Devices = ((0.03, 0.00015), (0.03, 0.0002), (0.03, 0.00025))


@dataclass(frozen=True)
class Case:
    """One run. slow: rank 0's samples take longer."""

    title: str
    devices: Devices
    global_batch: int
    policy: str = "bsp"
    depth: int = 1
    loaders: int = LOADERS
    slow: bool = False
    rebalance: bool = False

    def sample_seconds(self, rank: int) -> float:
        return SLOW_SAMPLE if self.slow and rank == 0 else SAMPLE

    def step_seconds(self, rank: int, batch: int) -> tuple[float, float]:
        """Return what a step of a batch takes to compute, and to load."""
        fixed, each = self.devices[rank]
        return fixed + each * batch, batch * self.sample_seconds(rank) / max(1, self.loaders)

    def nominal(self, batches: tuple[int, ...]) -> float:
        """Seconds of a global batch, if loading overlaps with compute and each takes what it should."""
        return self.overlapped(batches, [max(self.step_seconds(rank, b)) for rank, b in enumerate(batches)])

    def overlapped(self, batches: tuple[int, ...], seconds: list[float]) -> float:
        """Seconds of a global batch, given each rank's of a step."""
        if self.policy == "bsp":
            return max(seconds)
        return sum(batches) / sum(b / s for b, s in zip(batches, seconds, strict=True))

    def best(self) -> float:
        """The same for the best split, by search."""
        B = self.global_batch
        splits = ((x, y, B - x - y) for x in range(1, B - 1) for y in range(1, B - x))
        return min(self.nominal(split) for split in splits)


CASES = (
    Case("compute is longer, `bsp`", COMPUTE_BOUND, 150),
    Case("compute is longer, `asp`", COMPUTE_BOUND, 150, "asp"),
    Case("compute is longer, `asp`, pipelined", COMPUTE_BOUND, 150, "asp", depth=2),
    Case("loading is longer, `bsp`", LOADER_BOUND, 600),
    Case("loading is longer, `asp`", LOADER_BOUND, 600, "asp"),
    Case("one rank's loader is slow, `bsp`", COMPUTE_BOUND, 150, slow=True),
    Case("the same with `--rebalance`", COMPUTE_BOUND, 150, slow=True, rebalance=True),
)


def write_inputs(case: Case, folder: Path) -> None:
    """A profile for each device, the cluster, and its plan."""
    profiles: list[Profile] = []
    lines = ["[job]", f"global_batch = {case.global_batch}"]
    for rank, (fixed, each) in enumerate(case.devices):
        profiles.append(_profile(f"d{rank}", fixed, each))
        write_json(folder / f"d{rank}.json", profiles[-1])
        lines += ["[[worker]]", f'name = "d{rank}"', f'profile = "d{rank}.json"']
    (folder / "cluster.toml").write_text("\n".join(lines) + "\n")
    cluster = read_cluster(folder / "cluster.toml")
    write_json(folder / "plan.json", make_plan(cluster, profiles))


def _profile(name: str, fixed: float, each: float) -> Profile:
    sizes = (8, 32, 128, 512)
    fit = Fit(
        kind="affine",
        fixed_seconds=fixed,
        per_sample_seconds=each,
        trusted_min_batch=min(sizes),
        trusted_max_batch=max(sizes),
    )
    points = [Point(batch=b, seconds=fixed + each * b) for b in sizes]
    return Profile(device=Device(name=name), model=ModelInfo(name="linear"), points=points, fit=fit)


def launch(case: Case, folder: Path, iterations: int) -> tuple[Report, float]:
    """Run it: the report, and the median iteration of the second half."""
    write_inputs(case, folder)
    args = ["--sample-seconds", str(SAMPLE), "--num-workers", str(case.loaders)]
    args += ["--slow-seconds", str(SLOW_SAMPLE)] if case.slow else []
    options = RunOptions(
        samples=iterations * case.global_batch,
        policy=case.policy,
        depth=case.depth,
        args=args,
        run_dir=folder / "run",
        throttle_from=str(folder / "cluster.toml"),
        rebalance=case.rebalance,
    )
    report = run(str(folder / "plan.json"), str(WORKER), options)
    times = iteration_times(read_run(folder / "run"), case.global_batch)
    return report, statistics.median(times[len(times) // 2 :])


@dataclass(frozen=True)
class Outcome:
    """Runs of a case: their reports, seconds of an iteration, and those over what was expected."""

    case: Case
    nominal: float
    reports: list[Report]
    seconds: list[float]
    ratios: list[float]

    def bars(self) -> Iterator[tuple[bool, str]]:
        """Each bar of the case, and whether all runs met it: of times, whether their median did."""
        ratio = statistics.median(self.ratios)
        yield ratio <= BOUND, f"{self.case.title}: {ratio:.2f} of what is expected (threshold: {BOUND:g})"
        if self.case.devices is LOADER_BOUND or (self.case.slow and not self.case.rebalance):
            named = all(map(_names_the_loader, self.reports))
            yield named, f"{self.case.title}: the report names rank 0's loader"
        if self.case.rebalance:
            why = "rank 0 is held up by its data"
            moved = all(any(why in line for line in report.replans) for report in self.reports)
            yield moved, f"{self.case.title}: samples move away from rank 0"


def _names_the_loader(report: Report) -> bool:
    return any(line.startswith("rank 0 ") and "num_workers=" in line for line in report.advice)


def measure(case: Case, iterations: int, repeats: int) -> Outcome:
    """Some runs of a case."""
    found = Outcome(case, case.best() if case.rebalance else 0.0, [], [], [])
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="pyps-data-") as name:
            report, seconds = launch(case, Path(name), iterations)
        planned = tuple(rank.batch for rank in report.ranks)
        longer = [max(rank.compute.median, rank.loader.median) for rank in report.ranks]
        if not case.rebalance:
            found = replace(found, nominal=case.nominal(planned))
        expected = found.nominal if case.rebalance else case.overlapped(planned, longer)
        found.reports.append(report)
        found.seconds.append(seconds)
        found.ratios.append(seconds / expected)
        print(case.title, f"{seconds / expected:.3f}", *report.advice, *report.replans, sep="; ", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases, from 0")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    cases = [case for k, case in enumerate(CASES) if options.cases is None or k in options.cases]
    rows, reached = [["case", "nominal ms", "measured ms", "of what is expected"]], []
    with others_share() as busy:
        for case in cases:
            found = measure(case, options.iterations, options.repeats)
            ratios = f"{min(found.ratios):.2f} to {max(found.ratios):.2f}"
            middle = f"{statistics.median(found.ratios):.2f} ({ratios})"
            rows.append([case.title, f"{found.nominal * 1e3:.1f}", milliseconds(found.seconds), middle])
            reached += list(found.bars())
    lines = "\n".join(f"- {'met' if met else 'missed'}: {text}" for met, text in reached)
    text = f"{machine()}; others kept {busy[0]:.0%} of it busy.\n\n{table(rows)}\n\n{lines}"
    print(text)
    if options.save:
        save_table("data", text)
    return int(not all(met for met, _ in reached))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
