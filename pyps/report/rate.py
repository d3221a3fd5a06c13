"""Tells that a run's learning rate is above what its policy bears, from its losses.

Let a version move the parameters by a share a of the curvature's way, along a gradient that is tau versions
old: w' = w - a w_late. From a = 2 sin(pi / (4 tau + 2)) on that diverges: from 2 for synchronous steps, and
for N alike workers that push one by one, each 1/N of a step, from about pi / 2 instead. Beyond it, w grows by
a factor r a version and the loss by its square, and r says how large a is. So the rise of a loss tells the
rate at which it would not have risen, as far as the loss is like a quadratic and the optimizer is SGD; with
momentum the limit was up to 1.5 times that. The loss of a network is bounded where its units saturate or die:
it rises to where it began, and stays about there. Then nothing tells how far the rate is above the limit.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from pyps.formats.records import StepRecord
from pyps.report.steps import LossPoint

WINDOW = 5  # global batches
RISEN = 2.0  # times the least mean of a window, at the end
WORTH = 0.1  # of the first mean: of a loss that ends lower a rise matters little
ROSE = 1.5  # times the least loss before, at any time
AS_BEGAN = 0.75  # of the first mean: a loss that has risen to that is where it began
NOT_BACK = 0.75  # of the least loss before a rise: a run that ends above that has not recovered
DEVIATIONS = 6.0  # of a window's mean


def rate_advice(policy: str, applied: Sequence[StepRecord], losses: Sequence[LossPoint], batch: int) -> str:
    """Return that the rate is too large for a policy, and about what it would take, if the loss says so;
    empty if not.

    applied: the records of gradients in the parameters. losses: by global batch. batch: the samples of one.
    """
    finite = [point.loss for point in losses if math.isfinite(point.loss)]
    rates = [record.lr for record in applied[-batch:] if record.lr]
    if not rates or (rise := risen(finite)) is None:
        return ""
    rate = median(rates)
    text = f"the loss rose from {rise.least:.3g} to {rise.most:.3g}"
    large = f"a learning rate of {rate:.3g} is too large for {policy} here"
    if rise.batches is None:
        return f"{text} and has not recovered: {large}; halve it until the loss falls"
    share = sum(r.samples for r in applied) / batch / len({r.version for r in applied})
    late = 0.0 if share > 0.9 else fmean(r.staleness for r in applied)  # rounds go on along what is under way
    growth = math.exp(0.5 * math.log(rise.most / rise.least) / rise.batches * share)
    limit = step_of(1.0, late) / step_of(growth, late)
    return f"{text}: {large}, which would take at most about {rate * limit:.2g}"


@dataclass(frozen=True)
class Rise:
    """The loss before and after a rise. batches: global batches between them, if it lasted until the end;
    None: the loss fell again, but has not recovered.
    """

    least: float
    most: float
    batches: int | None = None


def risen(losses: Sequence[float]) -> Rise | None:
    """Return how a loss has risen clearly, until the end or without recovering; None if it has not."""
    means = [fmean(losses[k : k + WINDOW]) for k in range(len(losses) - WINDOW + 1)]
    if len(means) <= WINDOW or min(means) <= 0:  # a ratio says nothing of a loss that is below zero
        return None
    low, end = min(range(len(means)), key=means.__getitem__), means[-1]
    batches = len(means) - 1 - low
    if batches >= WINDOW and end >= max(RISEN * means[low], WORTH * means[0], _clear(losses, low)):
        return Rise(means[low], end, batches)
    lows = [0]  # of the windows up to each
    for k in range(1, len(means)):
        lows.append(k if means[k] < means[lows[-1]] else lows[-1])
    top = max(range(1, len(means)), key=lambda k: means[k] / means[lows[k - 1]])
    low, start = lows[top - 1], losses[0]
    for least, most, clear in (
        (means[low], means[top], _clear(losses, low)),
        (start, max(means), start + DEVIATIONS * stdev(losses[-WINDOW:])),  # it rose in the first window
    ):
        if most >= max(ROSE * least, AS_BEGAN * means[0], clear) and end >= NOT_BACK * least:
            return Rise(least, most)
    return None


def _clear(losses: Sequence[float], at: int) -> float:
    """The least mean of a window that is clearly above the one from `at` on."""
    around = [stdev(losses[k : k + WINDOW]) for k in range(max(0, at - 2 * WINDOW), at + 1)]
    return fmean(losses[at : at + WINDOW]) + DEVIATIONS * max(around) / math.sqrt(WINDOW)


def step_of(growth: float, late: float) -> float:
    """Return the share of the curvature's way in a version with which parameters grow by a factor a version.

    It is |z - 1| |z|^late for the z = growth e^(i w) whose angles fit: arg(z - 1) + late w = pi.
    """
    low, high = 0.0, math.pi
    for _ in range(60):
        middle = 0.5 * (low + high)
        short = cmath.phase(cmath.rect(growth, middle) - 1.0) + late * middle < math.pi
        low, high = (middle, high) if short else (low, middle)
    return abs(cmath.rect(growth, low) - 1.0) * math.pow(growth, late)
