"""Devices that are fast only at multiples of 8, 16 or 32 samples."""

from __future__ import annotations

import numpy as np
import pytest

from pyps.formats import Device, ModelInfo, Point, Profile
from pyps.profiler import predict_seconds, select_fit
from pyps.profiler.climb import ladder
from pyps.profiler.multiples import at_multiple, odd_size, shown_multiple

OFF = 1.3  # times as long


def device(batches: list[int], multiple: int, noise: float = 0.0, seed: int = 0) -> Profile:
    luck = np.random.default_rng(seed)
    points = [
        Point(
            batch=b,
            seconds=[
                (0.01 + 0.001 * b) * (OFF if b % multiple else 1.0) * float(np.exp(noise * x))
                for x in luck.standard_normal(7)
            ],
        )
        for b in batches
    ]
    return Profile(device=Device(name="d"), model=ModelInfo(name="m"), points=points, fit=select_fit(points))


@pytest.mark.parametrize(("largest", "seed"), [(256, 0), (1000, 1), (96, 2)])
def test_the_usual_sizes_show_multiples_and_invent_none(largest: int, seed: int) -> None:
    assert shown_multiple(device(ladder(largest), 8, 0.02, seed)) == 8
    assert shown_multiple(device(ladder(largest), 1, 0.02, seed)) is None


def test_what_scatters_is_no_proof() -> None:
    """One size off the multiples takes 8 % longer, by steps that scatter by 30 %."""
    assert not any(shown_multiple(device(ladder(256), 1, 0.3, seed)) for seed in range(20))


def test_a_difference_within_the_spread_of_the_steps_is_no_proof() -> None:
    """Many steps of each size make the medians certain; other sizes in other minutes differ as much."""
    times = {8: 0.05, 16: 0.08, 32: 0.14, 63: 0.274, 64: 0.254, 128: 0.5}

    def measured(wide: float) -> Profile:
        steps = {b: [s * (1 + wide * (k - 15) / 30) for k in range(31)] for b, s in times.items()}
        points = [Point(batch=b, seconds=one) for b, one in steps.items()]
        return Profile(device=Device(name="d"), model=ModelInfo(name="m"), points=points)

    assert shown_multiple(measured(0.18)) is None  # a spread of 9 %
    assert shown_multiple(measured(0.02)) == 8


def test_sizes_off_the_multiples_are_left_out_of_a_curve_for_multiples() -> None:
    profile = device(ladder(256), 8)
    kept = at_multiple(profile, 16)
    assert [p.batch for p in kept.points] == [8, 16, 32, 64, 128, 256]
    assert kept.fit is not None
    assert predict_seconds(kept.fit, 96) == pytest.approx(0.106, rel=0.01)
    assert at_multiple(profile, 1) is profile
    assert at_multiple(device(ladder(256), 1), 8).points[0].batch == 1


def test_the_odd_size() -> None:
    assert odd_size([1, 8, 16, 32, 64]) == 31
    assert odd_size([1, 8, 16, 31, 32, 64]) is None  # there is one
    assert odd_size([1, 2, 4, 100]) is None
