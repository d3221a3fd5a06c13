"""Tells that a run's learning rate is above what its policy bears, from its losses.

Let a version move the parameters by a share a of the curvature's way, along a gradient that is tau versions
old: w' = w - a w_late. From a = 2 sin(pi / (4 tau + 2)) on that diverges: from 2 for synchronous steps, and
for N alike workers that push one by one, each 1/N of a step, from about pi / 2 instead. Beyond it, w grows by
a factor r a version and the loss by its square, and r says how large a is. So the rise of a loss tells the
rate at which it would not have risen, as far as the loss is like a quadratic and the optimizer is SGD; with
momentum the limit was up to 1.5 times that.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

from pyps.formats.records import StepRecord
from pyps.report.steps import LossPoint

WINDOW = 5  # global batches
RISEN = 2.0  # times the least mean of a window
DEVIATIONS = 6.0  # of a window's mean


def rate_advice(policy: str, applied: Sequence[StepRecord], losses: Sequence[LossPoint], batch: int) -> str:
    """Return at most which rate a policy would take, if the loss has risen until the end; empty if not.

    applied: the records of gradients in the parameters. losses: by global batch. batch: the samples of one.
    """
    finite = [point.loss for point in losses if math.isfinite(point.loss)]
    rates = [record.lr for record in applied[-batch:] if record.lr]
    if not rates or (rise := risen(finite)) is None:
        return ""
    least, most, batches = rise
    share = sum(r.samples for r in applied) / batch / len({r.version for r in applied})
    late = 0.0 if share > 0.9 else fmean(r.staleness for r in applied)  # rounds go on along what is under way
    growth = math.exp(0.5 * math.log(most / least) / batches * share)
    rate, limit = median(rates), step_of(1.0, late) / step_of(growth, late)
    return (
        f"the loss rose from {least:.3g} to {most:.3g}: a learning rate of {rate:.3g} is too large for "
        f"{policy} here, which would take at most about {rate * limit:.2g}"
    )


def risen(losses: Sequence[float]) -> tuple[float, float, int] | None:
    """Return the least and the last mean of a window of losses, and the global batches between them; None if
    the last one is not clearly above the least.
    """
    means = [fmean(losses[k : k + WINDOW]) for k in range(len(losses) - WINDOW + 1)]
    if len(means) <= WINDOW:
        return None
    at = min(range(len(means)), key=means.__getitem__)
    around = [stdev(losses[k : k + WINDOW]) for k in range(max(0, at - 2 * WINDOW), at + 1)]
    batches, noise = len(means) - 1 - at, max(around) / math.sqrt(WINDOW)
    if batches < WINDOW or means[-1] < RISEN * means[at] or means[-1] < means[at] + DEVIATIONS * noise:
        return None
    return means[at], means[-1], batches


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
