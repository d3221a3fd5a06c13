"""The cost model: it recovers itself, survives an outlier, and says what it cannot know."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.errors import InputError
from pyps.formats import Fit, Point
from pyps.profiler import fit_points, predict_seconds, select_fit

LADDER = [1, 2, 4, 8, 16, 32, 64, 128, 256]
EXACT = 1e-3  # noise-free data: the loss's scale has a floor of 0.1 %
ONE_OUTLIER = 0.10  # what one 5x point may move any prediction
FEW = settings(derandomize=True, deadline=None, max_examples=examples(10, 25))

fixed = st.floats(1e-4, 1e-1)
relative_slope = st.floats(0.01, 1.0)  # seconds a sample, as a share of the fixed seconds
knees = st.floats(5, 20)  # the batch where the line leaves the plateau: points on both sides


def model(b: float, t0: float, c: float, a: float) -> float:
    return max(t0, c + a * b)


def worst(fit: Fit, truth: tuple[float, float, float]) -> float:
    return max(abs(predict_seconds(fit, b) / model(b, *truth) - 1) for b in LADDER)


@FEW
@given(c=fixed, share=relative_slope)
def test_recovers_a_line(c: float, share: float) -> None:
    truth = (0.0, c, share * c)
    fit = fit_points([(b, model(b, *truth)) for b in LADDER])
    assert fit.kind == "affine"
    assert worst(fit, truth) < EXACT
    assert fit.r2 is not None
    assert fit.r2 > 0.999
    assert fit.leave_one_out_error is not None
    assert fit.leave_one_out_error < EXACT
    assert (fit.trusted_min_batch, fit.trusted_max_batch) == (1, 256)


@FEW
@given(c=fixed, share=st.floats(0.1, 1.0), knee=knees)
def test_recovers_a_knee(c: float, share: float, knee: float) -> None:
    truth = (model(knee, 0.0, c, share * c), c, share * c)
    fit = fit_points([(b, model(b, *truth)) for b in LADDER])
    assert fit.kind == "knee"
    assert worst(fit, truth) < EXACT
    assert fit.floor_seconds == pytest.approx(truth[0], rel=EXACT)


@FEW
@given(c=fixed, share=relative_slope, at=st.sampled_from(range(len(LADDER))))
def test_one_outlier_does_not_tilt_a_line(c: float, share: float, at: int) -> None:
    truth = (0.0, c, share * c)
    points = [(b, model(b, *truth) * (5 if k == at else 1)) for k, b in enumerate(LADDER)]
    assert worst(fit_points(points), truth) < ONE_OUTLIER


@FEW
@given(c=fixed, share=st.floats(0.1, 1.0), knee=st.floats(9, 20), at=st.sampled_from(range(len(LADDER))))
def test_one_outlier_does_not_break_a_knee(c: float, share: float, knee: float, at: int) -> None:
    truth = (model(knee, 0.0, c, share * c), c, share * c)
    points = [(b, model(b, *truth) * (5 if k == at else 1)) for k, b in enumerate(LADDER)]
    assert worst(fit_points(points), truth) < ONE_OUTLIER


@FEW
@given(c=fixed, share=relative_slope, unit=st.sampled_from([1e-3, 1e3, 60.0]), seed=st.integers(0, 99))
def test_time_units_do_not_matter(c: float, share: float, unit: float, seed: int) -> None:
    import random

    noise = random.Random(seed)
    points = [(b, (c + share * c * b) * noise.uniform(0.95, 1.05)) for b in LADDER]
    fit = fit_points(points)
    scaled = fit_points([(b, t * unit) for b, t in points])
    assert scaled.kind == fit.kind
    for b in LADDER:
        assert predict_seconds(scaled, b) == pytest.approx(predict_seconds(fit, b) * unit, rel=1e-6)
    assert scaled.leave_one_out_error == pytest.approx(fit.leave_one_out_error, rel=1e-4)


LBB = {  # doi 10.1007/s11227-023-05886-w, Table 2: milliseconds at two batches
    1: [(128, 81.81), (167, 104.94)],
    2: [(128, 81.49), (167, 104.14)],
    3: [(128, 85.39), (158, 103.46)],
    4: [(128, 392.92), (20, 104.41)],
}


def test_two_points_are_met_exactly() -> None:
    for points in LBB.values():
        fit = fit_points(points)
        assert fit.kind == "affine"
        assert [predict_seconds(fit, b) for b, _ in points] == pytest.approx(
            [t for _, t in points], rel=1e-12
        )
        assert fit.r2 == pytest.approx(1.0, abs=1e-12)
        assert fit.leave_one_out_error is None
        assert fit.trusted_max_batch == max(b for b, _ in points)


def test_lbb_lines_give_its_optimum() -> None:
    fits = [fit_points(points) for points in LBB.values()]
    shares = [0, 0, 0, 0]
    for _ in range(
        512
    ):  # the next sample goes to the worker that finishes it first: exact for nondecreasing T
        next_up = min(range(4), key=lambda i: predict_seconds(fits[i], shares[i] + 1))
        shares[next_up] += 1
    assert shares == [166, 167, 159, 20]


def test_coefficients_are_never_negative() -> None:
    falling = fit_points([(1, 3.0), (10, 2.0), (100, 1.0)])
    assert falling.per_sample_seconds == 0.0
    superlinear = fit_points([(b, float(b * b)) for b in (1, 2, 4, 8)])
    assert superlinear.fixed_seconds >= 0.0
    assert superlinear.trusted_min_batch > 1 or superlinear.trusted_max_batch < 8


def test_superlinear_pair_is_not_called_exact() -> None:
    fit = fit_points([(1, 1.0), (10, 100.0)])  # the line through both has c < 0
    assert fit.fixed_seconds == 0.0
    assert fit.r2 is not None
    assert fit.r2 < 1.0


def test_repeated_batches_count_as_their_median() -> None:
    clean = fit_points([(1, 1.0), (2, 2.0), (4, 4.0)])
    noisy = fit_points([(4, 4.0), (1, 1.0), (2, 2.0), (2, 90.0), (2, 1.9)])
    assert noisy == clean
    point = Point(batch=2, seconds=[1.9, 2.0, 90.0])
    fit = select_fit([Point(batch=1, seconds=1.0), point, Point(batch=4, seconds=4.0)])
    assert msgspec.structs.replace(fit, band=None, doubling_error=None) == clean


def test_a_missed_end_is_not_trusted() -> None:
    points = [(b, 0.01 + 0.001 * b) for b in LADDER]
    points[0] = (1, 0.007)
    points[-1] = (256, 0.9)
    fit = fit_points(points)
    assert (fit.trusted_min_batch, fit.trusted_max_batch) == (2, 128)


def test_constant_times() -> None:
    fit = fit_points([(b, 0.5) for b in LADDER])
    assert predict_seconds(fit, 1000) == pytest.approx(0.5, rel=1e-6)
    assert fit.r2 == 1.0


def test_many_points_stay_quick_and_right() -> None:
    fit = fit_points([(b, 0.01 + 0.001 * b) for b in range(1, 2000)])
    assert fit.per_sample_seconds == pytest.approx(0.001, rel=EXACT)


def test_tables_are_interpolated() -> None:
    fit = Fit(kind="table", table=[(2, 1.0), (4, 3.0)], trusted_min_batch=2, trusted_max_batch=4, r2=None)
    assert [predict_seconds(fit, b) for b in (1, 2, 3, 4, 6)] == [1.0, 1.0, 2.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "0 distinct batches"),
        ([(4, 1.0), (4, 1.1)], "1 distinct batch;"),
        ([(0, 1.0), (4, 1.1)], "point 1: found batch 0"),
        ([(1, 1.0), (4, math.nan)], "point 2: found nan seconds"),
        ([(1, math.inf), (4, 1.0)], "point 1: found inf seconds"),
        ([(1, -1.0), (4, 1.0)], "point 1: found -1.0 seconds"),
        ([(1.5, 1.0), (4, 1.0)], "point 1: found batch 1.5"),
    ],
)
def test_refuses(points: list[tuple[int, float]], message: str) -> None:
    with pytest.raises(InputError) as refused:
        fit_points(points)
    assert message in str(refused.value)
