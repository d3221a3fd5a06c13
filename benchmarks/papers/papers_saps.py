"""SaPS's claims: ahead of ASP where many slow workers make the gradients of few fast ones late, and level
with the best elsewhere.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

from acceptance import (
    ASP,
    BACKUP,
    BACKUP_ONE,
    DYNSGD,
    EVEN,
    SAPS,
    SSP,
    Criterion,
    Findings,
    all_inside,
    panels,
    result_tables,
)
from benchmark_tools import record
from null import Claim, Null
from papers_real import LONGER, Case, spread, work
from tuning import (
    ROOT64,
    Budget,
    Competitor,
    TuningResult,
    TuningScenario,
    ceiling,
    cluster_of,
    tune_all,
    tune_with_copies,
)

GAINS = ("many", "crowd", ROOT64, "three")
FEW = "few"
LEVEL = ("four", "eight", "sixteen", "heavy", "uniform")
SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # of N: bounds to choose from
WAITING = (EVEN, BACKUP_ONE, BACKUP, SSP)
SEEDS, TUNING = tuple(range(201, 213)), (101, 102, 103)


def fixed(cluster: str, late: str) -> Competitor:
    """SaPS with a fixed bound, the best of some."""
    workers = len(cluster_of(TuningScenario(cluster), planned=False).workers)
    bounds = sorted({max(1, round(share * workers)) for share in SHARES})
    variants = tuple(f"saps:threshold=fixed,bound={bound},late={late}" for bound in bounds)
    ends = (f"saps:threshold=fixed,bound=1,late={late}",)
    return Competitor(f"SaPS, bound tuned, late: {late}", variants, ends=ends)


def competitors(cluster: str) -> tuple[Competitor, ...]:
    if cluster not in GAINS:
        return SAPS, ASP, DYNSGD, *WAITING
    return SAPS, ASP, DYNSGD, fixed(cluster, "weigh"), fixed(cluster, "drop"), EVEN


def saps(budget: Budget, _: Path) -> Findings:
    """Tuned policies on clusters where bounding staleness can gain much."""
    return _compared(budget, budget.among(GAINS, quick="three"))


def level(budget: Budget, _: Path) -> Findings:
    """And where it cannot."""
    return _compared(budget, budget.among(LEVEL, quick="uniform"))


def _compared(budget: Budget, clusters: tuple[str, ...]) -> Findings:
    if not budget.quick:
        budget = replace(budget, seeds=SEEDS, tuning=TUNING)
    found = tune_with_copies([(TuningScenario(c), e) for c in clusters for e in competitors(c)], budget)
    null, criteria = Null.of(found), list[Criterion | Claim]()
    for name in clusters:
        criteria += _claims([s for s in found if s.scenario.cluster == name], null)
    drawn = {ASP.title, DYNSGD.title, SAPS.title, *(c.title for c in WAITING)}
    curves = panels([s for s in found if s.competitor.title in drawn])
    tables = [*result_tables(found, with_ceiling=True), str(null)]
    return Findings(tables, [*criteria, all_inside(found)], curves)


def _claims(found: list[TuningResult], null: Null) -> list[Criterion | Claim]:
    """SaPS, the first, against each of the others."""
    ours, cluster = found[0], found[0].scenario.cluster
    idle = max(run.idle_share for run in ours.runs)
    least = min(rank.samples for run in ours.runs for rank in run.ranks)
    return [
        *(Claim.of(ours, rival, null) for rival in found[1:]),
        Criterion(f"{cluster}: share of time that SaPS waits", f"{idle:.3f}", "0", idle == 0.0),
        Criterion(f"{cluster}: samples of SaPS's least heard worker", str(least), "> 0", least > 0),
    ]


def processes(budget: Budget, out: Path) -> Findings:
    """Processes on emulated devices where bounding staleness can gain; step sizes are the simulations'."""
    scenario = TuningScenario(FEW, target=0.1, link=False)
    competitors = (SAPS,) if budget.quick else (SAPS, ASP)
    tuned = tune_all([(scenario, c) for c in competitors], replace(budget, seeds=budget.seeds[:3]))
    rows = [["run", "step size", "s to the loss: run", "simulated", "decided differently when replayed"]]
    middle = {}
    for best in tuned:
        batches = max(run.samples for run in best.runs) / best.global_batch
        length = 2 if budget.quick else math.ceil(LONGER * batches)
        pairs = [
            work(Case(FEW, best.policy, best.lr, iterations=length, seed=seed), out / "few")
            for seed in budget.seeds[: 1 if budget.quick else 3]
        ]
        real, simulated = zip(*(p.seconds_to(scenario.target) for p in pairs), strict=True)
        middle[best.competitor] = statistics.median(real)
        different = f"{sum(p.different for p in pairs)} of {sum(p.decisions for p in pairs)}"
        rows.append([f"`{best.policy}`", f"{best.lr:.3g}", spread(real), spread(simulated), different])
    about = (
        f"Cluster `{FEW}`, H = {ceiling(cluster_of(scenario, planned=False)):.1f}, loss 0.1, processes on "
        "emulated devices: medians and ranges over 3 seeds."
    )
    if budget.quick:
        return Findings([about, record.table(rows)], [])
    gain = middle[ASP] / middle[SAPS]
    criterion = Criterion(f"{FEW}, processes: ASP's time over SaPS's", f"{gain:.2f}", "> 1", gain > 1.0)
    return Findings([about, record.table(rows)], [criterion])
