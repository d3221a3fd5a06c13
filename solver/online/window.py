"""Which steps of a rank tell what its device costs now.

A step far from what was expected may be a hiccup. Several in a row, all slower or all faster, are a change:
only they count then, and the change is acted on without waiting for the window's end. What is far depends on
how much the rank's steps scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyps.solver.online.refit import OnlineCost

LARGE = 0.10  # relative: a step that is further off is a surprise
SCATTERED = 3.0  # times the scatter of a step: one that is nearer is none
CONFIRMED = 2  # surprises in a row that are a change


def settled(times: Sequence[float], device: OnlineCost, batch: int) -> Sequence[float]:
    """The steps since the last change; all, if there is none."""
    expected, large = device.expects(batch), _large(device)
    ends = [_side(seconds, expected, large) for seconds in times]
    count = 0
    while count < len(ends) and ends[-1] and ends[-1 - count] == ends[-1]:
        count += 1
    return times[-count:] if count >= CONFIRMED else times


def tells(times: Sequence[float], device: OnlineCost, batch: int) -> bool:
    """Whether a batch's steps are worth taking in before the window ends."""
    seconds = device.cost.seconds(batch)
    if len(times) < CONFIRMED or not device.known or not math.isfinite(seconds):
        return False
    sides = {_side(time, (seconds, seconds), _large(device)) for time in times[-CONFIRMED:]}
    return (device.unsure and batch not in device.known) or (len(sides) == 1 and 0 not in sides)


def _large(device: OnlineCost) -> float:
    return max(LARGE, SCATTERED * device.scatter)


def _side(seconds: float, expected: tuple[float, float], large: float) -> int:
    """1 for a step that is a surprise because it took longer, -1 because it took less; else 0."""
    low, high = expected
    return int(seconds > (1 + large) * high) - int(seconds * (1 + large) < low)
