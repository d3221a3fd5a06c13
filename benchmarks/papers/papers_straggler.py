"""A worker becomes 50 ms slower while a run of real processes trains: how soon other workers take its
samples.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from acceptance import Criterion, Findings
from benchmark_tools import record
from papers_real import write_plan
from tuning import Budget

from pyps.formats.records import StepRecord, read_run
from pyps.run import RunOptions, run
from pyps.solver.online.balancer import Rules

WORKER = Path(__file__).resolve().parent / "straggler_worker.py"
COSTS = [[0.02 * k, 0.005 * k] for k in (1.0, 1.4, 2.0, 2.9)]  # of clusters/four.toml
GLOBAL_BATCH = 64
LATE, ADDED = 1, 0.05  # which rank, and seconds
QUICK_SCALE = 0.5  # of all times
WINDOW = Rules().window
BEGINS, SEEN, WATCHED = 30, 3 * WINDOW, 200  # rounds: before the slowdown, until the re-solve, after it
BALANCED = 0.1  # the longest step over the mean, less 1

Rounds = dict[int, dict[int, StepRecord]]  # round -> rank -> record


def straggler(budget: Budget, out: Path) -> Findings:
    """One run with --rebalance; a quick budget watches it for a few rounds only."""
    folder = out / "straggler"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_plan("four", folder / "plan.json")
    begins, watched = (2 * WINDOW, 10) if budget.quick else (BEGINS, SEEN + WATCHED)
    samples = (begins + WINDOW + watched) * GLOBAL_BATCH
    scale = QUICK_SCALE if budget.quick else 1.0
    costs = [[scale * seconds for seconds in cost] for cost in COSTS]
    slowdown = [json.dumps(costs), str(LATE), str(begins), str(scale * ADDED)]
    plan, run_dir = folder / "plan.json", folder / "run"
    options = RunOptions(samples=samples, args=slowdown, run_dir=run_dir, rebalance=True)
    report = run(plan, WORKER, options)
    rounds: Rounds = {}
    for step in read_run(run_dir):
        rounds.setdefault(step.round, {})[step.rank] = step
    plans = [max(r.plan for r in one.values()) for _, one in sorted(rounds.items())]
    changes = [k + 1 for k, (a, b) in enumerate(pairwise(plans)) if a != b]
    return _found(list(dict(sorted(rounds.items())).values()), changes, begins, report.replans)


def _found(
    rounds: list[dict[int, StepRecord]], changes: list[int], begins: int, reasons: list[str]
) -> Findings:
    """changes: the rounds that began with another split. begins: the round in which the worker slows."""
    answers = [at for at in changes if at > begins]
    first = answers[0] if answers else len(rounds)
    second = answers[1] if len(answers) > 1 else len(rounds)
    spans = {"before": (3, begins), "50 ms more": (begins, first), "after one re-solve": (first, second)}
    if second < len(rounds):
        spans["after all"] = (answers[-1], len(rounds))
    rows = [["rounds", "batches", "compute by rank, ms", "iteration, ms", "longest over mean"]]
    imbalance = {}
    for what, (lo, hi) in spans.items():
        chosen = [one for one in rounds[lo:hi] if len(one) == len(COSTS)]
        if not chosen:
            continue
        each = [median(_compute(one[rank]) for one in chosen) for rank in range(len(COSTS))]
        imbalance[what] = max(each) / mean(each) - 1
        split = [chosen[-1][rank].samples for rank in range(len(COSTS))]
        ends = [max(r.spans[-1][2] for r in one.values()) for one in chosen]
        lasts = median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else max(each)
        compute = " ".join(f"{1e3 * s:.0f}" for s in each)
        figures = [compute, f"{1e3 * lasts:.0f}", f"{imbalance[what]:+.1%}"]
        rows.append([f"{what}: {lo} to {hi - 1}", str(split), *figures])
    after = imbalance.get("after one re-solve", float("inf"))
    wait = first - begins
    later = [at for at in answers[1:] if at <= first + WATCHED]
    further = f"further re-solves in the {WATCHED} rounds after it"
    criteria = [
        Criterion("imbalance after one re-solve", f"{after:.3f}", f"< {BALANCED}", after < BALANCED),
        Criterion("rounds from the slowdown to the re-solve", str(wait), f"<= {SEEN}", wait <= SEEN),
        Criterion(further, str(len(later)), "<= 1", len(later) <= 1),
    ]
    return Findings([record.table(rows), "\n".join(f"- {line}" for line in reasons)], criteria)


def _compute(step: StepRecord) -> float:
    return sum(end - begin for kind, begin, end in step.spans if kind == "compute")
