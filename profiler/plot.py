"""Draws a profile: the measured times, the fitted curve with its band, and where not to trust it.

The picture is readable in grey: measurements are dots and bars, the fit is a line, the untrusted range is
hatched, and the batches of a plan are crosses on the line.
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import PypsError, how_to_install, shown
from pyps.formats import Fit, Profile
from pyps.formats.files import write_bytes
from pyps.profiler.curve import fit_of
from pyps.profiler.fit import point_seconds, predict_seconds

Ints = NDArray[np.int64]


def matplotlib_present() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """A picture of so many inches. Raises PypsError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        message = f"matplotlib cannot be imported ({error}): {how_to_install('plot')}, or --no-plot"
        raise PypsError(message) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, target: Path) -> None:
    """Write a picture as its file's ending says, PNG if it says nothing. Raises InputError."""
    kind, drawn = target.suffix[1:].lower(), io.BytesIO()
    figure.savefig(drawn, format=kind if kind in ("svg", "pdf") else "png", dpi=150)
    write_bytes(target, drawn.getvalue())


def plot_profile(profile: Profile, path: str | os.PathLike[str], chosen: Sequence[int] = ()) -> None:
    """Writes the picture, entirely or not at all, in the format of the path's suffix (PNG, SVG or PDF).

    chosen: batches to mark on the curve. Raises PypsError without matplotlib, InputError if the file cannot
    be written.
    """
    figure = new_figure(7.0, 4.5)
    axes: Any = figure.subplots()
    fit = fit_of(profile)
    batches = np.array([p.batch for p in profile.points])
    _draw_measured(axes, profile, batches)
    _draw_fit(axes, fit, batches)
    if chosen:
        seconds = [predict_seconds(fit, b) * 1e3 for b in chosen]
        label = "chosen: " + ", ".join(map(str, chosen))
        axes.plot(chosen, seconds, "x", color="black", markersize=9, markeredgewidth=2, label=label)
    _label(axes, profile, batches)
    save_figure(figure, Path(path))


def _draw_measured(axes: Any, profile: Profile, batches: Ints) -> None:
    times = [np.array(point_seconds(p)) * 1e3 for p in profile.points]
    medians = np.array([np.median(t) for t in times])
    spread = np.array([[m - t.min(), t.max() - m] for m, t in zip(medians, times, strict=True)]).T
    axes.errorbar(batches, medians, yerr=spread, fmt="o", color="black", capsize=3, label="measured (range)")


def _draw_fit(axes: Any, fit: Fit, batches: Ints) -> None:
    grid = np.geomspace(batches.min(), batches.max() * 1.25, 200)
    curve = np.array([predict_seconds(fit, b) for b in grid]) * 1e3
    axes.plot(grid, curve, "-", color="0.45", linewidth=2, label=describe_fit(fit))
    if fit.band:
        at, low, high = np.array(fit.band).T
        label = "90 % of batches between"
        axes.fill_between(at, low * 1e3, high * 1e3, color="0.75", linewidth=0, label=label)
    for low_end, high_end in ((grid[0], fit.trusted_min_batch), (fit.trusted_max_batch, grid[-1])):
        if high_end > low_end:
            axes.axvspan(low_end, high_end, facecolor="none", edgecolor="0.8", hatch="//", linewidth=0)


def _label(axes: Any, profile: Profile, batches: Ints) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(xscale="log", yscale="log", xlabel="batch (samples)", ylabel="one step (ms)")
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    throttled = f", throttled {profile.device.throttle:g}x" if profile.device.emulated else ""
    title = shown(f"{profile.model.name} on {profile.device.name}{throttled}")
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.legend(title="hatched: do not trust", frameon=False)


def describe_fit(fit: Fit) -> str:
    """The fitted formula in milliseconds; of a table, its ends."""
    if fit.table:
        (first, least), (last, most) = fit.table[0], fit.table[-1]
        return f"T(b) = a table: {least * 1e3:.4g} ms at {first} to {most * 1e3:.4g} ms at {last}"
    line = f"{fit.fixed_seconds * 1e3:.4g} + {fit.per_sample_seconds * 1e3:.4g} b"
    return (
        f"T(b) = max({fit.floor_seconds * 1e3:.4g}, {line}) ms" if fit.kind == "knee" else f"T(b) = {line} ms"
    )
