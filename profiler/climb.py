"""Selects the batch sizes to measure: every size runs once, in ascending order, which measures the memory and
finds the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from pyps.errors import InputError
from pyps.formats import MAX_BATCH
from pyps.profiler.budget import UNLIMITED, Budget
from pyps.profiler.multiples import LEAST, odd_size
from pyps.profiler.stepper import TRAINING, OutOfMemoryError, Stepper

CLIMB_SHARE = 0.4  # of the budget
LADDER_MIN, LADDER_MAX = 8, 11  # sizes; the curve has three coefficients
FEW = 2  # samples, which batch normalization needs
LIMIT_HALVINGS = 4  # the memory limit is found to 1/16 of a doubling

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Probe:
    """Hold what `climb` measured of one batch size."""

    batch: int
    seconds: float
    peak_bytes: int
    wall_seconds: float = 0.0  # of all of it: about two steps, without a throttle's waits

    @property
    def cost(self) -> float:
        """The wall seconds of timing this size once, with the step before."""
        return max(self.wall_seconds, 2 * self.seconds)


def ladder(max_batch: int) -> list[int]:
    """8 to 11 batch sizes from 1 to max_batch, roughly geometric; all sizes if there are fewer. Large ones
    are multiples of 8, and one is just below such: there are devices that are slower off these.
    """
    if max_batch <= LADDER_MIN:
        return list(range(1, max_batch + 1))
    count = min(max(round(math.log2(max_batch)) + 1, LADDER_MIN), LADDER_MAX - 1)
    sizes = {round(b) for b in np.geomspace(1, max_batch, count)} - {max_batch}
    ascending = sorted({b if b < 2 * LEAST else b // LEAST * LEAST for b in sizes} | {max_batch})
    odd = odd_size(ascending)
    return ascending if odd is None else sorted([*ascending, odd])


def climb(
    stepper: Stepper,
    sizes: Sequence[int] | None,
    max_step_seconds: float,
    notify: Notify,
    budget: Budget = UNLIMITED,
) -> list[Probe]:
    """Runs every size once, ascending, up to the memory limit. One sample may be too few for the model.

    sizes: the sizes to run; None: double the size up to the memory limit or max_step_seconds. notify: is
    called with a sentence on the memory limit. budget: a part of it is for this. Raises InputError if fewer
    than two sizes fit.
    """
    probes: list[Probe] = []
    alone: InputError | None = None
    for batch in sizes if sizes is not None else (2**k for k in count()):
        if batch > MAX_BATCH or (sizes is None and probes and 2 * probes[-1].seconds > max_step_seconds):
            break
        if len(probes) >= 2 and not budget.allows(_expected_wall(probes, batch), CLIMB_SHARE):
            rest = ", ".join(str(b) for b in sizes or () if b >= batch) or f"{batch} and more"
            budget.left_out.append(f"batches {rest}")
            budget.cut_short = True
            break
        budget.advance(math.inf)
        try:
            probe = (
                _probe(stepper, batch, budget.clock)
                if _expected_bytes(probes, batch) <= stepper.budget_bytes
                else None
            )
        except InputError as error:
            if batch > 1 or error.field != TRAINING:
                raise
            alone = error
            continue
        if probe is None:
            if sizes is None:
                probes += _approach_limit(stepper, probes, batch)
            _say_limit(stepper, probes, batch, notify)
            break
        probes.append(probe)
    if alone is not None:
        notify(f"no step of one sample runs ({alone.found}): every planned batch will have {FEW} or more")
    check_two(probes, stepper)
    return probes if sizes is not None else _with_odd_size(stepper, _thinned(probes), budget)


def _with_odd_size(stepper: Stepper, probes: list[Probe], budget: Budget) -> list[Probe]:
    """The probes, and one of a size just below a multiple of 8."""
    odd = odd_size([probe.batch for probe in probes])
    if odd is None or not budget.allows(probes[-1].wall_seconds, CLIMB_SHARE):
        return probes
    probe = _probe(stepper, odd, budget.clock)
    return probes if probe is None else sorted([*probes, probe], key=lambda one: one.batch)


def _expected_wall(probes: Sequence[Probe], batch: int) -> float:
    """Seconds of a larger batch's probe, on the line through the last two."""
    before, last = probes[-2], probes[-1]
    slope = (last.wall_seconds - before.wall_seconds) / (last.batch - before.batch)
    return last.wall_seconds + max(0.0, slope) * (batch - last.batch)


def check_two(probes: Sequence[Probe], stepper: Stepper) -> None:
    if len(probes) < 2:
        found = f"memory for {len(probes)} of the batch sizes ({stepper.budget_bytes:,} bytes)"
        raise InputError("batches", "", found, "room for two sizes: smaller batches or model")


def _probe(stepper: Stepper, batch: int, clock: Callable[[], float] = time.monotonic) -> Probe | None:
    """One warm-up step that measures the memory, then one timed step; None if they do not fit. It does not
    wait for a throttle, so that time suffices for all sizes.
    """
    began, throttle = clock(), getattr(stepper, "throttle", None)
    try:
        data = stepper.prepare(batch)
        peak = stepper.peak_bytes(data)
        if peak > stepper.budget_bytes:
            return None
        if throttle is not None:
            worked = throttle.work_clock()
            stepper.step(data)
            seconds = throttle.factor * (throttle.work_clock() - worked)
            return Probe(batch, seconds, peak, clock() - began)
        seconds = stepper.timed_step(data, batch)
        return Probe(batch, seconds, peak, clock() - began)
    except OutOfMemoryError:
        return None


def _expected_bytes(probes: Sequence[Probe], batch: int) -> float:
    """Peak memory of a larger batch, extrapolated from the last two probes; 0 with fewer probes.

    On a CPU nothing else stops a step before the machine runs out of memory and the kernel kills a process.
    """
    if len(probes) < 2:
        return 0.0
    before, last = probes[-2], probes[-1]
    slope = max(0.0, (last.peak_bytes - before.peak_bytes) / (last.batch - before.batch))
    return last.peak_bytes + slope * (batch - last.batch)


def _approach_limit(stepper: Stepper, probes: Sequence[Probe], failed: int) -> list[Probe]:
    """The largest fitting size that bisection finds between the last that fits and one that does not."""
    best: list[Probe] = []
    fits = probes[-1].batch if probes else 0
    for _ in range(LIMIT_HALVINGS):
        middle = (fits + failed) // 2
        if middle == fits:
            break
        inside = _expected_bytes(probes, middle) <= stepper.budget_bytes
        probe = _probe(stepper, middle) if inside else None
        if probe is None:
            failed = middle
        else:
            fits, best = middle, [probe]
    return best


def _say_limit(stepper: Stepper, probes: Sequence[Probe], failed: int, notify: Notify) -> None:
    fits = probes[-1].batch if probes else 0
    notify(
        f"memory limits the batch: {fits} fits and {failed} does not ({stepper.budget_bytes / 2**30:.1f} GiB)"
    )


def _thinned(probes: list[Probe]) -> list[Probe]:
    """At most LADDER_MAX - 1 of the probes, evenly spread, including the first and the last."""
    if len(probes) < LADDER_MAX:
        return probes
    return [probes[i] for i in sorted({round(k) for k in np.linspace(0, len(probes) - 1, LADDER_MAX - 1)})]
