"""Planned batches, SaPS and backup workers against rivals that the other parts do not have, each tuned; where
rounds wait for all, with its own global batch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from acceptance import (
    BOTH,
    BOTH_FEWER,
    FEWER,
    PLANNED,
    SAPS,
    UNIFORM_MARGIN,
    Criterion,
    Findings,
    all_inside,
    result_tables,
)
from acceptance import SHARES as GLOBAL
from tuning import Budget, Competitor, TuningScenario, tune_all

CLUSTERS = ("three-types", "five")
SHARES = (2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12)  # of the planned batches' time
COUNTS = (1, 2, 3, 4, 6, 8, 12)  # 0 of a code is BSP, 1 of K-async is ASP
SPLITS, BOUNDS = (1, 2, 3, 4, 5, 8, 16), (0, 1, 2, 3, 5, 8, 13)
ANYTIME = Competitor("Anytime Minibatch", tuple(f"anytime:share={s}" for s in SHARES), planned=True)
CODES = tuple(f"coded:k={k}" for k in COUNTS)
CODED = Competitor("gradient coding", CODES, shares=GLOBAL, ends=CODES[:1])
K_ASYNC = Competitor("K-async", tuple(f"k-async:k={k}" for k in COUNTS), ends=("k-async:k=1",))
FLEXRR = Competitor("FlexRR's reassignment", ("flexrr",), shares=GLOBAL)
SOFTSYNC = Competitor("softsync", tuple(f"softsync:n={n}" for n in SPLITS), ends=("softsync:n=1",))
DSSP = Competitor("DSSP", tuple(f"dssp:bound={b}" for b in BOUNDS), ends=("dssp:bound=0",))
OURS = PLANNED, FEWER, BOTH, BOTH_FEWER, SAPS
RIVALS = (
    ANYTIME,
    CODED,
    replace(CODED, title="gradient coding, planned batches", planned=True),
    K_ASYNC,
    FLEXRR,
    replace(FLEXRR, title="FlexRR's reassignment, planned batches", planned=True),
    SOFTSYNC,
    DSSP,
)


def rivals(budget: Budget, _: Path) -> Findings:
    """Tables by cluster, and the best of ours against the best of theirs."""
    clusters = CLUSTERS[1:2] if budget.quick else CLUSTERS
    found = tune_all([(TuningScenario(c), e) for c in clusters for e in (*OURS, *RIVALS)], budget)
    criteria = []
    for cluster in clusters:
        results = {s.competitor.title: s for s in found if s.scenario.cluster == cluster}
        ours, theirs = (
            min((results[e.title] for e in side), key=lambda s: s.mean) for side in (OURS, RIVALS)
        )
        figure = (
            f"{cluster}: {ours.competitor.title} over the best of these rivals, {theirs.competitor.title}"
        )
        criteria.append(Criterion.at_most(figure, ours.mean / theirs.mean, 1 + UNIFORM_MARGIN))
    return Findings(result_tables(found), [*criteria, all_inside(found)])
