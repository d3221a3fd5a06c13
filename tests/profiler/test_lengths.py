"""The cost of samples of unlike length: found again from its times, measured on steps, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyps.errors import InputError
from pyps.formats import Point
from pyps.profiler import profile_model
from pyps.profiler.fit import point_seconds
from pyps.profiler.lengths import fit_lengths

torch.set_num_threads(1)
ONCE, EACH, TOKEN, SQUARE = 5e-3, 1e-4, 2e-6, 3e-9


def points(scatter: float = 0.0) -> list[Point]:
    draw = np.random.default_rng(0)
    return [
        Point(
            tokens=n,
            batch=b,
            seconds=(ONCE + b * (EACH + TOKEN * n + SQUARE * n**2)) * (1 + scatter * draw.standard_normal()),
            peak_bytes=10**9 + b * (1000 * n + 2 * n**2),
        )
        for n in (128, 512, 2048, 4096)
        for b in (1, 4096 // n)
    ]


def test_a_cost_is_found_again_from_its_times() -> None:
    found = fit_lengths(points())
    assert found.cost.seconds(300) == pytest.approx(EACH + TOKEN * 300 + SQUARE * 300**2, rel=1e-6)
    assert found.step_seconds == pytest.approx(ONCE, rel=1e-6)
    assert found.fixed_bytes == pytest.approx(10**9, rel=1e-6)
    assert (found.per_token_bytes, found.per_square_bytes) == pytest.approx((1000, 2), rel=1e-6)
    near = fit_lengths(points(scatter=0.02)).cost
    assert near.seconds(3000) == pytest.approx(EACH + TOKEN * 3000 + SQUARE * 3000**2, rel=0.1)


def test_steps_of_several_lengths_are_measured() -> None:
    found = profile_model("transformer", batches=[1, 2, 4], repeats=1, threads=1, lengths=[64, 16, 32])
    assert found.model.tokens_per_sample == 32
    assert found.lengths is not None
    assert [(p.tokens, p.batch) for p in found.lengths.points] == [
        (16, 1),
        (16, 4),
        (32, 1),
        (32, 2),
        (64, 1),
    ]
    assert all(min(point_seconds(point)) > 0 and point.peak_bytes for point in found.lengths.points)


def test_what_cannot_be_measured_is_refused() -> None:
    for lengths in ([16, 32], [0, 16, 32], [16, 16, 32]):
        with pytest.raises(InputError, match="lengths"):
            profile_model("transformer", batches=[1, 2], lengths=lengths)
    with pytest.raises(InputError, match="make_batch"):
        profile_model("digits_mlp", batches=[1, 2], lengths=[16, 32, 64])
