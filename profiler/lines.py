"""Fits a profile's other lines: a batch's peak memory, and the seconds of a transfer by its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pyps.formats import Link, Memory
from pyps.profiler.fit import fit_points


def memory_model(peaks: Sequence[tuple[int, int]], budget_bytes: int) -> Memory | None:
    """The memory model fixed + per sample * b, an upper bound of every measured peak; None if memory is
    constant.

    The slope is the median over pairs of sizes, the intercept the least with which no point lies above the
    line. peaks: two or more batches, each with its peak in bytes.
    """
    b, peak = (np.array(values, float) for values in zip(*peaks, strict=True))
    i, j = np.triu_indices(len(b), 1)
    slope = float(np.median((peak[j] - peak[i]) / (b[j] - b[i])))
    if slope <= 0:
        return None
    fixed = max(0, math.ceil(float(np.max(peak - slope * b))))
    return Memory(fixed_bytes=fixed, bytes_per_sample=slope, budget_bytes=budget_bytes)


def link_model(via: str, seconds: Mapping[int, Sequence[float]]) -> Link:
    """Latency and bandwidth of a link. via: how it was measured. seconds: of messages, by their bytes."""
    largest = max(seconds)
    at_least = largest / float(np.median(seconds[largest]))  # where the slope is lost in the noise
    if len(seconds) == 1:
        return Link(via=via, latency_seconds=0.0, bytes_per_second=at_least)
    fit = fit_points([(size, value) for size, values in seconds.items() for value in values])
    per_byte = fit.per_sample_seconds or 1 / at_least
    latency = fit.fixed_seconds or float(np.median(seconds[min(seconds)]))  # of a line through 0
    return Link(via=via, latency_seconds=latency, bytes_per_second=1 / per_byte)
