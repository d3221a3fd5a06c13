"""Draws a plan's timeline below that of the even split, R2SP's ring, and the Pareto front of time and price.

The file's ending selects PNG or SVG. The pictures are readable in grey: a hatch, not a colour, marks a bar.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyps.errors import InputError, shown
from pyps.formats import Plan
from pyps.profiler.plot import new_figure, save_figure
from pyps.solver.constrained import even_batches
from pyps.solver.jobs.pareto import ParetoPoint

ROWS_AT_MOST = 32  # workers on one page
TURNS_AT_MOST = 360  # in one ring
ENDINGS = (".png", ".svg")
COMPUTE = {"facecolor": "0.75", "edgecolor": "black", "linewidth": 0.6}
WAIT = {"facecolor": "white", "edgecolor": "0.6", "hatch": "...", "linewidth": 0.4}
SYNC = {"facecolor": "0.35", "edgecolor": "black", "hatch": "xx", "linewidth": 0.6}
TURN = {"facecolor": "0.75", "edgecolor": "black", "hatch": "//", "linewidth": 0.8}

Path_ = str | os.PathLike[str]


def draw_timeline(plan: Plan, even_seconds: Sequence[float], path: Path_) -> None:
    """One iteration of every worker: even split above, plan below. even_seconds: of each rank, evenly split.

    Raises PypsError without matplotlib, InputError where the file cannot be written.
    """
    rows = min(len(plan.workers), ROWS_AT_MOST)
    figure = new_figure(8.0, 1.6 + 0.4 * rows)
    above, below = figure.subplots(2, 1, sharex=True)
    sync = plan.sync.seconds if plan.sync else 0.0
    names = [shown(worker.name) for worker in plan.workers[:rows]]
    even = list(even_seconds)[:rows]
    n = len(plan.workers)
    batches = even_batches(plan.global_batch, n)[:rows]
    broken = "" if plan.even_split.feasible else " (breaks a bound)"
    _timeline(
        above, names, even, batches, max((s for s in even_seconds if math.isfinite(s)), default=0.0), sync
    )
    above.set_title(f"even split{broken}", fontsize=10, loc="left")
    planned = [worker.predicted_seconds for worker in plan.workers[:rows]]
    _timeline(
        below, names, planned, [w.batch for w in plan.workers[:rows]], plan.iteration_seconds - sync, sync
    )
    faster = f", {plan.speedup_over_even:.2f} times as fast" if plan.speedup_over_even else ""
    more = f" (first {rows} of {n} workers)" if n > rows else ""
    below.set_title(f"plan{faster}{more}", fontsize=10, loc="left")
    below.set_xlabel("one iteration (ms)")
    _legend(figure, [("computes", COMPUTE), ("waits", WAIT), *([("synchronises", SYNC)] if sync else [])])
    _save(figure, path)


def _timeline(
    axes: Any, names: Sequence[str], seconds: Sequence[float], batches: Sequence[int], end: float, sync: float
) -> None:
    """Draw one row a worker: its compute, its wait until `end` and its synchronisation; all in seconds.

    axes: where to draw. names, seconds, batches: of each worker; infinite seconds count as `end`. sync:
    seconds of the synchronisation, 0 for none.
    """
    for row, (time, batch) in enumerate(zip(seconds, batches, strict=True)):
        time = 1e3 * (time if math.isfinite(time) else end)
        axes.barh(row, time, **COMPUTE)
        if batch:
            axes.barh(row, max(0.0, 1e3 * end - time), left=time, **WAIT)
        if sync and batch:
            axes.barh(row, 1e3 * sync, left=1e3 * end, **SYNC)
        label = str(batch) if batch else "out"
        axes.text(0, row, f" {label}", va="center", ha="left", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def draw_ring(plan: Plan, path: Path_) -> None:
    """R2SP's period as a ring, clockwise from the top, with each worker's turn hatched.

    Raises as draw_timeline.
    """
    ring = plan.r2sp
    figure = new_figure(5.5, 5.5)
    axes = figure.add_subplot(projection="polar")
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    turn = 2 * math.pi / ring.period_seconds
    transfers = ring.turn_seconds or [0.0] * len(ring.order)
    n = len(ring.order)
    turns = list(zip(ring.order, ring.offsets_seconds, transfers, strict=True))
    for rank, start, seconds in turns[:TURNS_AT_MOST]:
        angle = start * turn
        axes.bar(angle, 0.3, width=max(seconds * turn, 0.02), bottom=0.7, align="edge", **TURN)
        if n <= ROWS_AT_MOST:
            name = shown(plan.workers[rank].name)
            axes.text(angle, 1.12, name, ha="center", va="center", fontsize=8, parse_math=False)
    axes.set_ylim(0, 1.2)
    axes.set_axis_off()
    more = f"\n(first {TURNS_AT_MOST} of {n} turns)" if n > TURNS_AT_MOST else ""
    state = {True: "every turn fits", False: "the link binds", None: "no bandwidth known"}[ring.feasible]
    text = f"period {1e3 * ring.period_seconds:.4g} ms\ngap {1e3 * ring.gap_seconds:.4g} ms\n{state}{more}"
    axes.text(0, 0, text, ha="center", va="center", fontsize=9)
    _save(figure, path)


def draw_pareto(points: Sequence[ParetoPoint], path: Path_) -> None:
    """Iteration time against price per hour; a star marks the cheapest sample. Raises as draw_timeline."""
    figure = new_figure(6.5, 4.5)
    axes = figure.subplots()
    times = [1e3 * point.solution.iteration_seconds for point in points]
    prices = [point.price_per_hour for point in points]
    axes.step(times, prices, where="post", color="0.5", linestyle="--", linewidth=1, zorder=1)
    axes.plot(times, prices, "o", color="black", zorder=2, label="no choice is better in both")
    cheapest = min(range(len(points)), key=lambda k: points[k].price_per_million_samples)
    label = f"cheapest sample: {points[cheapest].price_per_million_samples:.4g} a million"
    star = {"markersize": 16, "markerfacecolor": "white", "markeredgecolor": "black", "zorder": 3}
    axes.plot(times[cheapest], prices[cheapest], "*", label=label, **star)
    for time, price, point in zip(times, prices, points, strict=True):
        used = int((point.solution.batches > 0).sum())
        axes.annotate(f"{used} workers", (time, price), (6, 6), textcoords="offset points", fontsize=8)
    axes.set(xlabel="one iteration (ms)", ylabel="price per hour")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _legend(figure: Any, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(label=label, **look) for label, look in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


def _save(figure: Any, path: Path_) -> None:
    if (ending := Path(path).suffix.lower()) not in ENDINGS:
        raise InputError(str(path), "", f"the ending {ending!r}", f"one of {' '.join(ENDINGS)}")
    save_figure(figure, Path(path))
