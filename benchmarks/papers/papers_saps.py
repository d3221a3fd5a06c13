"""SaPS's claims as criteria: ahead of ASP where many slow workers make the gradients of few fast ones late,
and level with the best elsewhere.
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
    UNIFORM_MARGIN,
    Criterion,
    Findings,
    all_inside,
    panels,
    result_tables,
)
from benchmark_tools import record
from papers_real import LONGER, Case, spread, work
from tuning import (
    ROOT64,
    Budget,
    Competitor,
    TuningResult,
    TuningScenario,
    ceiling,
    clearly_faster,
    cluster_of,
    ratio_interval,
    tune_all,
)

GAINS = {"many": 2.5, "crowd": 1.8, ROOT64: 1.9, "three": 1.6}  # ASP's time over SaPS's, at least
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
    return _compared(budget, ("three",) if budget.quick else tuple(GAINS))


def level(budget: Budget, _: Path) -> Findings:
    """And where it cannot."""
    return _compared(budget, ("uniform",) if budget.quick else LEVEL)


def _compared(budget: Budget, clusters: tuple[str, ...]) -> Findings:
    if not budget.quick:
        budget = replace(budget, seeds=SEEDS, tuning=TUNING)
    found = tune_all([(TuningScenario(c), e) for c in clusters for e in competitors(c)], budget)
    criteria = []
    for name in clusters:
        criteria += _criteria(name, {s.competitor: s for s in found if s.scenario.cluster == name})
    drawn = {ASP.title, DYNSGD.title, SAPS.title, *(c.title for c in WAITING)}
    curves = panels([s for s in found if s.competitor.title in drawn])
    return Findings(result_tables(found, with_ceiling=True), [*criteria, all_inside(found)], curves)


def _criteria(cluster: str, results: dict[Competitor, TuningResult]) -> list[Criterion]:
    ours = results[SAPS]
    criteria = [_gain(cluster, ours, results[ASP])] if cluster in GAINS else [_level(cluster, ours, results)]
    for rival in (r for r in (*WAITING, DYNSGD) if r in results):
        low, high = ratio_interval(results[rival], ours)
        value = f"{results[rival].mean / ours.mean:.2f}; by seed {low:.2f} to {high:.2f}"
        figure = f"{cluster}: {rival.title}'s time over SaPS's"
        if rival is DYNSGD:
            criteria.append(Criterion(figure, value, "ahead or level", high >= 1.0))
        else:
            apart = clearly_faster(ours, results[rival])
            criteria.append(Criterion(figure, value, "95 % intervals apart", apart))
    idle = max(run.idle_share for run in ours.runs)
    least = min(rank.samples for run in ours.runs for rank in run.ranks)
    return [
        *criteria,
        Criterion(f"{cluster}: share of time that SaPS waits", f"{idle:.3f}", "0", idle == 0.0),
        Criterion(f"{cluster}: samples of SaPS's least heard worker", str(least), "> 0", least > 0),
    ]


def _gain(cluster: str, ours: TuningResult, asp: TuningResult) -> Criterion:
    ratio, least = asp.mean / ours.mean, GAINS[cluster]
    low, high = ratio_interval(asp, ours)
    value = f"{ratio:.2f}; by seed {low:.2f} to {high:.2f}"
    threshold = f">= {least}, 95 % intervals apart"
    met = ratio >= least and clearly_faster(ours, asp)
    return Criterion(f"{cluster}: ASP's time over SaPS's", value, threshold, met)


def _level(cluster: str, ours: TuningResult, results: dict[Competitor, TuningResult]) -> Criterion:
    best = min((results[ASP], results[DYNSGD]), key=lambda s: s.mean)
    low, high = ratio_interval(ours, best)
    value = f"{ours.mean / best.mean:.2f}; by seed {low:.2f} to {high:.2f}"
    figure = f"{cluster}: SaPS's time over that of the best of ASP and DynSGD"
    return Criterion(
        figure, value, f"<= {1 + UNIFORM_MARGIN:g}", ours.mean <= (1 + UNIFORM_MARGIN) * best.mean
    )


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
