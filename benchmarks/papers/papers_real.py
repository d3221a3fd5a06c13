"""The same clusters as processes: each worker's steps last as long as its cost model says.

Each run stands beside its simulation: the time of an iteration, the time to a loss, and the order of pushes
when the simulator replays the run's own step times.
"""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from acceptance import (
    ASP,
    BACKUP_ONE,
    BOA_OVER_BACKUP,
    DYNSGD,
    EVEN,
    PLANNED,
    SAPS,
    SSP,
    Bar,
    Curve,
    Findings,
)
from record import milliseconds, table
from tuning import CLUSTERS, Course, Effort, Entry, Standing, digits, race, scenario

from pyps.formats import Jitter
from pyps.formats.records import StepRecord, read_run
from pyps.run.report import taken, version_times
from pyps.run.supervisor import run
from pyps.simulate import Result, Scenario, replay, simulate
from pyps.store.policies import policy_named

WORKER = Path(__file__).resolve().parent / "papers_worker.py"
STEADY = Jitter()
TARGET = 0.2
RUNS = 3  # of those in SEVERAL; the others run once
LONGER = 1.4  # than the simulation needs to the target, in global batches
MOST_ERROR = 0.10
SEVERAL = (PLANNED, EVEN, BACKUP_ONE, ASP, SAPS)
RING = Entry("R2SP", ("r2sp",))
ENTRIES = (PLANNED, EVEN, BACKUP_ONE, ASP, SSP, DYNSGD, SAPS, RING, Entry("H-PS", ("hps",)))


@dataclass(frozen=True)
class Case:
    """One run: a cluster, a policy, its batches, the step size, global batches, and the seed."""

    cluster: str
    policy: str
    lr: float
    planned: bool = False
    iterations: int = 40
    seed: int = 1

    @property
    def title(self) -> str:
        return f"`{self.policy}`, {'planned' if self.planned else 'equal'}"


@dataclass(frozen=True)
class Pair:
    """A run and its simulations: from the cost models, and from the run's own step times.

    Seconds are means of iterations. `agreeing`: the share of gradients that the replay puts into the same
    version. `decisions`, `otherwise`: all that were taken, and those that come out differently (or are not on
    file) when the run's journal is decided again. `late`: the stalenesses of all gradients but those of the
    first and last cycle. `overrun_share`: how much longer than asked the emulated devices took, of their
    computing.
    """

    case: Case
    real_seconds: float
    simulated_seconds: float
    replayed_seconds: float
    agreeing: float
    decisions: int
    otherwise: int
    late: frozenset[int]
    real_curve: Curve
    simulated_curve: Curve
    overrun_share: float

    @property
    def error(self) -> float:
        return self.real_seconds / self.simulated_seconds - 1.0

    def seconds_to(self, loss: float) -> tuple[float, float]:
        """In the run and in the simulation; infinite: never."""
        both = (self.real_curve, self.simulated_curve)
        first = [next((seconds for seconds, _, value in c if value <= loss), math.inf) for c in both]
        return first[0], first[1]


def work(case: Case, out: Path) -> Pair:
    """Train by processes, and the same in virtual time."""
    named = f"{case.policy.replace(':', '-')}-{'planned' if case.planned else 'equal'}-{case.seed}"
    folder = out / named
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cluster = steady(scenario(Course(case.cluster, link=False), planned=case.planned))
    write_plan(case.cluster, folder / "plan.json")
    rules = policy_named(case.policy)
    every = 1 if rules.name in ("bsp", "backup", "hps") else len(cluster.workers)
    report = run(
        folder / "plan.json", WORKER, rules, samples=case.iterations * cluster.global_batch,
        args=[str(case.lr)], seed=case.seed, run_dir=folder / "run", even=not case.planned,
        throttle_from=str(CLUSTERS / f"{case.cluster}.toml"), snapshot_every=every, journal=True,
    )  # fmt: skip
    records = read_run(folder / "run")
    again = replay(folder / "run" / "journal")
    simulated = _simulate(cluster, case)
    replayed = _simulate(retimed(cluster, records), case)
    computing = sum(rank.compute.mean * rank.compute.count for rank in report.ranks)
    return Pair(
        case, report.iteration_seconds.mean, iteration_seconds(simulated), iteration_seconds(replayed),
        agreement(records, replayed), again.decisions, again.differences + again.missing_events,
        frozenset(r.staleness for r in taken(records)[len(report.ranks) : -len(report.ranks)]),
        curve_of(folder / "run", records, case.seed), list(simulated.curve),
        sum(rank.overrun_seconds for rank in report.ranks) / computing if computing else 0.0,
    )  # fmt: skip


