"""SaPS's claims: ahead of ASP where many slow workers make the gradients of few fast ones late, and level
with the best elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from acceptance import (
    ASP,
    DYNSGD,
    EVEN,
    SAPS,
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
LEVEL = ("four", "eight", "sixteen", "uniform")
SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # of N: bounds to choose from


def fixed(cluster: str) -> Competitor:
    """SaPS with a fixed bound, the best of some."""
    workers = len(cluster_of(TuningScenario(cluster), planned=False).workers)
    bounds = sorted({max(1, round(share * workers)) for share in SHARES})
    variants = tuple(f"saps:threshold=fixed,bound={bound},late=weigh" for bound in bounds)
    return Competitor("SaPS, bound tuned", variants, ends=("saps:threshold=fixed,bound=1,late=weigh",))


def competitors(cluster: str) -> tuple[Competitor, ...]:
    return SAPS, ASP, DYNSGD, EVEN, *((fixed(cluster),) if cluster in GAINS else ())


def saps(budget: Budget, _: Path) -> Findings:
    """Tuned policies on clusters where bounding staleness can gain much, and where it cannot."""
    clusters = budget.among((*GAINS, *LEVEL), quick="three")
    found = tune_with_copies([(TuningScenario(c), e) for c in clusters for e in competitors(c)], budget)
    null, criteria = Null.of(found), list[Criterion | Claim]()
    for name in clusters:
        criteria += _claims([s for s in found if s.scenario.cluster == name], null)
    drawn = {ASP.title, DYNSGD.title, SAPS.title, EVEN.title}
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
    for best in tuned:
        batches = max(run.samples for run in best.runs) / best.global_batch
        length = 2 if budget.quick else math.ceil(LONGER * batches)
        pairs = [
            work(Case(FEW, best.policy, best.lr, iterations=length, seed=seed), out / "few")
            for seed in budget.seeds[: 1 if budget.quick else 3]
        ]
        real, simulated = zip(*(p.seconds_to(scenario.target) for p in pairs), strict=True)
        different = f"{sum(p.different for p in pairs)} of {sum(p.decisions for p in pairs)}"
        rows.append([f"`{best.policy}`", f"{best.lr:.3g}", spread(real), spread(simulated), different])
    about = (
        f"Cluster `{FEW}`, H = {ceiling(cluster_of(scenario, planned=False)):.1f}, loss 0.1, processes on "
        "emulated devices: medians and ranges over 3 seeds."
    )
    return Findings([about, record.table(rows)], [])
