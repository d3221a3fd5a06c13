"""Planned batches, SaPS and backup workers against rivals that the other parts do not have, each tuned; where
rounds wait for all, with its own global batch.
"""

from __future__ import annotations

from pathlib import Path

from acceptance import (
    FEWER,
    PLANNED,
    QUORUM,
    SAPS,
    Findings,
    all_inside,
    result_tables,
)
from acceptance import SHARES as GLOBAL
from null import Claim, Null
from tuning import Budget, Competitor, TuningScenario, tune_with_copies

CLUSTERS = ("three-types", "five")
SHARES = (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)  # of the planned batches' time
COUNTS = (1, 2, 3, 4, 6, 8, 12)  # 0 of a code is BSP, 1 of K-async is ASP
SPLITS, BOUNDS = (1, 2, 3, 4, 5, 8, 16), (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
ANYTIME = Competitor("Anytime Minibatch", tuple(f"anytime:share={s}" for s in SHARES), planned=True)
CODES = tuple(f"coded:k={k}" for k in COUNTS)
CODED = Competitor("gradient coding, planned batches", CODES, planned=True, shares=GLOBAL, ends=CODES[:1])
K_ASYNC = Competitor("K-async", tuple(f"k-async:k={k}" for k in COUNTS), ends=("k-async:k=1",))
FLEXRR = Competitor("FlexRR's reassignment, planned batches", ("flexrr",), planned=True, shares=GLOBAL)
SOFTSYNC = Competitor("softsync", tuple(f"softsync:n={n}" for n in SPLITS), ends=("softsync:n=1",))
DSSP = Competitor(  # BSP at one end, ASP at the other
    "DSSP", tuple(f"dssp:bound={b}" for b in BOUNDS), ends=("dssp:bound=0", "dssp:bound=89")
)
OURS = PLANNED, FEWER, QUORUM, SAPS
RIVALS = ANYTIME, CODED, K_ASYNC, FLEXRR, SOFTSYNC, DSSP


def rivals(budget: Budget, _: Path) -> Findings:
    """Tables by cluster, and the best of ours against the best of theirs."""
    clusters = budget.among(CLUSTERS, quick="five")
    found = tune_with_copies([(TuningScenario(c), e) for c in clusters for e in (*OURS, *RIVALS)], budget)
    null, claims = Null.of(found), []
    for cluster in clusters:
        results = {s.competitor.title: s for s in found if s.scenario.cluster == cluster}
        ours = min((results[e.title] for e in OURS), key=lambda s: s.mean)
        claims += [Claim.of(ours, results[rival.title], null) for rival in RIVALS]
    return Findings([*result_tables(found), str(null)], [*claims, all_inside(found)])
