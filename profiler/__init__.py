"""Measure a device (profile_model), import measurements made elsewhere (import_points), fit T(b)."""

from pyps.profiler.fit import fit_points, point_seconds, predict_seconds
from pyps.profiler.measure import profile_model
from pyps.profiler.points_csv import import_points
from pyps.profiler.select import select_fit

__all__ = [
    "fit_points",
    "import_points",
    "point_seconds",
    "predict_seconds",
    "profile_model",
    "select_fit",
]
