"""Measures a device (profile_model), imports measurements (import_points), and fits T(b) (select_fit)."""

from pyps.profiler.curve import fit_of, select_fit
from pyps.profiler.fit import fit_points, point_seconds, predict_seconds
from pyps.profiler.measure import profile_model
from pyps.profiler.points_csv import import_points

__all__ = [
    "fit_of",
    "fit_points",
    "import_points",
    "point_seconds",
    "predict_seconds",
    "profile_model",
    "select_fit",
]
