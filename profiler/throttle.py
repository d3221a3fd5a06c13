"""Emulates a slower device: makes a step last as long as it would there, whatever else runs on the machine.

A span is one piece of work. Its target is either `factor` times the CPU time that this thread spent in it, or
the time that a fitted cost model predicts for the span's batch. After the work the span sleeps once, until
its absolute deadline, start + target. The factor multiplies CPU time, not wall time: if four workers share
two cores, contention lengthens wall time but hardly CPU time. Work that takes longer than its target is
reported: the excess is the span's overrun, and the throttle sums the overruns.

The emulation covers the time of a slower device, not its memory, bandwidth or jitter.
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
    """The seconds of one throttled piece of work; set when the span ends."""

    work_seconds: float = 0.0  # of this thread's work, on the throttle's clock
    target_seconds: float = 0.0
    lasted_seconds: float = 0.0  # wall time, including the wait
    overrun_seconds: float = 0.0  # wall time of the work beyond the target, or 0


class Throttle:
    """A device `factor` times slower, or one that follows a fit; the module's docstring defines the
    semantics.

    work_clock: returns the seconds of this thread's work (CPU time). For a GPU, whose work costs the thread
    no CPU time, pass `time.perf_counter` and synchronise inside the span. Raises InputError if `factor` is
    not a finite number of at least 1.
    """

    def __init__(self, factor: float, *, work_clock: Callable[[], float] = time.thread_time) -> None:
        if not (math.isfinite(factor) and factor >= 1.0):
            raise InputError("throttle", "factor", repr(factor), "a finite number of at least 1")
        self.factor = float(factor)
        self.spans = 0
        self.overruns = 0
        self.overrun_seconds = 0.0
        self.work_clock = work_clock
        self._model_seconds: Callable[[int], float] | None = None

    @classmethod
    def from_fit(cls, fit: Fit) -> Throttle:
        """A throttle whose span of batch b lasts the fit's T(b) seconds, if the work does not take longer."""
        from pyps.profiler.fit import predict_seconds  # here: the profiler's package imports this module

        throttle = cls(1.0)
        throttle._model_seconds = partial(predict_seconds, fit)
        return throttle

    @contextmanager
    def span(self, batch: int | None = None) -> Iterator[ThrottledSpan]:
        """Times the body, then waits until the span has lasted its target; an exception ends it without a
        wait.

        batch: samples; required by a throttle made from a fit, ignored by one made from a factor.
        """
        model_seconds = self._model_seconds
        span = ThrottledSpan()
        if model_seconds is not None:
            if batch is None or batch < 1:
                raise InputError("throttle", "batch", repr(batch), "the span's number of samples, at least 1")
            span.target_seconds = model_seconds(batch)
        work_start = self.work_clock()
        start_ns = time.monotonic_ns()
        yield span
        worked_ns = time.monotonic_ns() - start_ns
        span.work_seconds = self.work_clock() - work_start
        if model_seconds is None:
            span.target_seconds = self.factor * span.work_seconds
        sleep_until(start_ns + round(span.target_seconds / NANOSECOND))
        span.lasted_seconds = (time.monotonic_ns() - start_ns) * NANOSECOND
        span.overrun_seconds = max(0.0, worked_ns * NANOSECOND - span.target_seconds)
        self.spans += 1
        self.overruns += span.overrun_seconds > 0.0
        self.overrun_seconds += span.overrun_seconds


def sleep_until(deadline_ns: int) -> None:
    """Sleeps until a deadline of time.monotonic_ns(), and never returns earlier."""
    while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns * NANOSECOND)
