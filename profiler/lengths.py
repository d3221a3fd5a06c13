"""Measures what samples of unlike length cost: steps of one sample of each length, and of as many as have the
tokens of the longest, so that what a step takes once, a sample, a token and a pair of tokens tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyps.errors import InputError, needed
from pyps.formats import MAX_BATCH, LengthCost, Lengths, Point
from pyps.profiler.fit import point_seconds
from pyps.profiler.stepper import OutOfMemoryError, Stepper

LEAST = 3  # lengths: a cost has three coefficients
STEPS = 5  # timed steps of each point


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """Distinct lengths, ascending. Raises InputError for fewer than three, or one that is no length."""
    found = sorted(set(lengths))
    if len(found) < LEAST or not 1 <= found[0] <= found[-1] <= MAX_BATCH:
        expected = f"{LEAST} or more different numbers of tokens, from 1"
        raise InputError("profile", "lengths", ",".join(map(str, lengths)) or "none", expected)
    return found


def measure_lengths(stepper: Stepper, lengths: Sequence[int]) -> Lengths:
    """Time steps of samples of each length. Raises InputError where one does not fit into memory."""
    points, before = list[Point](), stepper.length
    for tokens in lengths:
        stepper.length = tokens
        points += [_point(stepper, tokens, b) for b in sorted({1, max(1, lengths[-1] // tokens)})]
    stepper.length = before
    return fit_lengths(points)


def _point(stepper: Stepper, tokens: int, batch: int) -> Point:
    try:
        data = stepper.prepare(batch)
        peak = stepper.peak_bytes(data)
        seconds = [stepper.timed_step(data, batch) for _ in range(STEPS)]
    except OutOfMemoryError:
        peak = stepper.budget_bytes + 1
    if peak > stepper.budget_bytes:
        found = f"no memory for a step of {batch} x {tokens} tokens"
        raise InputError("profile", "lengths", found, "shorter ones")
    return Point(tokens=tokens, batch=batch, seconds=seconds, peak_bytes=peak)


def fit_lengths(points: Sequence[Point]) -> Lengths:
    """The coefficients, none negative, with the least squared relative errors."""
    batch, n = np.array([[p.batch, p.tokens] for p in points], np.float64).T
    scale = float(n.max())
    nnls = needed("scipy.optimize", "plan").nnls
    seconds = np.array([np.median(point_seconds(p)) for p in points])
    peak = np.array([p.peak_bytes for p in points], np.float64)
    x = np.column_stack([np.ones(len(n)), batch, batch * n / scale, batch * (n / scale) ** 2])
    units, held = np.array([1, 1, scale, scale**2]), [0, 2, 3]  # no bytes of a sample without tokens
    once, each, token, square = (nnls(x / seconds[:, None], np.ones(len(n)))[0] / units).tolist()
    fixed, *bytes_of = (nnls(x[:, held] / peak[:, None], np.ones(len(n)))[0] / units[held]).tolist()
    return Lengths(
        cost=LengthCost(fixed_seconds=each, per_token_seconds=token, per_square_seconds=square),
        step_seconds=once,
        fixed_bytes=int(fixed),
        per_token_bytes=bytes_of[0],
        per_square_bytes=bytes_of[1],
        points=list(points),
    )
