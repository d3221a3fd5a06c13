"""One idea: make a step last as long as it would on a slower device, whatever the cores are doing.

A span is one piece of work. Its *target* is either `factor` times the CPU time that this thread spent
in it, or what a fitted cost model says for the span's batch. When the work is done the span waits for
its absolute deadline, start + target, in one sleep. CPU time, not wall time, is what gets multiplied:
where four workers share two cores, wall time grows with the contention and CPU time hardly does, so the
throttle sets the pace and not the neighbours. Work that took longer than its target is never hidden: the
excess is the span's overrun, summed in the throttle for the report.

This is an emulation: it models the time of a slower device, not its memory, bandwidth or jitter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from pyps.errors import InputError
from pyps.formats import Fit

NANOSECOND = 1e-9


@dataclass
class ThrottledSpan:
    """What one throttled piece of work took, in seconds; filled when the span ends."""

    work_seconds: float = 0.0  # of this thread's own work, on the throttle's clock
    target_seconds: float = 0.0
    lasted_seconds: float = 0.0  # wall time, the wait included
    overrun_seconds: float = 0.0  # wall time of the work beyond the target; 0 where the throttle held


class Throttle:
    """A device `factor` times slower, or one that follows a fit; see the module's text for the semantics.

    `work_clock` gives seconds of this thread's own work (CPU time). On a GPU, whose work costs the thread
    nothing, pass `time.perf_counter` and synchronise inside the span.
    Raises InputError if `factor` is not a finite number of at least 1.
    """

    def __init__(self, factor: float, *, work_clock: Callable[[], float] = time.thread_time) -> None:
        if not (math.isfinite(factor) and factor >= 1.0):
            raise InputError("throttle", "factor", repr(factor), "a finite number of at least 1")
        self.factor = float(factor)
        self.spans = 0
        self.overruns = 0
        self.overrun_seconds = 0.0
        self._work_clock = work_clock
        self._model_seconds: Callable[[int], float] | None = None

    @classmethod
    def from_fit(cls, fit: Fit) -> Throttle:
        """A throttle whose span of batch b lasts exactly the fit's T(b) seconds, if the work fits into it."""
        from pyps.profiler.fit import predict_seconds  # here: the profiler's package imports this module

        throttle = cls(1.0)
        throttle._model_seconds = partial(predict_seconds, fit)
        return throttle

    @contextmanager
    def span(self, batch: int | None = None) -> Iterator[ThrottledSpan]:
        """Time the body, then wait until the span has lasted its target; an exception leaves at once.

        `batch` (samples) is needed by a throttle made from a fit and ignored by one made from a factor.
        """
        model_seconds = self._model_seconds
        span = ThrottledSpan()
        if model_seconds is not None:
            if batch is None or batch < 1:
                raise InputError("throttle", "batch", repr(batch), "the span's number of samples, at least 1")
            span.target_seconds = model_seconds(batch)
        work_start = self._work_clock()
        start_ns = time.monotonic_ns()
        yield span
        worked_ns = time.monotonic_ns() - start_ns
        span.work_seconds = self._work_clock() - work_start
        if model_seconds is None:
            span.target_seconds = self.factor * span.work_seconds
        sleep_until(start_ns + round(span.target_seconds / NANOSECOND))
        span.lasted_seconds = (time.monotonic_ns() - start_ns) * NANOSECOND
        span.overrun_seconds = max(0.0, worked_ns * NANOSECOND - span.target_seconds)
        self.spans += 1
        self.overruns += span.overrun_seconds > 0.0
        self.overrun_seconds += span.overrun_seconds


def sleep_until(deadline_ns: int) -> None:
    """Sleep to a deadline of time.monotonic_ns(); returns at once if it is past, and never before it."""
    while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns * NANOSECOND)
