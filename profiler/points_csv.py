"""Imports measurements: makes a profile of a CSV file, one row a measurement.

The header must name the columns `batch` and `seconds`, in any order. Three more are read if they are there,
and may be empty in a row: `peak_bytes`, the memory that the batch took at most, and `link_bytes` and
`link_seconds`, the time that a message of link_bytes takes one way. Further columns, blank lines, a byte
order mark and several rows of one batch are allowed. Anything else raises an error with its line number.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median

from pyps.errors import InputError
from pyps.formats import MAX_BATCH, Device, Link, Memory, ModelInfo, Point, Profile
from pyps.formats.files import read_text
from pyps.profiler.curve import select_fit
from pyps.profiler.fit import link_model, memory_model, point_seconds

COLUMNS = ("batch", "seconds")
MORE_COLUMNS = ("peak_bytes", "link_bytes", "link_seconds")
MAX_BYTES = 2**63 - 1  # of memory, or of a message
IMPORTED = "imported"  # the kind of a device that pyps-profile has not timed itself
LONGEST_SHOWN = 80  # characters of a line
LONG_STEP = 100.0  # seconds: more may be meant in milliseconds


@dataclass(frozen=True)
class _Row:
    """One measurement; None: not measured."""

    batch: int
    seconds: float
    peak_bytes: int | None = None
    link_bytes: int | None = None
    link_seconds: float | None = None


def import_points(
    path: str | os.PathLike[str],
    *,
    max_batch: int | None = None,
    name: str | None = None,
    model: str = "imported",
    parameters: int | None = None,
    optimizer: str | None = None,
    tokens_per_sample: int | None = None,
    budget_bytes: int | None = None,
) -> Profile:
    """A profile of the measurements in a CSV file, fitted.

    path: the CSV file. max_batch: the device's memory limit in samples; None: unknown. name: the device's
    name; None: the file's name without its ending. model: the model's name. parameters: the model's number of
    parameters, from which a plan computes its transfers; None: unknown. optimizer: in words, as "AdamW".
    tokens_per_sample: 1: the batches count tokens. budget_bytes: the memory that a batch may take, if the
    file has peak_bytes; None: the most of these. Raises InputError with file and line.
    """
    where = str(path)
    most = {"max_batch": MAX_BATCH, "tokens_per_sample": MAX_BATCH, "parameters": MAX_BYTES}
    given = {"max_batch": max_batch, "tokens_per_sample": tokens_per_sample, "parameters": parameters}
    for field, value in given.items():
        if value is not None and not 1 <= value <= most[field]:
            raise InputError("import", field, str(value), f"a whole number from 1 to {most[field]}")
    rows = list(_read_rows(where, read_text(where)))
    by_batch: dict[int, list[_Row]] = {}
    for row in rows:
        by_batch.setdefault(row.batch, []).append(row)
    if len(by_batch) < 2:
        found = f"{len(by_batch)} distinct batch{'' if len(by_batch) == 1 else 'es'}"
        raise InputError(where, "batch", found, "at least 2: one batch does not determine a slope")
    if max_batch is not None and max(by_batch) > max_batch:
        raise InputError(where, "batch", str(max(by_batch)), f"at most the max_batch given, {max_batch}")
    points = [_point(batch, same) for batch, same in sorted(by_batch.items())]
    return Profile(
        device=Device(name=name or Path(path).stem or "imported", kind=IMPORTED),
        model=ModelInfo(
            name=model, parameters=parameters, optimizer=optimizer, tokens_per_sample=tokens_per_sample
        ),
        points=points,
        max_batch=max_batch,
        memory=_memory(where, points, budget_bytes),
        fit=select_fit(points),
        link=_link(rows),
    )


def long_step(profile: Profile) -> str | None:
    """A doubt about an imported profile whose longest step is perhaps in milliseconds; None: no doubt."""
    batch, seconds = max(((p.batch, median(point_seconds(p))) for p in profile.points), key=itemgetter(1))
    if profile.device.kind != IMPORTED or seconds <= LONG_STEP:
        return None
    return f"a step of {batch} takes {seconds:,.4g} s: is that in milliseconds?"


def _point(batch: int, rows: Sequence[_Row]) -> Point:
    seconds = [row.seconds for row in rows]
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    return Point(
        batch=batch,
        seconds=seconds if len(seconds) > 1 else seconds[0],
        peak_bytes=max(peaks, default=None),
    )


def _memory(where: str, points: Sequence[Point], budget_bytes: int | None) -> Memory | None:
    peaks = [(point.batch, point.peak_bytes) for point in points if point.peak_bytes is not None]
    if len(peaks) < 2:
        if budget_bytes is not None:
            found = f"{len(peaks)} batch{'' if len(peaks) == 1 else 'es'} with peak_bytes"
            raise InputError(where, "peak_bytes", found, "at least 2, for a memory budget")
        return None
    most = max(peak for _, peak in peaks)
    model = memory_model(peaks, budget_bytes or most)
    if model is None and budget_bytes is not None and most > budget_bytes:
        expected = f"at most {budget_bytes}, the memory budget"
        raise InputError(where, "peak_bytes", f"up to {most}, whatever the batch", expected)
    return model


def _link(rows: Sequence[_Row]) -> Link | None:
    seconds: dict[int, list[float]] = {}
    for row in rows:
        if row.link_bytes is not None and row.link_seconds is not None:
            seconds.setdefault(row.link_bytes, []).append(row.link_seconds)
    return link_model("imported", seconds) if seconds else None


def _read_rows(where: str, text: str) -> Iterator[_Row]:
    """The measurements, in the file's order."""
    reader = csv.reader(io.StringIO(text, newline=""))
    columns: dict[str, int] | None = None
    width = 0
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            line = f"line {reader.line_num}"
            if columns is None:
                columns, width = _columns(where, line, cells), len(cells)
                continue
            needed = max(columns[name] for name in COLUMNS)
            if len(cells) <= needed:
                raise InputError(where, line, _shown(row), f"{needed + 1} columns")
            if any(cells[width:]):  # such as the second half of a number with a decimal comma
                expected = f"{width} columns, as the header has"
                raise InputError(where, line, _shown(row), expected)
            yield _row(where, line, {name: cells[k] for name, k in columns.items() if k < len(cells)})
    except csv.Error as error:
        raise InputError(where, f"line {reader.line_num}", str(error), "a CSV row") from None
    if columns is None:
        raise InputError(where, "line 1", "an empty file", "the header batch,seconds")


