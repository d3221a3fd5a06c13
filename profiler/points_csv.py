"""Imports measurements: makes a profile of a CSV file of (batch, seconds) rows.

The header must name the columns `batch` and `seconds`, in any order. Further columns, blank lines, a byte
order mark and several rows of one batch are allowed. Anything else raises an error with its line number.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable
from pathlib import Path

from pyps.errors import InputError
from pyps.formats import MAX_BATCH, Device, ModelInfo, Point, Profile
from pyps.profiler.select import select_fit

COLUMNS = ("batch", "seconds")
MAX_FILE_BYTES = 1 << 26


def import_points(
    path: str | os.PathLike[str],
    *,
    max_batch: int | None = None,
    name: str | None = None,
    model: str = "imported",
    parameters: int | None = None,
) -> Profile:
    """A profile of the measurements in a CSV file, fitted.

    path: the CSV file. max_batch: the device's memory limit in samples; None: unknown. name: the device's
    name; None: the file's name without its ending. model: the model's name. parameters: the model's number of
    parameters, from which a plan computes its transfers; None: unknown. Raises InputError with file and line.
    """
    where = str(path)
    if max_batch is not None and not 1 <= max_batch <= MAX_BATCH:
        raise InputError("import", "max_batch", str(max_batch), f"1 to {MAX_BATCH}")
    if parameters is not None and parameters < 1:
        raise InputError("import", "parameters", str(parameters), "a whole number of at least 1")
    by_batch = _read_rows(where, _read_text(where))
    if len(by_batch) < 2:
        found = f"{len(by_batch)} distinct batch{'' if len(by_batch) == 1 else 'es'}"
        raise InputError(where, "batch", found, "at least 2: one batch does not determine a slope")
    if max_batch is not None and max(by_batch) > max_batch:
        raise InputError(where, "batch", str(max(by_batch)), f"at most the max_batch given, {max_batch}")
    points = [
        Point(batch=b, seconds=values if len(values) > 1 else values[0])
        for b, values in sorted(by_batch.items())
    ]
    return Profile(
        device=Device(name=name or Path(path).stem or "imported", kind="imported"),
        model=ModelInfo(name=model, parameters=parameters),
        points=points,
        max_batch=max_batch,
        fit=select_fit(points),
    )


def _read_text(where: str) -> str:
    try:
        with open(where, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise InputError(where, "", found.lower(), "a readable CSV file") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(where, "", f"more than {MAX_FILE_BYTES} bytes", "a smaller file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError(where, "", found, "UTF-8 text") from None


def _read_rows(where: str, text: str) -> dict[int, list[float]]:
    """Seconds by batch, in the file's order."""
    reader = csv.reader(text.splitlines())
    columns: tuple[int, int] | None = None
    by_batch: dict[int, list[float]] = {}
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            line = f"line {reader.line_num}"
            if columns is None:
                columns = _columns(where, line, cells)
                continue
            if len(cells) <= max(columns):
                raise InputError(where, line, repr(",".join(row)), f"{max(columns) + 1} columns")
            batch, seconds = (cells[k] for k in columns)
            by_batch.setdefault(_batch(where, line, batch), []).append(_seconds(where, line, seconds))
    except csv.Error as error:
        raise InputError(where, f"line {reader.line_num}", str(error), "a CSV row") from None
    if columns is None:
        raise InputError(where, "line 1", "an empty file", "the header batch,seconds")
    return by_batch


def _columns(where: str, line: str, cells: Iterable[str]) -> tuple[int, int]:
    names = [cell.lower() for cell in cells]
    if any(names.count(column) != 1 for column in COLUMNS):
        raise InputError(where, line, repr(",".join(names)), "a header with the columns batch,seconds")
    return names.index("batch"), names.index("seconds")


def _batch(where: str, line: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= MAX_BATCH:
        return int(text)
    raise InputError(where, f"{line}: batch", repr(text), f"a whole number from 1 to {MAX_BATCH}")


def _seconds(where: str, line: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value > 0:
        return value
    raise InputError(where, f"{line}: seconds", repr(text), "a finite positive number")
