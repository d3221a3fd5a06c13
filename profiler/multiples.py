"""Devices that are fast only at multiples of 8, 16 or 32 samples: which sizes show it, and whether they do.

A size just below a measured multiple tells: on any other device it takes hardly less time, never more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from pyps.formats import Fit, Profile
from pyps.profiler.curve import fit_of, select_fit, usual_noise
from pyps.profiler.fit import medians_of, point_seconds
from pyps.profiler.statistics import spread

MULTIPLES = 32, 16, 8
LEAST = MULTIPLES[-1]
OFF_AT_LEAST = 1.05  # times as long off the multiples that proves them
LEAST_SIZES = 3  # two multiples, and one off these
CERTAIN, EACH = 3.0, 1.5  # standard errors that sizes off the multiples have to be apart, and each of them
BEYOND = 1.5  # times the spread of a size's own steps and of those at the multiples next to it
SHAPE_ERROR = 0.1  # of the log of a time, by the log of the distance from the nearest multiple measured


def odd_size(sizes: Sequence[int]) -> int | None:
    """The size just below the largest multiple of 8 inside ascending sizes; None where there is none, or
    where a size off the multiples is among them already.
    """
    large = [size for size in sizes[1:-1] if size >= 2 * LEAST]
    on = [size for size in large if size % LEAST == 0]
    return on[-1] - 1 if on and len(on) == len(large) else None


def shown_multiple(profile: Profile) -> int | None:
    """The multiple, 32, 16 or 8, off which every measured size takes longer than the curve through the
    multiples says; None: there is none, or too few sizes were measured: of the large ones, fewer multiples
    than others, or fewer than two.
    """
    if len({point.batch for point in profile.points}) < LEAST_SIZES:
        return None
    batches, seconds = medians_of([(p.batch, s) for p in profile.points for s in point_seconds(p)])
    each = {point.batch: spread(point_seconds(point)) for point in profile.points}
    spreads = np.array([each[int(batch)] for batch in batches])
    for multiple in MULTIPLES:
        on = batches % multiple == 0
        first, last = batches[on].min(initial=np.inf), batches[on].max(initial=0)
        inside = ~on & (first < batches) & (batches < last)
        halves = batches[inside] % (multiple // 2) == 0  # without these a smaller multiple explains it too
        others = (~on & (batches >= 2 * LEAST)).sum()
        if on.sum() < max(2, others) or not inside.any() or not (halves.any() or multiple == LEAST):
            continue
        ratios = np.log(seconds[inside] / np.interp(batches[inside], batches[on], seconds[on]))
        apart = np.abs(np.log(batches[inside][:, None] / batches[on][None, :])).min(axis=1)
        errors = np.hypot(math.sqrt(2) * usual_noise(profile.points), SHAPE_ERROR * apart)
        wide = np.maximum(spreads[inside], np.interp(batches[inside], batches[on], spreads[on]))
        least = np.maximum(np.maximum(math.log(OFF_AT_LEAST), EACH * errors), BEYOND * wide)
        mean_error = math.hypot(*errors) / len(errors)
        if (ratios >= least).all() and ratios.mean() >= CERTAIN * mean_error:
            return multiple
    return None


def kept_multiple(profile: Profile, multiple: int) -> int:
    """The multiple that a device shows, if batches that are multiples of `multiple` keep to it; else 1."""
    shown = shown_multiple(profile) if multiple > 1 else None
    return 1 if shown is None or multiple % shown else shown


def at_multiple(profile: Profile, multiple: int) -> Profile:
    """The profile for batches that are multiples of `multiple`: of a device that is fast only at these, the
    sizes between say nothing of them, and are left out.
    """
    if (shown := kept_multiple(profile, multiple)) == 1:
        return profile
    points = [point for point in profile.points if point.batch % shown == 0]
    return msgspec.structs.replace(profile, points=points, fit=select_fit(points))


def fit_at(profile: Profile, multiple: int) -> Fit:
    """The fit for batches that are multiples of `multiple`. Raises InputError if the points have none."""
    return fit_of(at_multiple(profile, multiple))
