"""report.png: compute and wait times of each way to train, and accuracy over time. Readable in grey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pyps.formats.records import StepRecord

matplotlib.use("Agg")

BUSY, IDLE, TRAFFIC = "0.55", "1.0", "0.0"  # greys
FACE = {"compute": BUSY, "wait": IDLE, "push": TRAFFIC, "pull": TRAFFIC}
LEAST_TEXT_SECONDS = 0.04  # a shorter slice has no room for its batch
LINES = (("0.55", "--", "s"), ("0.0", "-", "o"), ("0.35", ":", "^"))


@dataclass(frozen=True)
class Panel:
    """One way to train: its steps, its ranks' names, and (seconds, accuracy in per cent) of its snapshots."""

    title: str
    records: Sequence[StepRecord]
    names: Sequence[str]
    curve: Sequence[tuple[float, float]]


def draw(path: Path, panels: Sequence[Panel], window_seconds: float, target: float) -> None:
    """Timelines of equally long windows from the middle of each run, one above the other, then accuracy.

    `target`: an accuracy in per cent, drawn as a line.
    """
    heights = [1.0] * len(panels) + [2.0]
    figure, axes = plt.subplots(
        len(panels) + 1, 1, figsize=(10, 9), gridspec_kw={"height_ratios": heights}, layout="constrained"
    )
    for panel, axis in zip(panels, axes, strict=False):
        _timeline(axis, panel, window_seconds)
    axes[len(panels) - 1].set_xlabel("seconds")
    _legend(axes[0])
    _accuracy(axes[-1], panels, target)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _timeline(axis: Axes, panel: Panel, window_seconds: float) -> None:
    begins = sorted(r.spans[0][1] for r in panel.records)
    origin = begins[len(begins) // 2]
    for record in panel.records:
        for kind, begin, end in record.spans:
            left, right = max(begin - origin, 0.0), min(end - origin, window_seconds)
            if right <= left:
                continue
            hatch = "////" if kind == "wait" else None
            look = {"color": FACE.get(kind, IDLE), "edgecolor": "0.2", "linewidth": 0.4, "hatch": hatch}
            axis.barh(record.rank, right - left, left=left, height=0.75, **look)
            if kind == "compute" and right - left > LEAST_TEXT_SECONDS:
                middle = (left + right) / 2
                axis.text(middle, record.rank, str(record.samples), ha="center", va="center", fontsize=8)
    axis.set_title(panel.title, loc="left", fontsize=10)
    axis.set_yticks(range(len(panel.names)), panel.names)
    axis.set_xlim(0.0, window_seconds)
    axis.invert_yaxis()


def _legend(axis: Axes) -> None:
    handles = [
        Patch(facecolor=BUSY, edgecolor="0.2", label="computing (samples)"),
        Patch(facecolor=IDLE, edgecolor="0.2", hatch="////", label="waiting for others"),
        Patch(facecolor=TRAFFIC, label="push, pull"),
    ]
    axis.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize=8
    )


def _accuracy(axis: Axes, panels: Sequence[Panel], target: float) -> None:
    for panel, (grey, style, marker) in zip(panels, LINES, strict=True):
        seconds, accuracy = zip(*panel.curve, strict=True)
        axis.plot(
            seconds,
            accuracy,
            style,
            color=grey,
            marker=marker,
            markersize=3,
            markevery=4,
            label=panel.title.partition(":")[0],
        )
    axis.axhline(target, color="0.7", linewidth=0.8)
    axis.text(axis.get_xlim()[1], target, f"{target:.0f} % ", ha="right", va="bottom", fontsize=8)
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("held-out accuracy, %")
    axis.set_ylim(0.0, 100.0)
    axis.legend(loc="lower right", frameon=False, fontsize=9)
