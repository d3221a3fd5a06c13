"""One picture of a profile: the measured times, the fitted curve, and where not to trust it.

Reads in grey: measurements are dots and bars, the fit is a line, the untrusted range is hatched.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np

from pyps.errors import InputError, PypsError
from pyps.formats import Fit, Profile
from pyps.profiler.fit import fit_profile_points, point_seconds, predict_seconds


def matplotlib_present() -> bool:
    """Whether a picture can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write the picture as PNG, entirely or not at all.

    Raises PypsError without matplotlib, InputError where the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator
    except ImportError as error:
        message = f"matplotlib cannot be imported ({error}): pip install 'pyps-train[plot]', or --no-plot"
        raise PypsError(message) from error

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    fit = profile.fit or fit_profile_points(profile.points)
    batches = np.array([p.batch for p in profile.points])
    times = [np.array(point_seconds(p)) * 1e3 for p in profile.points]
    medians = np.array([np.median(t) for t in times])
    spread = np.array([[m - t.min(), t.max() - m] for m, t in zip(medians, times, strict=True)]).T
    axes.errorbar(batches, medians, yerr=spread, fmt="o", color="black", capsize=3, label="measured (range)")

    grid = np.geomspace(batches.min(), batches.max() * 1.25, 200)
    curve = np.array([predict_seconds(fit, b) for b in grid]) * 1e3
    axes.plot(grid, curve, "-", color="0.45", linewidth=2, label=describe_fit(fit))
    for low, high in ((grid[0], fit.trusted_min_batch), (fit.trusted_max_batch, grid[-1])):
        if high > low:
            axes.axvspan(low, high, facecolor="none", edgecolor="0.8", hatch="//", linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="batch (samples)", ylabel="one step (ms)")
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    throttled = f", throttled {profile.device.throttle:g}x" if profile.device.emulated else ""
    axes.set_title(f"{profile.model.name} on {profile.device.name}{throttled}", fontsize=10)
    axes.legend(title="hatched: not to be trusted", frameon=False)
    _save(figure, Path(path))


def describe_fit(fit: Fit) -> str:
    """The fitted formula in milliseconds."""
    if fit.kind == "table":
        return f"T(b) by a table of {len(fit.table or [])} batches"
    line = f"{fit.fixed_seconds * 1e3:.4g} + {fit.per_sample_seconds * 1e3:.4g} b"
    return (
        f"T(b) = max({fit.floor_seconds * 1e3:.4g}, {line}) ms" if fit.kind == "knee" else f"T(b) = {line} ms"
    )


def _save(figure: object, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            figure.savefig(file, format="png", dpi=150)  # type: ignore[attr-defined]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        found = error.strerror or str(error)
        raise InputError(str(target), "", found.lower(), "a place to write to") from None
    finally:
        temporary.unlink(missing_ok=True)
