"""Drift: what it believes of devices that drift, jump or only scatter."""

from __future__ import annotations

import random

import pytest

from pyps.solver.online.refit import Drift

SCATTER = 0.03


def followed(seed: int, step: float, windows: int = 60, steps: int = 5) -> tuple[Drift, float]:
    """The filters after windows of a device whose log of the time moves by `step` a step, now up, now down;
    and how far off what they know is, over the last half.
    """
    luck, drift, truth, known, off = random.Random(seed), Drift(), 0.0, 0.0, []
    noise = SCATTER**2 / steps
    drift.begin(noise)
    for window in range(windows):
        truth += steps * step * (1 if window // 20 % 2 else -1)
        moved, variance = drift.take(luck.gauss(truth, noise**0.5) - known, steps, noise, SCATTER**2, True)
        known += moved
        assert 0 < variance < 0.01
        off.append(abs(known - truth))
    return drift, sum(off[windows // 2 :]) / (windows // 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_only_scatters_does_not_drift(seed: int) -> None:
    drift, off = followed(seed, 0.0)
    assert not drift.clear
    assert drift.rate < 0.02
    assert off < 0.3 * SCATTER


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_drifts_is_followed(seed: int) -> None:
    drift, off = followed(seed, 0.01)
    assert drift.clear
    assert off < SCATTER


def test_nothing_is_learnt_while_the_scatter_is_unknown() -> None:
    drift = Drift()
    drift.begin(1e-4)
    before = drift.rate
    drift.take(0.5, 7, 1e-4, SCATTER**2, learns=False)
    assert drift.rate == pytest.approx(before)
