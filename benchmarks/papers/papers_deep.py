"""SaPS where a deeper network learns with momentum, and with AdamW: against ASP and DynSGD, each tuned.

All of them look ahead, as is their default. The network is that of benchmarks/lookahead.py: 64-96-96-10,
ReLU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from acceptance import (
    ASP,
    DYNSGD,
    SAPS,
    UNIFORM_MARGIN,
    Criterion,
    Findings,
    panels,
    result_tables,
)
from benchmark_tools import learning_rate
from sklearn.datasets import load_digits
from tuning import (
    Budget,
    Competitor,
    Learner,
    TuningResult,
    TuningScenario,
    clearly_faster,
    ratio_interval,
    tune_all,
)

from pyps import Hyper

SEEDS, TUNING = tuple(range(301, 308)), (101, 102)
SIZES = (64, 96, 96, 10)
AHEAD, LEVEL = ("many", "three"), ("four",)
GIVEN = Competitor("SaPS, noise given", ("saps:noise=4",))  # its bound does not follow the measured noise


@cache
def deep_digits(seed: int) -> learning_rate.Perceptron:
    x, y = load_digits(return_X_y=True)
    return learning_rate.Perceptron(SIZES, (x / 16).astype(np.float32), y, seed)


LEARNERS = (
    Learner("momentum 0.9", deep_digits, Hyper(lr=0.1, momentum=0.9), "momentum"),
    Learner("AdamW", deep_digits, Hyper(lr=0.001, weight_decay=0.01), "adamw"),
)


def deep(budget: Budget, _: Path) -> Findings:
    """Where bounding staleness can gain much, and where it cannot."""
    if not budget.quick:
        budget = replace(budget, seeds=SEEDS, tuning=TUNING)
    clusters = ("three",) if budget.quick else (*AHEAD, *LEVEL)
    scenarios = [TuningScenario(c, learner=learner) for learner in LEARNERS for c in clusters]
    competitors = (SAPS, ASP, DYNSGD, GIVEN)
    found = tune_all([(s, c) for s in scenarios for c in competitors], budget)
    criteria = []
    for at, scenario in enumerate(scenarios):
        criteria += _criteria(scenario, *found[len(competitors) * at :][: len(competitors)])
    return Findings(result_tables(found, with_ceiling=True), criteria, panels(found))


def _criteria(
    scenario: TuningScenario, ours: TuningResult, asp: TuningResult, dynsgd: TuningResult, given: TuningResult
) -> list[Criterion]:
    ratio = asp.mean / ours.mean
    value = _over(asp, ours)
    if scenario.cluster in AHEAD:
        due, met = "95 % intervals apart", clearly_faster(ours, asp)
    else:
        due, met = f">= {1 / (1 + UNIFORM_MARGIN):.2f}", ratio >= 1 / (1 + UNIFORM_MARGIN)
    return [
        Criterion(f"{scenario.title}: ASP's time over SaPS's", value, due, met),
        *(
            Criterion(
                f"{scenario.title}: DynSGD's time over {name}",
                _over(dynsgd, one),
                "ahead or level",
                ratio_interval(dynsgd, one)[1] >= 1.0,
            )
            for one, name in ((ours, "SaPS's"), (given, "that of SaPS with the noise given"))
        ),
    ]


def _over(other: TuningResult, one: TuningResult) -> str:
    low, high = ratio_interval(other, one)
    return f"{other.mean / one.mean:.2f}; by seed {low:.2f} to {high:.2f}"
