"""Prints profiles: one as a table and a text plot, two side by side."""

from __future__ import annotations

import math

import numpy as np
from rich.table import Table

from pyps.cli.terminal import figures, say, terminal
from pyps.formats import Fit, Point, Profile
from pyps.profiler.curve import fit_of
from pyps.profiler.fit import point_seconds, predict_seconds
from pyps.profiler.multiples import shown_multiple
from pyps.profiler.plot import describe_fit
from pyps.profiler.points_csv import long_step
from pyps.profiler.statistics import spread

BAR_COLUMNS = 48
BUSY, POOR = 0.2, 0.1  # relative limits: spread of a batch's times, error at batches left out


def show_profile(profile: Profile, *, bars: bool = False) -> None:
    """Print the points and the fit in a table, and which batches to trust; bars: with a plot (log scale)."""
    fit = fit_of(profile)
    headings = "batch", "median ms", "spread", "samples/s", "fitted ms", "error"
    table = Table(*figures(*headings), title=title(profile))
    for point in profile.points:
        seconds = point_seconds(point)
        median, fitted = float(np.median(seconds)), predict_seconds(fit, point.batch)
        table.add_row(
            str(point.batch),
            f"{median * 1e3:.3f}",
            f"{_spread(point):.1%}" if len(seconds) > 1 else "-",
            f"{point.batch / median:,.1f}",
            f"{fitted * 1e3:.3f}",
            f"{fitted / median - 1:+.1%}",
        )
    console = terminal()
    console.print(table)
    if any(point.parts for point in profile.points):
        console.print(_parts(profile))
    if bars:
        console.print(_plot(profile, fit))
    for line in verdict(fit, profile):
        console.print(line, soft_wrap=True)


def _spread(point: Point) -> float:
    return spread(point_seconds(point))


def _parts(profile: Profile) -> Table:
    """The shares of a step's parts, including its data."""
    headings = "batch", "data", "forward", "backward", "optimizer"
    table = Table(*figures(*headings), title="where the time goes")
    for point in profile.points:
        if (parts := point.parts) is None:
            continue
        seconds = (parts.data, parts.forward, parts.backward, parts.optimizer)
        whole = sum(seconds) or 1.0
        table.add_row(str(point.batch), *(f"{s / whole:.0%}" for s in seconds))
    return table


def _plot(profile: Profile, fit: Fit) -> Table:
    table = Table(*figures("batch"), "measured", title="step time, log scale; | is the fit")
    medians = [float(np.median(point_seconds(point))) for point in profile.points]
    for point, median in zip(profile.points, medians, strict=True):
        bar = _bar(median, predict_seconds(fit, point.batch), min(medians), max(medians))
        table.add_row(str(point.batch), bar)
    return table


def note(text: str) -> None:
    """Print a line on stderr, apart from the output on stdout."""
    say(text, stderr=True)


def title(profile: Profile) -> str:
    """The model, its step options, and the device."""
    how = [f"{profile.model.autocast} autocast"] if profile.model.autocast else []
    how += [f"{profile.model.accumulate} micro-batches"] if profile.model.accumulate > 1 else []
    how += ["compiled"] if profile.model.compiled else []
    how += [f"emulated: throttle {profile.device.throttle:g}"] if profile.device.emulated else []
    return f"{profile.model.name} on {profile.device.name}" + (f" ({', '.join(how)})" if how else "")


def verdict(fit: Fit, profile: Profile) -> list[str]:
    """Return how good the fit is, and where not to trust it."""
    lines = [_curve(fit)]
    if fit.band:
        widths = [(high - low) / (high + low) for _, low, high in fit.band]
        low, high = f"{min(widths):.1%}", f"{max(widths):.1%}"
        off = low if low == high else f"{low} to {high}"
        lines.append(f"90 % of batches between these are expected within {off} of the curve")
    if (widest := max(map(_spread, profile.points))) > BUSY:
        lines.append(
            f"the times of a batch differ by up to {widest:.0%}: measure again when nothing else runs"
        )
    doubts = _doubt(fit, profile), _faster(profile), long_step(profile)
    lines += [doubt for doubt in doubts if doubt is not None]
    if fit.trusted_min_batch > profile.points[0].batch:
        lines.append(f"do not trust below b = {fit.trusted_min_batch}: the curve misses it by more than 10 %")
    lines.append(f"do not trust beyond b = {fit.trusted_max_batch}")
    if profile.min_batch is not None:
        lines.append(f"smallest batch: {profile.min_batch}")
    if profile.max_batch is not None:
        why = " (there was no time for larger ones: see --seconds)" if profile.cut_short else ""
        lines.append(f"largest batch: {profile.max_batch}{why}")
    if profile.link is not None:
        link = profile.link
        speed = link.bytes_per_second / 1e9
        lines.append(f"link by {link.via}: {link.latency_seconds * 1e6:.0f} us, then {speed:.2f} GB/s")
    if profile.model.optimizer is not None:
        lines.append(f"optimizer: {profile.model.optimizer}")
    return lines


