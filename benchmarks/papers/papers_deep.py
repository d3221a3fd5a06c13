"""SaPS where a deeper network learns with momentum, and with AdamW: against ASP and DynSGD, each tuned.

All of them look ahead, as is their default. The network is that of benchmarks/lookahead.py: 64-96-96-10,
ReLU.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from acceptance import (
    ASP,
    DYNSGD,
    SAPS,
    Findings,
    panels,
    result_tables,
)
from benchmark_tools import learning_rate
from null import Claim, Null
from sklearn.datasets import load_digits
from tuning import Budget, Learner, TuningScenario, tune_with_copies

from pyps import Hyper

SIZES = (64, 96, 96, 10)
CLUSTERS = "many", "three"
COMPETITORS = SAPS, ASP, DYNSGD


@cache
def deep_digits(seed: int) -> learning_rate.Perceptron:
    x, y = load_digits(return_X_y=True)
    return learning_rate.Perceptron(SIZES, (x / 16).astype(np.float32), y, seed)


LEARNERS = (
    Learner("momentum 0.9", deep_digits, Hyper(lr=0.1, momentum=0.9), "momentum"),
    Learner("AdamW", deep_digits, Hyper(lr=0.001, weight_decay=0.01), "adamw"),
)


def deep(budget: Budget, _: Path) -> Findings:
    """Where bounding staleness can gain much."""
    clusters = budget.among(CLUSTERS, quick="three")
    scenarios = [TuningScenario(c, learner=learner) for learner in LEARNERS for c in clusters]
    found = tune_with_copies([(s, c) for s in scenarios for c in COMPETITORS], budget)
    null, claims = Null.of(found), []
    for at in range(0, len(found), len(COMPETITORS)):
        ours, *theirs = found[at : at + len(COMPETITORS)]
        claims += [Claim.of(ours, rival, null) for rival in theirs]
    return Findings([*result_tables(found, with_ceiling=True), str(null)], [*claims], panels(found))
