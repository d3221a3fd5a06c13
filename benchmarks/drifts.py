"""Devices that drift, stall, switch or only scatter: by round, how many times longer each one takes.

replay.py --drifts drives the Balancer through them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS, DEVICES = 400, 4
Factors = list[list[float]]  # by round, then by device


def waves(luck: random.Random, high: float) -> Factors:
    """Each device has a sine of its own period and phase."""
    own = [(luck.uniform(60, 120), luck.uniform(0, 2 * math.pi)) for _ in range(DEVICES)]
    return [[1 + high * math.sin(2 * math.pi * n / period + at) for period, at in own] for n in range(ROUNDS)]


def stalls(luck: random.Random) -> Factors:
    """Every 20 to 40 rounds one device takes 2 to 4 times as long, for 4 to 6 rounds."""
    factors = [[1.0] * DEVICES for _ in range(ROUNDS)]
    begin = luck.randint(20, 40)
    while begin < ROUNDS:
        device, factor, rounds = luck.randrange(DEVICES), luck.uniform(2, 4), luck.randint(4, 6)
        for n in range(begin, min(ROUNDS, begin + rounds)):
            factors[n][device] = factor
        begin += rounds + luck.randint(20, 40)
    return factors


def on_and_off(luck: random.Random) -> Factors:
    """One device takes twice as long for 12 rounds, as before for the next 12, and so on."""
    slow = luck.randrange(DEVICES)
    return [[2.0 if d == slow and n // 12 % 2 else 1.0 for d in range(DEVICES)] for n in range(ROUNDS)]


def steps(luck: random.Random) -> Factors:
    """Every 80 rounds another device takes 0.6 to 2 times as long as at first, and keeps to it."""
    factors, now, last = [], [1.0] * DEVICES, -1
    for n in range(ROUNDS):
        if n and n % 80 == 0:
            last = luck.choice([device for device in range(DEVICES) if device != last])
            now = [luck.uniform(0.6, 2.0) if device == last else factor for device, factor in enumerate(now)]
        factors.append(now)
    return factors


def lines(luck: random.Random) -> Factors:
    """Each device goes straight to 0.7 to 1.6 times its first time."""
    ends = [luck.uniform(0.7, 1.6) for _ in range(DEVICES)]
    return [[1 + (end - 1) * n / ROUNDS for end in ends] for n in range(ROUNDS)]


def still(luck: random.Random) -> Factors:
    """No device changes."""
    return [[1.0] * DEVICES for _ in range(ROUNDS)]


@dataclass(frozen=True)
class Drift:
    """A disturbance, and the noise of a step above it. noise: of its logarithm. jitter: a step takes 1 -
    jitter to 1 + jitter times as long, all alike. hiccups: the share of steps that take three times as long.
    sudden: devices change at once, so that changes can be counted.
    """

    factors: Callable[[random.Random], Factors]
    noise: float = 0.0
    hiccups: float = 0.0
    jitter: float = 0.0
    sudden: bool = True

    def scattered(self, luck: random.Random) -> float:
        """How many times longer a step takes by noise alone."""
        hiccup = 3.0 if luck.random() < self.hiccups else 1.0
        return hiccup * luck.lognormvariate(0, self.noise) * luck.uniform(1 - self.jitter, 1 + self.jitter)


DRIFTS = {
    "sine, 20 %": Drift(lambda luck: waves(luck, 0.2), 0.03, 0.01, sudden=False),
    "sine, 10 %": Drift(lambda luck: waves(luck, 0.1), 0.03, 0.01, sudden=False),
    "stalls": Drift(stalls, 0.03),
    "on and off": Drift(on_and_off, 0.03),
    "steps": Drift(steps, 0.03, 0.01),
    "lines": Drift(lines, 0.03, 0.01, sudden=False),
    "noise, 8 %": Drift(still, 0.08),
    "jitter, 50 %": Drift(still, jitter=0.5),
}


def changes(factors: Factors) -> int:
    """How often any device changes."""
    return sum(now != then for then, now in itertools.pairwise(factors))
