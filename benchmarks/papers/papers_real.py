"""The same clusters as processes: each worker's steps last as long as its cost model says.

Each run is compared with its simulation: the time of an iteration, the time to a loss, and the order of
pushes when the simulator replays the run's own step times.
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
    DYNSGD,
    EVEN,
    PLANNED,
    SAPS,
    SSP,
    Criterion,
    Curve,
    Findings,
)
from benchmark_tools import record
from safetensors.numpy import load_file
from tuning import (
    CLUSTERS,
    Budget,
    Competitor,
    TuningResult,
    TuningScenario,
    cluster_of,
    digits,
    tune_all,
)

from pyps.formats import Jitter
from pyps.formats.records import StepRecord, read_run
from pyps.report.steps import applied_steps, version_times
from pyps.run import Report, RunOptions, run
from pyps.simulate import Result, Scenario, replay, simulate
from pyps.store.policies import policy_named

WORKER = Path(__file__).resolve().parent / "papers_worker.py"
STEADY = Jitter()
TARGET = 0.2
RUNS = 3  # of those in SEVERAL; the others run once
LONGER = 1.4  # than the simulation needs to the target, in global batches
MAX_ERROR, MAX_OVERRUN = 0.10, 0.02
SEVERAL = (PLANNED, EVEN, BACKUP_ONE, ASP, SAPS)
RING, HPS = Competitor("R2SP", ("r2sp",)), Competitor("H-PS", ("hps",))
COMPETITORS = (PLANNED, EVEN, BACKUP_ONE, ASP, SSP, DYNSGD, SAPS, RING, HPS)


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

    Seconds are means of iterations.
    agreeing: the share of gradients that the replay puts into the same version.
    decisions, different: decisions of the run, and those that differ or are missing when its journal is
        replayed.
    staleness: that of all gradients except those of the first and last cycle.
    overrun_share: the time by which emulated devices took too long, as a share of their computing.
    """

    case: Case
    real_seconds: float
    simulated_seconds: float
    replayed_seconds: float
    agreeing: float
    decisions: int
    different: int
    staleness: frozenset[int]
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
    """Train with processes, and the same in virtual time."""
    named = f"{case.policy.replace(':', '-')}-{'planned' if case.planned else 'equal'}-{case.seed}"
    folder = out / named
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cluster = steady(cluster_of(TuningScenario(case.cluster, link=False), planned=case.planned))
    report = _run(case, cluster, folder)
    records = read_run(folder / "run")
    decided = replay(folder / "run" / "journal")
    simulated = _simulate(cluster, case)
    replayed = _simulate(retimed(cluster, records), case)
    computing = sum(rank.compute.mean * rank.compute.count for rank in report.ranks)
    overrun, middle = (
        sum(rank.overrun_seconds for rank in report.ranks),
        slice(len(report.ranks), -len(report.ranks)),
    )
    return Pair(
        case,
        real_seconds=report.iteration_seconds.mean,
        simulated_seconds=iteration_seconds(simulated),
        replayed_seconds=iteration_seconds(replayed),
        agreeing=agreement(records, replayed),
        decisions=decided.decisions,
        different=decided.differences + decided.missing_events,
        staleness=frozenset(step.staleness for step in applied_steps(records)[middle]),
        real_curve=curve_of(folder / "run", records, case.seed),
        simulated_curve=list(simulated.curve),
        overrun_share=overrun / computing if computing else 0.0,
    )


def _run(case: Case, cluster: Scenario, folder: Path) -> Report:
    write_plan(case.cluster, folder / "plan.json")
    policy = policy_named(case.policy)
    in_rounds = policy.name in ("bsp", "backup", "hps")
    options = RunOptions(
        samples=case.iterations * cluster.global_batch,
        policy=policy,
        args=[str(case.lr)],
        seed=case.seed,
        run_dir=folder / "run",
        even=not case.planned,
        throttle_from=str(CLUSTERS / f"{case.cluster}.toml"),
        checkpoint_every=1 if in_rounds else len(cluster.workers),
        keep_checkpoints=1_000_000,
        journal=True,
    )
    return run(folder / "plan.json", WORKER, options)


def _simulate(cluster: Scenario, case: Case) -> Result:
    options = {"iterations": case.iterations, "seed": case.seed, "lr": case.lr}
    return simulate(cluster, case.policy, objective=digits(case.seed), timeline=True, **options)


def steady(cluster: Scenario) -> Scenario:
    """Without jitter: a throttle has none."""
    return replace(cluster, workers=tuple(replace(w, jitter=STEADY) for w in cluster.workers))


def write_plan(cluster: str, path: Path) -> None:
    planner = Path(sys.executable).parent / "pyps-plan"
    command = [str(planner), str(CLUSTERS / f"{cluster}.toml"), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)


def iteration_seconds(result: Result) -> float:
    """The mean, as in a run's report; medians jump where a round is not a whole global batch."""
    return statistics.fmean(b[0] - a[0] for a, b in pairwise(result.curve[1:]))


def retimed(cluster: Scenario, records: Sequence[StepRecord]) -> Scenario:
    """The cluster with the recorded time of each worker's steps, without their waiting."""
    took: dict[int, list[float]] = {k: [] for k in range(len(cluster.workers))}
    for step in records:
        took[step.rank].append(sum(end - begin for kind, begin, end in step.spans if kind != "wait"))
    workers = tuple(replace(w, recorded=tuple(took[k])) for k, w in enumerate(cluster.workers))
    return replace(cluster, workers=workers)