def _simulate(cluster: Scenario, case: Case) -> Result:
    return simulate(
        cluster, case.policy, iterations=case.iterations, seed=case.seed, learning=digits(case.seed),
        lr=case.lr, slices=True,
    )  # fmt: skip


def steady(cluster: Scenario) -> Scenario:
    """Without jitter: a throttle has none."""
    return replace(cluster, workers=tuple(replace(w, jitter=STEADY) for w in cluster.workers))


def write_plan(cluster: str, path: Path) -> None:
    planner = Path(sys.executable).parent / "pyps-plan"
    command = [str(planner), str(CLUSTERS / f"{cluster}.toml"), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)


def iteration_seconds(result: Result) -> float:
    """The mean, as a run's report has it; medians jump where a round is no whole global batch."""
    return statistics.fmean(b[0] - a[0] for a, b in pairwise(result.curve[1:]))


def retimed(cluster: Scenario, records: Sequence[StepRecord]) -> Scenario:
    """The cluster with each worker's steps as long as they were; to wait is the policy's, not the step's."""
    took: dict[int, list[float]] = {k: [] for k in range(len(cluster.workers))}
    for record in records:
        took[record.rank].append(sum(end - begin for kind, begin, end in record.spans if kind != "wait"))
    workers = tuple(replace(w, recorded=tuple(took[k])) for k, w in enumerate(cluster.workers))
    return replace(cluster, workers=workers)


def agreement(records: Sequence[StepRecord], replayed: Result) -> float:
    """The share of gradients that are the same worker's in the same version, which has no order within."""
    versions: dict[int, list[int]] = {}
    for record in taken(records):
        versions.setdefault(record.version, []).append(record.rank)
    virtual, same = iter([rank for rank, _ in replayed.pushed_at]), 0
    for ranks in versions.values():
        same += (Counter(ranks) & Counter(islice(virtual, len(ranks)))).total()
    return same / len(replayed.pushed_at)


def curve_of(folder: Path, records: Sequence[StepRecord], seed: int) -> Curve:
    """The loss of every snapshot, and of the final parameters."""
    began = min(begin for r in records for kind, begin, _ in r.spans if kind == "compute")
    done, total, latest = {0: (0.0, 0)}, 0, began
    for version, (seconds, samples) in sorted(version_times(records).items()):
        latest, total = max(latest, seconds), total + samples
        done[version] = (latest - began, total)
    curve = set()
    for path in [*folder.glob("snapshots/*.npz"), folder / "parameters.npz"]:
        arrays = np.load(path)
        layers = ("0.weight", "0.bias", "2.weight", "2.bias")
        w = np.concatenate([arrays[name].T.ravel().astype(np.float64) for name in layers])
        curve.add((*done[int(arrays["pyps.version"])], digits(seed).loss(w)))
    return sorted(curve)


