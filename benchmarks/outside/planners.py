"""Planners that see some points of each device's curve and split a global batch, and what their splits take.

`pyps` fits a curve with a band; `interpolation` takes straight lines between the points, monotone; `line` is
one fitted line: all three use the same exact split. `proportional` gives each device samples by its speed at
the largest batch seen; `even` gives all the same.

The scripts of this folder are run by path; this module alone extends sys.path for them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pyps.formats import Device, Fit, ModelInfo, Point, Profile
from pyps.profiler import select_fit
from pyps.profiler.blend import monotone_polygon
from pyps.profiler.multiples import at_multiple, shown_multiple
from pyps.solver import Cost, Costs, Line, Problem, Table, solve
from pyps.solver.costs import cost_of

sys.path.append(str(Path(__file__).resolve().parents[1]))

import record

__all__ = ["PLANNERS", "Known", "Measured", "by_speed", "even", "iteration", "plan", "polygon", "record"]

Measured = tuple[tuple[int, float], ...]  # batch, seconds


class Timed(Protocol):
    """A device that takes so many seconds for a batch."""

    def seconds(self, batch: int) -> float: ...


@dataclass(frozen=True)
class Known:
    """Hold what a planner makes of a device's points. multiple: of which it plans batches."""

    cost: Cost
    multiple: int = 1
    fit: Fit | None = None


@functools.cache
def blended(points: Measured) -> Known:
    """Plan as pyps does, with the batch_multiple that it proposes."""
    measured = [Point(batch=b, seconds=s) for b, s in points]
    device, model = Device(name="d"), ModelInfo(name="m")
    profile = Profile(device=device, model=model, points=measured, fit=select_fit(measured))
    multiple = shown_multiple(profile) or 1
    fit = at_multiple(profile, multiple).fit
    assert fit is not None
    return Known(cost_of(fit), multiple, fit)


def interpolated(points: Measured) -> Known:
    """Straight lines between the points, flat before the first, at the last slope after the last one."""
    knots = polygon(points).points
    if len(knots) == 1:
        return Known(Table(knots))
    (b0, s0), (b1, s1) = knots[-2:]
    return Known(Table((*knots, (2 * b1, s1 + (s1 - s0) / (b1 - b0) * b1))))


def fitted_line(points: Measured) -> Known:
    """Least squares, with c and a of at least zero."""
    batches, seconds = np.array([b for b, _ in points], float), np.array([s for _, s in points])
    slope, fixed = np.polyfit(batches, seconds, 1)
    if fixed < 0:
        fixed, slope = 0.0, float((batches * seconds).sum() / (batches * batches).sum())
    return Known(Line(float(fixed), max(float(slope), 1e-12)))


PLANNERS: Mapping[str, Callable[[Measured], Known]] = {
    "pyps": blended,
    "interpolation": interpolated,
    "line": fitted_line,
}


def polygon(points: Sequence[tuple[int, float]]) -> Table:
    """Straight lines between the points, which are made monotone."""
    batches, seconds = [int(b) for b, _ in points], np.array([s for _, s in points])
    return Table(tuple((b, float(s)) for b, s in zip(batches, monotone_polygon(seconds), strict=True)))


def plan(known: Sequence[Known], total: int, most: Sequence[int]) -> np.ndarray:
    """The split that is fastest by what a planner knows."""
    costs, multiples = Costs.stack([one.cost for one in known]), [one.multiple for one in known]
    return solve(Problem.of(costs, total, max_batch=list(most), batch_multiple=multiples)).batches


def even(total: int, count: int) -> np.ndarray:
    """The same for all, the remainder on the first."""
    return np.array([total // count + (k < total % count) for k in range(count)])


def by_speed(seen: Sequence[Measured], total: int, most: Sequence[int]) -> np.ndarray:
    """Samples in proportion to each device's speed at its largest batch seen; what is above a device's most
    goes to the others, likewise.
    """
    speed, limit = np.array([points[-1][0] / points[-1][1] for points in seen]), np.array(most)
    split, free = np.zeros(len(seen), int), np.ones(len(seen), bool)
    while True:
        left = total - int(split[~free].sum())
        share = left * speed[free] / speed[free].sum()
        whole = np.floor(share).astype(int)
        whole[np.argsort(whole - share, kind="stable")[: left - int(whole.sum())]] += 1
        split[free] = whole
        if not (over := split > limit).any():
            return split
        split[over], free = limit[over], free & ~over


def iteration(devices: Sequence[Timed], batches: np.ndarray) -> float:
    """Seconds of the slowest."""
    return max(device.seconds(int(b)) for device, b in zip(devices, batches, strict=True) if b)
