"""Charts as HTML: the marks are an SVG that stretches, the labels are text that does not.

A chart fits any width, so its page needs no scripts to be read; page.js adds read-outs under the pointer.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 1000.0  # of every SVG's coordinates
AXIS = 1000.0  # of a line chart's values
TICKS = 5


@dataclass(frozen=True)
class Bar:
    """A bar of a lane, of a kind that page.css gives a colour."""

    kind: str
    begin: float
    end: float
    title: str = ""
    overlapped: bool = False


def line_chart(
    name: str,
    xs: Sequence[float],
    ys: Sequence[float],
    unit: str,
    *,
    reference: tuple[str, float] | None = None,
    log: bool = False,
    height: int = 180,
) -> str:
    """A line over seconds, with its name.

    xs, ys: at least one point. unit: of the values. reference: a value with its name, as a dashed line. log:
    the axis is logarithmic, where all values are positive. height: CSS pixels.
    """
    axis = _Axis.of([*ys, *([reference[1]] if reference else [])], log)
    right = max(xs) or 1.0
    marks = f'<path class="line" d="{_path(xs, ys, right, axis)}"/>'
    legend = [("line", name)]
    if reference is not None:
        named, value = reference
        marks = f'<path class="reference" d="M0 {axis.place(value):.1f}H{WIDTH:g}"/>{marks}'
        legend.append(("reference", f"{named} {number(value)} {unit}"))
    points = {"name": name, "x": [round(x, 3) for x in xs], "y": [_short(y) for y in ys]}
    data = html.escape(json.dumps({"right": right, "unit": unit, **points}))
    return (
        f'{_legend(legend)}<div class="chart" data-plot="{data}"><div class="axis">{axis.labels()}</div>'
        f'<div class="plot" style="height:{height}px">{_svg(axis.grid() + marks, AXIS)}</div>'
        f"{_seconds(0.0, right)}</div>"
    )


@dataclass(frozen=True)
class _Axis:
    """The values' axis, from `high` above to `low` below, of logarithms if `log`; a label at every `step`."""

    low: float
    high: float
    step: float
    log: bool

    @classmethod
    def of(cls, values: Sequence[float], log: bool) -> _Axis:
        """From 0, unless values are below it or `log`; to a round number above all values."""
        low, high = min(values), max(values)
        if log and low > 0.0:
            low, high = math.log10(low), math.log10(max(high, 1.01 * low))
            return cls(low, high, (high - low) / (TICKS - 1), True)
        low, high = min(0.0, low), max(0.0, high)
        step = _round_step((high - low) or 1.0)
        return cls(step * math.floor(low / step), step * max(1, math.ceil(high / step)), step, False)

    def place(self, value: float) -> float:
        """From above, in the SVG's coordinates."""
        value = math.log10(value) if self.log else value
        return AXIS * (self.high - value) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """The values that have a label, from below."""
        count = round((self.high - self.low) / self.step)
        values = [self.low + k * self.step for k in range(count + 1)]
        return [10**value for value in values] if self.log else values

    def labels(self) -> str:
        return "".join(
            f'<span class="y" style="top:{100.0 * self.place(v) / AXIS:.2f}%">{number(v)}</span>'
            for v in self.ticks()
        )

    def grid(self) -> str:
        lines = "".join(f"M0 {self.place(v):.1f}H{WIDTH:g}" for v in self.ticks()[1:])
        return f'<path class="grid" d="{lines}"/>'


def _round_step(span: float) -> float:
    """A step of 1, 2, 2.5 or 5 times a power of ten that cuts a span into about TICKS pieces."""
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    return next(power * k for k in (1.0, 2.0, 2.5, 5.0, 10.0) if power * k * TICKS >= span)


def _path(xs: Sequence[float], ys: Sequence[float], right: float, axis: _Axis) -> str:
    points = (f"{WIDTH * x / right:.1f} {axis.place(y):.1f}" for x, y in zip(xs, ys, strict=True))
    return "M" + "L".join(points)


def lanes_chart(
    lanes: Sequence[tuple[str, str]], begin: float, end: float, legend: Sequence[str] = ()
) -> str:
    """Lanes over seconds, each a name and the marks of an SVG that is 100 high. legend: kinds."""
    rows = "".join(
        f'<div class="lane-name" title="{html.escape(name)}">{html.escape(name)}</div>'
        f'<div class="lane">{_svg(marks, 100.0)}</div>'
        for name, marks in lanes
    )
    names = _legend([(f"k-{kind}", kind) for kind in legend]) if legend else ""
    return f'{names}<div class="lanes">{rows}<div></div>{_seconds(begin, end)}</div>'


def bars(spans: Sequence[Bar], begin: float, end: float) -> str:
    """The marks of a lane: one bar each; those that overlap compute lie below, and are thinner."""
    found = []
    scale = WIDTH / (end - begin)
    shared = any(bar.overlapped for bar in spans)
    for bar in spans:
        left, right = max(bar.begin, begin), min(bar.end, end)
        if right <= left:
            continue
        y, height = (72, 28) if bar.overlapped else (0, 68 if shared else 100)
        title = f"<title>{html.escape(bar.title)}</title>" if bar.title else ""
        found.append(
            f'<rect class="k-{bar.kind}" x="{(left - begin) * scale:.2f}" y="{y}" '
            f'width="{max((right - left) * scale, 0.3):.2f}" height="{height}">{title}</rect>'
        )
    return "".join(found)


def stacked(shares: Sequence[tuple[str, Sequence[float]]]) -> str:
    """The marks of a lane: in each of equal pieces of the time, the shares of kinds, from below."""
    pieces = len(shares[0][1]) if shares else 0
    base = [0.0] * pieces
    found = []
    for kind, values in shares:
        path = ""
        for k, value in enumerate(values):
            if value < 0.002:
                continue
            x, width = WIDTH * k / pieces, WIDTH / pieces
            top = 100.0 * (1.0 - min(1.0, base[k] + value))
            path += f"M{x:.1f} {top:.1f}h{width:.2f}v{100.0 * value:.1f}h-{width:.2f}z"
            base[k] += value
        if path:
            found.append(f'<path class="k-{kind}" d="{path}"/>')
    return "".join(found)


def share_bar(shares: Sequence[tuple[str, float]]) -> str:
    """One bar of the shares of kinds, as HTML."""
    parts = "".join(
        f'<span class="k-{kind}" style="width:{100.0 * share:.2f}%" title="{kind} {share:.1%}"></span>'
        for kind, share in shares
        if share > 0.0005
    )
    return f'<div class="share">{parts}</div>'


def number(value: float) -> str:
    """A figure of three digits or so."""
    if value == 0.0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _svg(marks: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" preserveAspectRatio="none" role="img">{marks}</svg>'


def _seconds(begin: float, end: float) -> str:
    """The labels below a chart: seconds of the run."""
    step = (end - begin) / (TICKS - 1)
    digits = max(0, min(4, 1 - math.floor(math.log10(step)))) if step > 0.0 else 0
    labels = "".join(
        f'<span style="left:{100.0 * k / (TICKS - 1):g}%">{begin + k * step:,.{digits}f} s</span>'
        for k in range(TICKS)
    )
    return f'<div class="seconds">{labels}</div>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="{kind}"></i>{html.escape(name)}</li>' for kind, name in entries)
    return f'<ul class="legend">{items}</ul>'