def real(effort: Effort, out: Path) -> Findings:
    """Every case by processes, some seeds each, with the step size that its simulation likes best."""
    course = Course("four", target=TARGET, link=False)
    entries = ENTRIES[:1] if effort.quick else ENTRIES
    tuned = race([(course, entry) for entry in entries], replace(effort, seeds=effort.seeds[:3]))
    pairs: dict[Standing, list[Pair]] = {}
    for standing in tuned:
        batches = statistics.median(r.samples / standing.global_batch for r in standing.results)
        length = 4 if effort.quick else math.ceil(LONGER * batches)
        cases = [
            Case(course.cluster, standing.policy, standing.lr, standing.entry.planned, length, seed)
            for seed in effort.seeds[: RUNS if standing.entry in SEVERAL and not effort.quick else 1]
        ]
        pairs[standing] = [work(case, out / "runs") for case in cases]
    drawn = {s.entry.title: (p[0].real_curve, p[0].simulated_curve) for s, p in pairs.items()}
    return Findings([_table(list(pairs.values()))], _bars(pairs), pairs=drawn)


def _table(found: list[list[Pair]]) -> str:
    heading = [
        "way",
        "step size",
        "ms a batch: run",
        "simulated",
        "off by",
        "replayed",
        "same versions",
        "decided otherwise",
    ]
    rows = [[*heading, f"s to loss {TARGET:g}: run", "simulated"]]
    for pairs in found:
        case = pairs[0].case
        run_seconds, simulated = zip(*(p.seconds_to(TARGET) for p in pairs), strict=True)
        rows.append([
            case.title, f"{case.lr:.3g}", milliseconds([p.real_seconds for p in pairs]),
            f"{1e3 * statistics.median(p.simulated_seconds for p in pairs):.1f}",
            f"{worst(pairs):+.1%}", f"{1e3 * statistics.median(p.replayed_seconds for p in pairs):.1f}",
            f"{statistics.median(p.agreeing for p in pairs):.0%}",
            f"{sum(p.otherwise for p in pairs)} of {sum(p.decisions for p in pairs)}",
            spread(run_seconds), spread(simulated),
        ])  # fmt: skip
    about = f"Cluster `four`, {RUNS} runs or 1: medians, in brackets the range; off by: the worst run."
    return f"{about}\n\n{table(rows)}"


def worst(pairs: Sequence[Pair]) -> float:
    """The largest error of an iteration's simulated time."""
    return max((p.error for p in pairs), key=abs)


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


def _bars(pairs: dict[Standing, list[Pair]]) -> list[Bar]:
    every = [pair for several in pairs.values() for pair in several]
    error = worst(every)
    overrun = max(p.overrun_share for p in every)
    first = {s.entry.title: statistics.median(p.seconds_to(TARGET)[0] for p in found)
             for s, found in pairs.items()}  # fmt: skip
    bars = [
        Bar("worst error of a simulated iteration", f"{error:+.1%}", f"within {MOST_ERROR:.0%}",
            abs(error) <= MOST_ERROR),
        Bar("decisions that differ when decided again in the run's order",
            f"{sum(p.otherwise for p in every)} of {sum(p.decisions for p in every)}", "0",
            not any(p.otherwise for p in every)),
        Bar("worst overrun of an emulated device, of its computing", f"{overrun:.1%}", "<= 2%",
            overrun <= 0.02),
    ]  # fmt: skip
    for s, found in pairs.items():
        if s.entry is RING:
            late = frozenset[int]().union(*(p.late for p in found))
            said, due = ", ".join(map(str, sorted(late))), len(s.results[0].ranks) - 1
            bars.append(
                Bar("R2SP's staleness but for the first and last cycle", said, f"{due}", late == {due})
            )
    if BACKUP_ONE.title in first:
        gain = first[BACKUP_ONE.title] / first[PLANNED.title]
        bars.append(
            Bar("one backup worker's time to the loss over BOA's", f"{gain:.2f}", f">= {BOA_OVER_BACKUP}",
                gain >= BOA_OVER_BACKUP)
        )  # fmt: skip
    for rival in (ASP, EVEN, BACKUP_ONE, SSP, DYNSGD):
        if {rival.title, SAPS.title} <= first.keys():
            ratio = first[rival.title] / first[SAPS.title]
            bars.append(
                Bar(f"{rival.title}'s time to the loss over SaPS's", f"{ratio:.2f}", "> 1", ratio > 1)
            )
    return bars