def _shown(cells: Iterable[str]) -> str:
    """A line of the file; its beginning, if it is a long one, as of a file that is no CSV."""
    text = repr(",".join(cells))
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def _columns(where: str, line: str, cells: Iterable[str]) -> dict[str, int]:
    """The place of each column that is read."""
    names = [cell.lower() for cell in cells]
    if any(names.count(column) != 1 for column in COLUMNS):
        raise InputError(where, line, _shown(names), "a header with the columns batch,seconds")
    for column in MORE_COLUMNS:
        if names.count(column) > 1:
            raise InputError(where, line, _shown(names), f"at most one column {column}")
    if ("link_bytes" in names) != ("link_seconds" in names):
        raise InputError(where, line, _shown(names), "both link_bytes and link_seconds, or neither")
    return {name: names.index(name) for name in (*COLUMNS, *MORE_COLUMNS) if name in names}


def _row(where: str, line: str, cells: dict[str, str]) -> _Row:
    def number(name: str) -> int | None:
        text = cells.get(name)
        return _whole(where, f"{line}: {name}", text, MAX_BYTES) if text else None

    link_bytes, text = number("link_bytes"), cells.get("link_seconds")
    if (link_bytes is None) != (not text):
        found = "one of link_bytes and link_seconds alone"
        raise InputError(where, line, found, "both of them, or neither")
    return _Row(
        _whole(where, f"{line}: batch", cells["batch"], MAX_BATCH),
        _seconds(where, f"{line}: seconds", cells["seconds"]),
        number("peak_bytes"),
        link_bytes,
        _seconds(where, f"{line}: link_seconds", text) if text else None,
    )


def _whole(where: str, field: str, text: str, most: int) -> int:
    if text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most:
        return int(text)
    raise InputError(where, field, repr(text), f"a whole number from 1 to {most}")


def _seconds(where: str, field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value > 0:
        return value
    raise InputError(where, field, repr(text), "a finite positive number")
