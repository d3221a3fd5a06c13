"""Says what preemptions, checkpoints and absent machines add to a job's time, and how sure its end is.

A preemption stops the job: it waits until the machine is back and `restart_seconds` more, and goes on from
its last checkpoint; each checkpoint takes `checkpoint_seconds`. With the best interval between checkpoints
(J. Daly, Future Generation Computer Systems 22, 2006, for exponential times between failures) work takes

    lost = exp(rate * restart) / (1 - x),    (1 - x) exp(x) = exp(-rate * checkpoint),    interval = x / rate

times as long while all machines are there, which is the product of their availabilities. The preemptions of a
job are independent delays: with the probability of none they add nothing, else what they add is taken as a
gamma distribution with the mean and the variance of delays of a restart, part of an interval, and an
exponential time away.

A machine's trace tells its availability, its mean time away, and the rate with which exponential times would
lose as much work as its own times do, whose variation is often larger.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pyps.errors import InputError, needed
from pyps.formats import WorkerGroup
from pyps.formats.cluster import Spot

HOUR = 3600.0
MOST_LOST = 700.0  # log of how much longer a job may take
LEAST_RATE, MOST_RATE = 1e-6, 1e3  # an hour, of a trace
BISECTIONS = 60
TINY = 1e-9
COLUMNS = "seconds", "available"


def lost_to_preemptions(per_hour: Any, spot: Spot) -> tuple[Any, Any]:
    """How many times longer work takes, and the best seconds between checkpoints; infinite: none are needed.

    per_hour: preemptions, a number or an array.
    """
    lambertw = needed("scipy.special", "plan").lambertw

    rate = np.asarray(per_hour, float) / HOUR
    x = 1 + lambertw(-np.exp(-rate * spot.checkpoint_seconds - 1)).real
    exponent = rate * spot.restart_seconds - np.log1p(-np.minimum(x, 1 - 1e-12))
    with np.errstate(divide="ignore", invalid="ignore"):
        every = np.where(rate > 0, x / np.where(rate > 0, rate, 1.0), math.inf)
    return np.where(rate > 0, np.exp(np.minimum(exponent, MOST_LOST)), 1.0), every


@dataclass(frozen=True)
class Delays:
    """The seconds of a job with `work` seconds of undisturbed steps: the least, what preemptions add on
    average, with its variance, and the probability that there are none. last: of the last checkpoint, of
    which the least has a part. Numbers, or arrays.
    """

    least: Any
    mean: Any
    variance: Any
    none: Any
    last: Any

    @staticmethod
    def of(work: Any, per_hour: Any, away: Any, spot: Spot) -> Delays:
        """per_hour: preemptions. away: minus the logarithm of the share of time in which all machines are
        there.
        """
        lost, every = lost_to_preemptions(per_hour, spot)
        rate, absent = np.asarray(per_hour, float) / HOUR, np.expm1(np.minimum(away, MOST_LOST))
        least = work * (1 + spot.checkpoint_seconds / every)
        mean = np.maximum(work * lost * (1 + absent) - least, 0.0)
        number = np.maximum(rate * work * lost, 1e-300)
        gone = np.where(rate > 0, absent / np.where(rate > 0, rate, 1.0), 0.0)
        each = (mean / number) ** 2 + np.where(rate > 0, every, 0.0) ** 2 / 12 + gone**2
        more = 1 + mean / np.maximum(least, 1e-300)  # delays make room for further ones
        none = np.where(rate > 0, np.exp(-rate * least), 0.0)
        last = np.where(rate > 0, spot.checkpoint_seconds, 0.0)
        return Delays(least, mean, number * each * more, none, last)

    @property
    def expected(self) -> Any:
        return self.least + self.mean

    def by(self, confidence: float) -> Any:
        """The seconds by which the job has ended with this probability."""
        special = needed("scipy.special", "plan")
        share = np.maximum((confidence - self.none) / np.maximum(1 - self.none, TINY), 0.0)
        shape, scale = self._delayed()
        with np.errstate(invalid="ignore"):
            more = special.gammaincinv(shape, share) * scale
        return self.least + self.last + np.where(np.asarray(self.mean) > 0, more, 0.0)

    def chance(self, seconds: float) -> float:
        """The probability that the job has ended by then."""
        special = needed("scipy.special", "plan")
        seconds = seconds - float(self.last)
        if seconds < self.least or self.mean <= 0:
            return float(seconds >= self.least)
        shape, scale = self._delayed()
        return float(self.none + (1 - self.none) * special.gammainc(shape, (seconds - self.least) / scale))

    def _delayed(self) -> tuple[Any, Any]:
        """The shape and the scale of what preemptions add where there are some."""
        some = np.maximum(1 - self.none, TINY)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = self.mean / some
            variance = np.maximum((self.variance + self.mean**2) / some - mean**2, TINY * mean**2)
            return mean**2 / variance, variance / mean


@dataclass(frozen=True)
class Presence:
    """One machine's preemptions an hour of its presence, and the share of time in which it is there."""

    preemptions_per_hour: float
    availability: float = 1.0


def presence_of(group: WorkerGroup, spot: Spot) -> Presence:
    """Return what the cluster file, or a trace that it names, says of a group. Raises InputError."""
    if group.trace is not None:
        return traced(group.trace, spot)
    if group.availability is None:
        return Presence(group.preemptions_per_hour)
    rate = group.preemptions_per_hour
    if group.downtime_seconds:
        rate = HOUR * (1 - group.availability) / (group.availability * group.downtime_seconds)
    return Presence(rate, group.availability)


@lru_cache(maxsize=64)
def traced(path: str, spot: Spot) -> Presence:
    """The presence of a machine by its trace: a CSV file with the columns seconds and available, of one run
    after another (0: it was away). Raises InputError.
    """
    there, away = runs_of(path)
    if not len(there):
        raise InputError(path, "available", "0 in every row", "a machine that is there at some time")
    low, high = math.log(LEAST_RATE), math.log(MOST_RATE)
    for _ in range(BISECTIONS):
        rate = math.exp((low + high) / 2)
        lost, every = (float(x) for x in lost_to_preemptions(rate, spot))
        found = useful(there, every, spot)
        low, high = (low, (low + high) / 2) if lost * found > there.sum() else ((low + high) / 2, high)
    total = float(there.sum() + away.sum())
    return Presence(math.exp((low + high) / 2), float(there.sum()) / total)


def useful(there: Sequence[float] | Any, every: float, spot: Spot) -> float:
    """The seconds of work that checkpoints save in runs of presence, each after a restart."""
    cycles = np.floor(
        np.maximum(np.asarray(there) - spot.restart_seconds, 0.0) / (every + spot.checkpoint_seconds)
    )
    return float(cycles.sum() * every)


def runs_of(path: str) -> tuple[Any, Any]:
    """The seconds of each run of presence in a trace, and of each of absence. Raises InputError."""
    runs: list[list[float]] = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = (line for line in file if not line.startswith("#"))
            for row in csv.DictReader(lines):
                try:
                    seconds, here = (float(row[name]) for name in COLUMNS)
                except (KeyError, TypeError, ValueError):
                    raise InputError(path, "", str(row), f"the columns {', '.join(COLUMNS)}") from None
                if runs and (runs[-1][1] > 0) == (here > 0):
                    runs[-1][0] += seconds
                else:
                    runs.append([seconds, here])
    except OSError as error:
        raise InputError(path, "", error.strerror or str(error), "a trace that can be read") from None
    there, away = (np.array([s for s, here in runs if (here > 0) == kind]) for kind in (True, False))
    return there, away