def agreement(records: Sequence[StepRecord], replayed: Result) -> float:
    """The share of gradients that are in the same version in both; a version has no order within."""
    versions: dict[int, list[int]] = {}
    for step in applied_steps(records):
        versions.setdefault(step.version, []).append(step.rank)
    virtual, same = iter([rank for rank, _ in replayed.pushed_at]), 0
    for ranks in versions.values():
        same += (Counter(ranks) & Counter(islice(virtual, len(ranks)))).total()
    return same / len(replayed.pushed_at)


def curve_of(folder: Path, records: Sequence[StepRecord], seed: int) -> Curve:
    """The loss of every checkpoint."""
    began = min(begin for r in records for kind, begin, _ in r.spans if kind == "compute")
    done, total, latest = {0: (0.0, 0)}, 0, began
    for version, (seconds, samples) in sorted(version_times(records).items()):
        latest, total = max(latest, seconds), total + samples
        done[version] = (latest - began, total)
    curve = set()
    for path in folder.glob("checkpoints/0*"):
        arrays = load_file(path / "model.safetensors")
        layers = ("0.weight", "0.bias", "2.weight", "2.bias")
        w = np.concatenate([arrays[name].T.ravel().astype(np.float64) for name in layers])
        curve.add((*done[int(path.name)], digits(seed).loss(w)))
    return sorted(curve)


def real(budget: Budget, out: Path) -> Findings:
    """Every competitor with processes, over some seeds, with the step size that is best in its simulation."""
    scenario = TuningScenario("four", target=TARGET, link=False)
    competitors = COMPETITORS[:1] if budget.quick else COMPETITORS
    tuned = tune_all([(scenario, c) for c in competitors], replace(budget, seeds=budget.seeds[:3]))
    pairs: dict[TuningResult, list[Pair]] = {}
    for best in tuned:
        batches = statistics.median(run.samples / best.global_batch for run in best.runs)
        length = 4 if budget.quick else math.ceil(LONGER * batches)
        several = best.competitor in SEVERAL and not budget.quick
        cases = [
            Case(scenario.cluster, best.policy, best.lr, best.competitor.planned, length, seed)
            for seed in budget.seeds[: RUNS if several else 1]
        ]
        pairs[best] = [work(case, out / "runs") for case in cases]
    drawn = {s.competitor.title: (p[0].real_curve, p[0].simulated_curve) for s, p in pairs.items()}
    return Findings([_table(list(pairs.values()))], _criteria(pairs), pairs=drawn)


def _table(found: list[list[Pair]]) -> str:
    times = ["ms a batch: run", "simulated", "off by", "replayed"]
    checks = ["same versions", "decided differently"]
    rows = [["run", "step size", *times, *checks, f"s to loss {TARGET:g}: run", "simulated"]]
    rows += map(_row, found)
    about = f"Cluster `four`, {RUNS} runs or 1: medians, in brackets the range; off by: the worst run."
    return f"{about}\n\n{record.table(rows)}"


def _row(pairs: list[Pair]) -> list[str]:
    case = pairs[0].case
    run_seconds, simulated = zip(*(p.seconds_to(TARGET) for p in pairs), strict=True)
    in_simulation, in_replay = (
        f"{1e3 * statistics.median(seconds):.1f}"
        for seconds in zip(*((p.simulated_seconds, p.replayed_seconds) for p in pairs), strict=True)
    )
    times = [
        record.milliseconds([p.real_seconds for p in pairs]),
        in_simulation,
        f"{worst(pairs):+.1%}",
        in_replay,
    ]
    agreeing = f"{statistics.median(p.agreeing for p in pairs):.0%}"
    different = f"{sum(p.different for p in pairs)} of {sum(p.decisions for p in pairs)}"
    return [case.title, f"{case.lr:.3g}", *times, agreeing, different, spread(run_seconds), spread(simulated)]


def worst(pairs: Sequence[Pair]) -> float:
    """The largest error of an iteration's simulated time."""
    return max((p.error for p in pairs), key=abs)


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


def _criteria(pairs: dict[TuningResult, list[Pair]]) -> list[Criterion]:
    runs = [pair for several in pairs.values() for pair in several]
    error, overrun = worst(runs), max(p.overrun_share for p in runs)
    different, decisions = sum(p.different for p in runs), sum(p.decisions for p in runs)
    criteria = [
        Criterion(
            "worst error of a simulated iteration",
            f"{error:+.1%}",
            f"within {MAX_ERROR:.0%}",
            abs(error) <= MAX_ERROR,
        ),
        Criterion(
            "decisions that differ when replayed in the run's order",
            f"{different} of {decisions}",
            "0",
            different == 0,
        ),
        Criterion(
            "worst overrun of an emulated device, of its computing",
            f"{overrun:.1%}",
            f"<= {MAX_OVERRUN:.0%}",
            overrun <= MAX_OVERRUN,
        ),
    ]
    for best, found in pairs.items():
        if best.competitor is RING:
            staleness = frozenset[int]().union(*(p.staleness for p in found))
            value, due = ", ".join(map(str, sorted(staleness))), len(best.runs[0].ranks) - 1
            figure = "R2SP's staleness except in the first and last cycle"
            criteria.append(Criterion(figure, value, f"{due}", staleness == {due}))
    return criteria
