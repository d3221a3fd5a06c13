"""The throttle: what sets the time of a span, and what is recorded when it cannot."""

from __future__ import annotations

import math
import time

import pytest

from pyps.errors import InputError
from pyps.formats import Fit
from pyps.profiler.throttle import Throttle, sleep_until

LATE_SECONDS = 0.05  # what a busy machine may wake us up late


def burn(cpu_seconds: float) -> None:
    """Work of that much CPU time of this thread, however long it takes."""
    end = time.thread_time() + cpu_seconds
    while time.thread_time() < end:
        pass


def affine(c: float, a: float) -> Fit:
    return Fit(kind="affine", fixed_seconds=c, per_sample_seconds=a, trusted_min_batch=1, trusted_max_batch=8)


def test_a_span_lasts_factor_times_its_cpu_seconds() -> None:
    throttle = Throttle(4.0)
    start = time.perf_counter()
    with throttle.span() as span:
        burn(0.02)
    wall = time.perf_counter() - start
    assert span.work_seconds >= 0.02
    assert span.target_seconds == pytest.approx(4 * span.work_seconds)
    assert span.lasted_seconds >= span.target_seconds
    assert wall >= span.target_seconds
    assert throttle.spans == 1


@pytest.mark.timed
def test_waiting_is_not_work() -> None:
    """Wall time lost to others (here: asleep) is not multiplied; it is an overrun."""
    throttle = Throttle(3.0)
    with throttle.span() as span:
        burn(0.01)
        time.sleep(0.2)
    assert span.target_seconds < 0.15
    assert span.lasted_seconds < 0.2 + 0.15 + LATE_SECONDS
    assert span.overrun_seconds == pytest.approx(span.lasted_seconds - span.target_seconds, abs=LATE_SECONDS)
    assert (throttle.overruns, throttle.overrun_seconds) == (1, span.overrun_seconds)


@pytest.mark.timed
def test_a_fit_sets_the_time_of_its_batch() -> None:
    throttle = Throttle.from_fit(affine(0.03, 0.01))
    for batch in (1, 4):
        with throttle.span(batch=batch) as span:
            burn(0.002)
        assert span.target_seconds == pytest.approx(0.03 + 0.01 * batch)
        assert span.target_seconds <= span.lasted_seconds < span.target_seconds + LATE_SECONDS
        assert span.overrun_seconds == 0.0
    assert throttle.overruns == 0


def test_a_fit_that_the_work_does_not_fit_into_is_reported() -> None:
    throttle = Throttle.from_fit(affine(0.001, 0.0))
    with throttle.span(batch=1) as span:
        time.sleep(0.02)
    assert span.overrun_seconds >= 0.018
    assert throttle.overrun_seconds == span.overrun_seconds


@pytest.mark.timed
def test_an_exception_leaves_at_once_and_counts_nothing() -> None:
    throttle = Throttle.from_fit(affine(5.0, 0.0))
    start = time.perf_counter()
    with pytest.raises(ZeroDivisionError), throttle.span(batch=1):
        raise ZeroDivisionError
    assert time.perf_counter() - start < 1.0
    assert throttle.spans == 0


def test_a_clock_of_ones_own() -> None:
    ticks = iter([10.0, 10.02])
    throttle = Throttle(2.0, work_clock=lambda: next(ticks))
    with throttle.span() as span:
        pass
    assert span.work_seconds == pytest.approx(0.02)
    assert span.lasted_seconds >= 0.04


@pytest.mark.parametrize("factor", [0.5, 0.0, -1.0, math.nan, math.inf])
def test_refuses_a_factor(factor: float) -> None:
    with pytest.raises(InputError, match="factor"):
        Throttle(factor)


@pytest.mark.parametrize("batch", [None, 0, -3])
def test_a_fit_needs_the_batch(batch: int | None) -> None:
    with pytest.raises(InputError, match="batch"), Throttle.from_fit(affine(0.01, 0.0)).span(batch):
        pass


def test_sleep_until() -> None:
    sleep_until(time.monotonic_ns() - 1)
    deadline = time.monotonic_ns() + 3_000_000
    sleep_until(deadline)
    assert time.monotonic_ns() >= deadline
