"""The least loss so far over virtual time, a panel for each scenario; lines differ by dash and marker."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
from acceptance import Curve
from matplotlib.figure import Figure
from tuning import TuningResult

LINES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ("--", "v"), (":", "x"), ("-", "+"), ("-.", "*"))
GREYS = ("0.0", "0.35", "0.55")
MOST_OF_FIRST, MARGIN = 6.0, 1.1  # times the first one's and the last one's time: how far the axis goes


def curves(path: Path, panels: dict[str, list[TuningResult]]) -> None:
    """The seed whose time is the median of each competitor's."""
    figure = Figure(figsize=(10, 3.2 * -(-len(panels) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).ravel()
    for axis, (title, found) in zip(axes, panels.items(), strict=False):
        styles = zip(cycle(LINES), cycle(GREYS))
        for s, ((dash, marker), grey) in zip(found, styles, strict=False):
            result = sorted(zip(s.seconds, range(len(s.seconds)), strict=True))[len(s.seconds) // 2][1]
            seconds, _, losses = zip(*s.runs[result].curve, strict=True)
            style = {"color": grey, "marker": marker, "markersize": 3, "linewidth": 1}
            every = max(1, len(seconds) // 8)
            least = np.minimum.accumulate(losses)
            axis.plot(seconds, least, dash, markevery=every, label=s.competitor.title, **style)
        first, last = (f(s.median for s in found) for f in (min, max))
        axis.axhline(found[0].scenario.target, color="0.7", linewidth=0.8)
        axis.set(yscale="log", title=title, xlabel="virtual seconds", ylabel="least loss so far")
        if first < float("inf"):
            axis.set_xlim(0.0, min(MOST_OF_FIRST * first, MARGIN * last))
        axis.legend(fontsize=6)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=110)


def pairs(path: Path, panels: dict[str, tuple[Curve, Curve]]) -> None:
    """A real run's losses as points, its simulation's as a line."""
    figure = Figure(figsize=(10, 2.6 * -(-len(panels) // 3)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 3), 3, squeeze=False).ravel()
    for axis, (title, (real, simulated)) in zip(axes, panels.items(), strict=False):
        for curve, style, name in ((simulated, "-", "simulated"), (real, "o", "processes")):
            seconds, _, losses = zip(*curve, strict=True)
            grey = "0.6" if style == "-" else "0.0"
            axis.plot(seconds, losses, style, color=grey, markersize=3, label=name)
        axis.set(yscale="log", title=title, xlabel="seconds", ylabel="loss")
        axis.legend(fontsize=6)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=110)