def _curve(fit: Fit) -> str:
    """The curve, and how well it says batches that were left out. A table keeps to the measured times: R2
    says nothing of it, and without a batch its gap is twice as wide as those that are left.
    """
    error, more = (
        "not defined for two batches",
        " (median, in gaps twice as wide)" if fit.table else " (median)",
    )
    if fit.leave_one_out_error is not None:
        error = f"{fit.leave_one_out_error:.1%}{more}"
    r2 = "" if fit.table else f"   R2 {'-' if fit.r2 is None else f'{fit.r2:.4f}'}"
    return f"{describe_fit(fit)}{r2}   leave-one-out error {error}"


def _doubt(fit: Fit, profile: Profile) -> str | None:
    """That the curve, or what is between the points of a table, says little; None: it does not."""
    left_out = (fit.leave_one_out_error or 0.0) > POOR
    low_r2 = fit.r2 is not None and fit.r2 < 1 - 2 * POOR  # also of a flat curve that fits: see _misses
    if (left_out and not fit.table) or (low_r2 and _misses(fit, profile) > POOR):
        return "the curve does not describe this device: measure again, or more and larger batches"
    return "between these batches the curve is a guess: measure more of them" if left_out else None


def _faster(profile: Profile) -> str | None:
    """That a batch takes clearly less time than a smaller one, as on hardly any device; None: none does."""
    slack = max(POOR, *map(_spread, profile.points))
    longest, small = 0.0, 0
    for point in profile.points:
        seconds = float(np.median(point_seconds(point)))
        if seconds < (1 - slack) * longest and shown_multiple(profile) is None:
            times = f"{1e3 * seconds:.4g} ms against {1e3 * longest:.4g} ms"
            return f"batch {point.batch} takes less time than batch {small}, {times}: measure both again"
        longest, small = max((longest, small), (seconds, point.batch))
    return None


def _misses(fit: Fit, profile: Profile) -> float:
    """By how much the curve misses the batch that it fits worst, relative to that batch's median."""
    medians = [(point.batch, float(np.median(point_seconds(point)))) for point in profile.points]
    return max(abs(predict_seconds(fit, batch) / median - 1) for batch, median in medians)


def show_comparison(first: Profile, second: Profile) -> None:
    """Print how much longer the second takes than the first, batch by batch; fitted where not measured."""
    console = terminal()
    if first.model.name != second.model.name:
        console.print(f"different models: {first.model.name} and {second.model.name}")
    headings = "batch", "first ms", "second ms", "second / first"
    table = Table(*figures(*headings), title=f"{first.device.name} against {second.device.name}")
    fits = [fit_of(profile) for profile in (first, second)]
    measured = [
        {point.batch: float(np.median(point_seconds(point))) for point in profile.points}
        for profile in (first, second)
    ]
    for batch in sorted(measured[0].keys() | measured[1].keys()):
        times = [
            known.get(batch) or predict_seconds(fit, batch) for known, fit in zip(measured, fits, strict=True)
        ]
        marks = ["" if batch in known else " (fit)" for known in measured]
        cells = [f"{1e3 * t:.3f}{mark}" for t, mark in zip(times, marks, strict=True)]
        table.add_row(str(batch), *cells, f"{times[1] / times[0]:.2f} x")
    console.print(table)
    for name, profile, fit in zip(("first", "second"), (first, second), fits, strict=True):
        console.print(f"{name}: {title(profile)}: {describe_fit(fit)}", soft_wrap=True)


def _bar(measured: float, fitted: float, low: float, high: float) -> str:
    """A bar as long as the logarithm of the time, with a mark for the fit."""
    span = math.log(high / low) or 1.0

    def place(seconds: float) -> int:
        return min(BAR_COLUMNS, max(0, round(1 + (BAR_COLUMNS - 2) * math.log(seconds / low) / span)))

    cells = ["█" if k < place(measured) else " " for k in range(BAR_COLUMNS + 1)]
    cells[place(fitted)] = "|"
    return "".join(cells)
