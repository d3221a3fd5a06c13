"""Measure a device (profile_model), import measurements made elsewhere (import_points), fit T(b)."""

from pyps.profiler.fit import fit_points, fit_profile_points, point_seconds, predict_seconds
from pyps.profiler.measure import profile_model
from pyps.profiler.points_csv import import_points

__all__ = [
    "fit_points",
    "fit_profile_points",
    "import_points",
    "point_seconds",
    "predict_seconds",
    "profile_model",
]
