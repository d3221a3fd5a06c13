"""Which steps of a rank tell what its device costs now.

A step that takes longer than expected may be a hiccup; two in a row are a change. No hiccup makes a step
quicker, so one that is clearly quicker is a change alone. Only the steps since a change count then, and it is
acted on without waiting for the window's end. How far a step has to be off depends on how much the rank's
steps scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyps.solver.costs import Cost
from pyps.solver.online.refit import OnlineCost

LARGE = 0.10  # relative: a step that is further off is a surprise
SCATTERED = 3.0  # times the scatter of a step: one that is nearer is none
CLEARLY = 5.0  # the same, of a quicker step that counts alone


def settled(
    times: Sequence[float], device: OnlineCost, batch: int, confirmed: int | None = None
) -> Sequence[float]:
    """The steps since the last change; all, if there is none. confirmed: surprises in a row that are one."""
    count = surprises(times, device, batch)
    return times[-count:] if count >= (confirmed or device.confirmed) else times


def undecided(times: Sequence[float], device: OnlineCost, batch: int) -> bool:
    """Return whether the next step has to tell if the last one was a hiccup or the first after a change."""
    return 0 < surprises(times, device, batch) < device.confirmed


def quicker(times: Sequence[float], device: OnlineCost, batch: int) -> bool:
    """Return whether the last step was clearly quicker than the device could be."""
    if not times or not device.known or device.awaits(batch):
        return False
    large = max(LARGE, CLEARLY * math.hypot(device.spread, device.error))
    return _side(times[-1], device.expects(batch), large) < 0


def tells(times: Sequence[float], device: OnlineCost, batch: int) -> bool:
    """Return whether a batch's steps are worth taking in before the window ends."""
    seconds = device.cost.seconds(batch)
    if not device.known or not math.isfinite(seconds):
        return False
    needed = device.confirmed
    if len(times) < needed or quicker(times, device, batch):
        return quicker(times, device, batch)
    sides = {_side(time, (seconds, seconds), _large(device)) for time in times[-needed:]}
    return device.awaits(batch) or len(times) >= device.patience or (len(sides) == 1 and 0 not in sides)


def slow(seconds: float, device: OnlineCost, cost: Cost, batch: int) -> bool:
    """Return whether a step took clearly longer than this cost of the device."""
    usual = cost.seconds(batch)
    return math.isfinite(usual) and _side(seconds, (usual, usual), _large(device)) > 0


def surprises(times: Sequence[float], device: OnlineCost, batch: int) -> int:
    """Return how many steps at the end are surprises, all on the same side."""
    expected, large, count = device.expects(batch), _large(device), 0
    ends = [_side(seconds, expected, large) for seconds in times]
    while count < len(ends) and ends[-1] and ends[-1 - count] == ends[-1]:
        count += 1
    return count


def _large(device: OnlineCost) -> float:
    return max(LARGE, SCATTERED * device.spread)


def _side(seconds: float, expected: tuple[float, float], large: float) -> int:
    """1 for a step that is a surprise because it took longer, -1 because it took less; else 0."""
    low, high = expected
    return int(seconds > (1 + large) * high) - int(seconds * (1 + large) < low)
