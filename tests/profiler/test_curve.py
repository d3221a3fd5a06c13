"""Which model a device's points deserve, and how far its curve may be off."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples, sampled

from pyps.formats import Fit, Point
from pyps.profiler import fit_points, predict_seconds, select_fit
from pyps.profiler.blend import HEDGE, monotone_polygon

pytestmark = pytest.mark.slow

LADDER = (1, 2, 4, 8, 16, 32, 64, 128)
SETTINGS = settings(derandomize=True, deadline=None, max_examples=examples(15, 40))


def points(times: dict[int, float], noise: float = 0.0, repeats: int = 7, seed: int = 0) -> list[Point]:
    luck = np.random.default_rng(seed)
    return [
        Point(batch=b, seconds=[t * float(np.exp(noise * luck.standard_normal())) for _ in range(repeats)])
        for b, t in times.items()
    ]


@pytest.mark.parametrize("seed", sampled(range(5), 0, 1))
@pytest.mark.parametrize(
    ("kind", "curve"),
    [
        ("affine", lambda b: 0.01 + 0.002 * b),
        ("knee", lambda b: max(0.08, 0.01 + 0.002 * b)),
        ("table", lambda b: 0.01 + 0.002 * b + 3e-5 * b * b),
    ],
)
def test_the_truth_is_recognised_through_noise(kind: str, curve: object, seed: int) -> None:
    assert callable(curve)
    found = select_fit(points({b: curve(b) for b in LADDER}, noise=0.01, seed=seed))
    assert found.kind == kind
    for batch in (3, 24, 100):
        assert predict_seconds(found, batch) == pytest.approx(curve(batch), rel=0.12)


def test_a_device_that_gets_better_becomes_a_table() -> None:
    """Concave: neither a line nor anything convex fits."""
    times = {b: 0.01 * b**0.6 for b in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)}
    assert select_fit(points(times)).kind == "table"


def test_few_points_near_a_line_stay_one() -> None:
    times = {1: 0.0121, 8: 0.0265, 32: 0.072, 64: 0.139, 128: 0.263}
    assert select_fit(points(times)).kind in ("affine", "knee")


@pytest.mark.parametrize("last", [0.627, 0.100])
def test_a_measured_batch_is_not_overruled(last: float) -> None:
    """The line through the first two says 0.22 s."""
    found = select_fit([Point(batch=b, seconds=s) for b, s in ((16, 0.0904), (64, 0.116), (256, last))])
    for batch, seconds in ((16, 0.0904), (64, min(0.116, last)), (256, last)):
        assert predict_seconds(found, batch) == pytest.approx(seconds, rel=0.1)
    assert (found.trusted_min_batch, found.trusted_max_batch) == (16, 256)


@pytest.mark.parametrize("seed", range(5))
def test_noise_in_the_last_points_does_not_tilt_what_follows(seed: int) -> None:
    luck = np.random.default_rng(seed)
    times = {b: (0.02 + 0.002 * b) * float(np.exp(0.05 * luck.standard_normal())) for b in range(4, 129, 4)}
    times[120], times[124] = 0.9 * times[120], 0.85 * times[124]
    found = select_fit(points(times, repeats=1))
    assert predict_seconds(found, 256) == pytest.approx(0.02 + 0.002 * 256, rel=0.12)


def test_a_disturbed_batch_between_others_is_smoothed_away() -> None:
    times = {b: 0.01 * b**0.7 for b in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)}
    disturbed = select_fit(points(times | {24: 5 * times[24]}, repeats=1))
    for batch in times:
        assert predict_seconds(disturbed, batch) == pytest.approx(times[batch], rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_both_sides_of_a_cliff_are_believed(seed: int) -> None:
    """Neither is a disturbance, though both neighbours of each contradict it."""
    times = {b: (0.01 + 0.002 * b) * (1.7 if b > 20 else 1.0) for b in (4, 6, 8, 12, 16, 24, 32, 48, 64)}
    found = select_fit(points(times, noise=0.01, repeats=1, seed=seed))
    for batch in (12, 16, 24, 32):
        assert predict_seconds(found, batch) == pytest.approx(times[batch], rel=0.08)


@pytest.mark.parametrize("tile", [8, 32])
def test_tiles_are_recognised(tile: int) -> None:
    """Between two measured batches the curve has a step where a tile ends, not a slope."""
    batches = np.unique(np.linspace(1, 256, 17).round().astype(int)).tolist()
    times = {b: 0.01 + 0.002 * tile * int(np.ceil(b / tile)) for b in range(1, 257)}
    found = select_fit(points({b: times[b] for b in batches}, noise=0.005, repeats=1))
    for batch in (33, 100, 128, 129, 160, 161):
        assert predict_seconds(found, batch) == pytest.approx(times[batch], rel=0.03)


def test_a_line_has_no_tiles() -> None:
    batches = range(1, 257, 17)
    found = select_fit(points({b: 0.01 + 0.002 * b for b in batches}, noise=0.02, repeats=1))
    assert found.kind != "table" or len(found.table or []) < 80


def test_little_is_counted_on_below_the_smallest_measured_batch() -> None:
    found = select_fit(points({b: 0.001 * b for b in (64, 128, 256)}))
    assert predict_seconds(found, 1) == pytest.approx((1 - HEDGE) * 0.064, rel=0.05)
    assert predict_seconds(found, 32) < predict_seconds(found, 64)
    assert found.trusted_min_batch == 64


def test_the_uncertainty_beyond_the_points_grows_with_their_scatter() -> None:
    quiet, scattered = (
        select_fit(points({b: 0.01 + 0.002 * b for b in LADDER}, noise=noise, repeats=1, seed=3))
        for noise in (0.005, 0.15)
    )
    assert quiet.doubling_error is not None
    assert scattered.doubling_error is not None
    assert quiet.doubling_error < 0.05 < scattered.doubling_error


def test_very_many_points_are_thinned() -> None:
    times = {b: 0.01 + 0.002 * b + 3e-6 * b * b for b in range(1, 301)}
    found = select_fit(points(times, noise=0.01, repeats=3))
    assert found.band is not None
    assert len(found.band) == len(times)
    for batch in (10, 150, 300):
        assert predict_seconds(found, batch) == pytest.approx(times[batch], rel=0.05)


def test_the_same_batch_may_be_listed_twice() -> None:
    found = select_fit([Point(batch=b, seconds=[0.1 * b, 0.11 * b]) for b in (1, 2, 2, 4, 8)])
    assert found.band is not None
    assert [b for b, _, _ in found.band] == [1, 2, 3, 4, 5, 6, 7, 8]  # steps may lie between powers of two


def test_a_line_is_what_fit_points_says() -> None:
    measured = points({b: 0.01 + 0.002 * b for b in LADDER}, noise=0.01)
    plain = fit_points([(p.batch, s) for p in measured for s in p.seconds])  # type: ignore[union-attr]
    found = select_fit(measured)
    assert (found.fixed_seconds, found.per_sample_seconds) == (plain.fixed_seconds, plain.per_sample_seconds)


def test_the_band_encloses_the_curve_and_widens_with_noise() -> None:
    widths = []
    for noise in (0.01, 0.1):
        fit = select_fit(points({b: 0.01 + 0.002 * b for b in LADDER}, noise=noise))
        assert fit.band is not None
        assert {b for b, _, _ in fit.band} > set(LADDER)  # and what lies between powers of two
        assert all(low <= high for _, low, high in fit.band)
        measured = [(low, high) for b, low, high in fit.band if b in LADDER]
        widths.append(np.mean([(high - low) / (high + low) for low, high in measured]))
    assert widths[1] > 3 * widths[0]
    assert select_fit(points({1: 0.1, 2: 0.2}, repeats=1)).band is None


@pytest.mark.thorough
def test_the_band_holds_the_truth_as_often_as_it_says() -> None:
    inside = 0
    for seed in range(20):
        fit = select_fit(points({b: 0.01 + 0.002 * b for b in LADDER}, noise=0.05, repeats=15, seed=seed))
        assert fit.band is not None
        inside += sum(low <= 0.01 + 0.002 * b <= high for b, low, high in fit.band)
    assert inside / (20 * len(LADDER)) > 0.75


def test_the_band_holds_batches_between_the_measured_ones() -> None:
    """This holds for waves, tiles and cliffs, by 5 and 9 batches, each measured once."""
    inside: list[bool] = []
    for seed in range(5):
        luck, b = np.random.default_rng(seed), np.arange(1, 257)
        for truth in (b + 20 * np.sin(b / 30), 16 * np.ceil(b / 16), b * np.where(b > 100, 1.4, 1.0)):
            seconds = 0.001 * (40 + truth)
            for count in (5, 9):
                at = np.unique(np.geomspace(8, 256, count).round().astype(int))
                times = seconds[at - 1] * np.exp(0.03 * luck.standard_normal(len(at)))
                fit = select_fit(
                    [Point(batch=int(x), seconds=float(t)) for x, t in zip(at, times, strict=True)]
                )
                assert fit.band is not None
                knots, lows, highs = zip(*fit.band, strict=True)
                between = [int(x) for x in b[8:] if x not in at]
                low, high = np.interp(between, knots, lows), np.interp(between, knots, highs)
                inside += [a <= seconds[x - 1] <= c for x, a, c in zip(between, low, high, strict=True)]
    assert 0.85 < np.mean(inside) < 0.97


def test_a_band_is_no_narrower_than_what_the_curve_misses() -> None:
    """The middle one of three batches is met, as it lies halfway between the others."""
    fit = select_fit([Point(batch=b, seconds=s) for b, s in ((4, 0.4), (8, 0.2), (16, 0.1))])
    assert fit.band is not None
    assert all(low < 0.7 * high for _, low, high in fit.band)


def test_a_band_is_the_same_every_time() -> None:
    measured = points({b: 0.01 + 0.002 * b for b in LADDER}, noise=0.05)
    assert select_fit(measured) == select_fit(measured)


@SETTINGS
@given(st.lists(st.floats(1e-4, 10.0), min_size=3, max_size=10))
def test_a_monotone_polygon_keeps_what_rises(seconds: list[float]) -> None:
    times = np.array(seconds)
    monotone = monotone_polygon(times)
    assert (np.diff(monotone) >= 0).all()
    if (np.diff(times) >= 0).all():
        assert monotone == pytest.approx(times)


@SETTINGS
@given(st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=10))
def test_any_points_give_a_nondecreasing_fit(seconds: list[float]) -> None:
    fit = select_fit([Point(batch=2**k, seconds=s) for k, s in enumerate(seconds)])
    assert isinstance(fit, Fit)
    values = [predict_seconds(fit, b) for b in range(1, 2 ** len(seconds), 7)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(values))
