"""Pictures of a simulation: text for a terminal, a trace for Perfetto, and a PNG of all policies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pyps.errors import PypsError, how_to_install
from pyps.simulate.metrics import Result, Slice

MICROSECONDS = 1e6
MARKS = {"wait": ".", "pull": "<", "compute": "#", "push": ">"}
COLOURS = {"wait": "#d9d9d9", "pull": "#74add1", "compute": "#4d9221", "push": "#f46d43"}
BARS = 12  # rows of a histogram
MOST_TRACKS = 32  # of a Gantt


def gantt(result: Result, begin: float, end: float, columns: int = 80) -> list[str]:
    """A line for each rank from `begin` to `end` seconds: # computes, < pulls, > pushes, . waits.

    Each column shows the kind that took most of its time. The result needs simulate(..., timeline=True).
    """
    width = (end - begin) / columns
    spent: list[list[dict[str, float]]] = [[{} for _ in range(columns)] for _ in result.ranks]
    for rank, kind, first, last, _ in _compute_slices(result):
        low, high = max(first, begin), min(last, end)
        column = int((low - begin) / width)
        while low < high and column < columns:
            until = min(high, begin + (column + 1) * width)
            cell = spent[rank][column]
            cell[kind] = cell.get(kind, 0.0) + until - low
            low, column = until, column + 1
    names = [r.name for r in result.ranks[:MOST_TRACKS]]
    longest = max(len(name) for name in names)
    return [
        f"{name:<{longest}} " + "".join(MARKS[max(c, key=lambda k: c[k])] if c else " " for c in row)
        for name, row in zip(names, spent, strict=False)
    ]


def histogram(result: Result, columns: int = 40) -> list[str]:
    """Pushes by staleness, in at most BARS bins of equal width."""
    if not result.staleness:
        return []
    width = -(-(max(result.staleness) + 1) // BARS)
    counts = [0] * (max(result.staleness) // width + 1)
    for tau, pushes in result.staleness.items():
        counts[tau // width] += pushes
    labels = [str(k) if width == 1 else f"{k * width}-{(k + 1) * width - 1}" for k in range(len(counts))]
    longest = max(map(len, labels))
    return [
        f"{label:>{longest}} {'█' * round(columns * n / max(counts)):<{columns}} {n}"
        for label, n in zip(labels, counts, strict=True)
    ]


def trace(results: Sequence[Result]) -> dict[str, Any]:
    """All slices in the Chrome trace event format, one process for each policy; for ui.perfetto.dev."""
    rows: list[dict[str, Any]] = []
    tracks = 0
    for process, result in enumerate(results, start=1):
        rows.append(_name("process_name", process, 0, result.policy))
        deepest = max((s[0] // len(result.ranks) for s in result.timeline), default=0)
        names = [f"{r.name}, b = {r.batch}" for r in result.ranks]
        for k in range(deepest):
            names += [f"{r.name}, transfers{f' {k + 1}' if k else ''}" for r in result.ranks]
        for track, name in enumerate(names, start=tracks + 1):
            rows.append(_name("thread_name", process, track, name))
        for rank, kind, begin, end, version in result.timeline:
            step = {"ph": "X", "name": kind, "cat": "step", "pid": process, "tid": tracks + rank + 1}
            start, duration = begin * MICROSECONDS, (end - begin) * MICROSECONDS
            rows.append(step | {"ts": start, "dur": duration, "args": {"version": version}})
        tracks += len(names)
    return {"displayTimeUnit": "ms", "traceEvents": rows}


def _compute_slices(result: Result) -> list[Slice]:
    """Slices of the compute processes, without those of overlapped transfers."""
    return [s for s in result.timeline if s[0] < len(result.ranks)]


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def draw(results: Sequence[Result], path: str | os.PathLike[str], seconds: float) -> None:
    """Write a PNG: loss over time (where it was measured), staleness, idle shares, the first seconds.

    Raises PypsError if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = f"matplotlib cannot be imported ({error}): {how_to_install('plot')}"
        raise PypsError(message) from error
    with_loss = any(result.curve for result in results)
    rows = 1 + len(results)
    figure = Figure(figsize=(12, 3.2 + 1.2 * len(results)), layout="constrained")
    grid = figure.add_gridspec(rows, 3, height_ratios=[2.5] + [1] * len(results))
    _draw_curves(figure.add_subplot(grid[0, 0]), results, with_loss)
    _draw_staleness(figure.add_subplot(grid[0, 1]), results)
    _draw_idle(figure.add_subplot(grid[0, 2]), results)
    for k, result in enumerate(results):
        _draw_gantt(figure.add_subplot(grid[1 + k, :]), result, seconds)
    figure.savefig(path, dpi=110)


def _draw_curves(axes: Any, results: Sequence[Result], with_loss: bool) -> None:
    for result in results:
        points = [(s, loss) for s, _, loss in result.curve] if with_loss else [(0, 0), (result.seconds, 1)]
        axes.plot(*zip(*points, strict=True), label=result.policy, linewidth=1)
    axes.set(xlabel="seconds", ylabel="loss" if with_loss else "share of the samples")
    axes.legend(fontsize=6)


def _draw_staleness(axes: Any, results: Sequence[Result]) -> None:
    for result in results:
        total = sum(result.staleness.values())
        taus = sorted(result.staleness)
        axes.plot(taus, [result.staleness[t] / total for t in taus], ".-", label=result.policy, linewidth=1)
    axes.set(xlabel="staleness", ylabel="share of the pushes")


def _draw_idle(axes: Any, results: Sequence[Result]) -> None:
    axes.barh([r.policy for r in results], [100.0 * r.idle_share for r in results], color="#888888")
    axes.invert_yaxis()
    axes.tick_params(labelsize=6)
    axes.set(xlabel="idle, % of the workers' time")


def _draw_gantt(axes: Any, result: Result, seconds: float) -> None:
    for kind, colour in COLOURS.items():
        chosen = [
            s for s in _compute_slices(result) if s[1] == kind and s[2] < seconds and s[0] < MOST_TRACKS
        ]
        widths = [min(s[3], seconds) - s[2] for s in chosen]
        axes.barh([s[0] for s in chosen], widths, left=[s[2] for s in chosen], height=0.9, color=colour)
    axes.set(xlim=(0, seconds), yticks=[])
    axes.set_ylabel(result.policy, rotation=0, ha="right", fontsize=6)
    axes.invert_yaxis()
