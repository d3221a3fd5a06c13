"""A worker that becomes 50 ms slower while a run of real processes trains: how soon the others take over."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from acceptance import Bar, Findings
from papers_real import write_plan
from record import table
from tuning import Effort

from pyps.formats.records import StepRecord, read_run
from pyps.run.rebalance import WINDOW_STEPS
from pyps.run.supervisor import run

WORKER = Path(__file__).resolve().parent / "straggler_worker.py"
COSTS = [[0.02 * k, 0.005 * k] for k in (1.0, 1.4, 2.0, 2.9)]  # of clusters/four.toml
GLOBAL_BATCH = 64
LATE, ADDED = 1, 0.05  # which rank, and seconds
BEGINS, SEEN, WATCHED = 30, 3 * WINDOW_STEPS, 200  # rounds: before it, until it is made good, and then
BALANCED = 0.1  # the longest step over the mean, less 1

Rounds = dict[int, dict[int, StepRecord]]  # round -> rank -> record


def straggler(effort: Effort, out: Path) -> Findings:
    """One run with --rebalance; `quick` watches it for a few rounds only."""
    folder = out / "straggler"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_plan("four", folder / "plan.json")
    begins, watched = (2 * WINDOW_STEPS, 10) if effort.quick else (BEGINS, SEEN + WATCHED)
    rounds_asked = begins + WINDOW_STEPS + watched
    report = run(
        folder / "plan.json", WORKER, "bsp", samples=rounds_asked * GLOBAL_BATCH, rebalance=True,
        args=[json.dumps(COSTS), str(LATE), str(begins), str(ADDED)], run_dir=folder / "run",
    )  # fmt: skip
    rounds: Rounds = {}
    for record in read_run(folder / "run"):
        rounds.setdefault(record.round, {})[record.rank] = record
    plans = [max(r.plan for r in one.values()) for _, one in sorted(rounds.items())]
    moves = [k + 1 for k, (a, b) in enumerate(pairwise(plans)) if a != b]
    return _found(list(dict(sorted(rounds.items())).values()), moves, begins, report.replans)


def _found(rounds: list[dict[int, StepRecord]], moves: list[int], begins: int, said: list[str]) -> Findings:
    """moves: the rounds that began with another split."""
    answers = [at for at in moves if at > begins]
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
        rows.append([
            f"{what}: {lo} to {hi - 1}", str(split), " ".join(f"{1e3 * s:.0f}" for s in each),
            f"{1e3 * lasts:.0f}", f"{imbalance[what]:+.1%}",
        ])  # fmt: skip
    after = imbalance.get("after one re-solve", float("inf"))
    wait = first - begins
    later = [at for at in answers[1:] if at <= first + WATCHED]
    bars = [
        Bar("imbalance after one re-solve", f"{after:.3f}", f"< {BALANCED}", after < BALANCED),
        Bar("rounds from the slowdown to the re-solve", str(wait), f"<= {SEEN}", wait <= SEEN),
        Bar(f"further re-solves in the {WATCHED} rounds after it", str(len(later)), "<= 1", len(later) <= 1),
    ]  # fmt: skip
    return Findings([table(rows), "\n".join(f"- {line}" for line in said)], bars)


def _compute(record: StepRecord) -> float:
    return sum(end - begin for kind, begin, end in record.spans if kind == "compute")
