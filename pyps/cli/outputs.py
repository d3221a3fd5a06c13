"""Where a command may write, checked before its work: to no file that it reads, to each once, where files can
be made, and pictures only in known formats.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pyps.errors import InputError
from pyps.formats import Cluster
from pyps.formats.files import temporary_beside

PICTURES = (".png", ".svg", ".pdf")
PLAN_PICTURES = (".png", ".svg")  # as pyps.solver.report.plots draws them


def not_an_input(option: str, output: Path | None, inputs: Iterable[Path | None]) -> None:
    """Raises InputError if `output` is one of the inputs, also by another name. None: not given."""
    for path in inputs:
        if output is None or path is None:
            continue
        try:
            same = os.path.samefile(output, path)
        except (OSError, ValueError):  # one of them does not exist
            same = output == path
        if same:
            raise InputError(option, "", f"{output}, which is an input", "another file")


def not_twice(outputs: Iterable[tuple[str, Path | None]]) -> None:
    """Raises InputError if two outputs are one file, of which only the later one would be left.

    outputs: each with its option; None: not given.
    """
    taken: dict[Path, str] = {}
    for option, path in outputs:
        if path is None:
            continue
        file = Path(os.path.realpath(path.parent)) / path.name
        if file in taken:
            raise InputError(option, "", f"{path}, the file of {taken[file]}", "another file")
        taken[file] = option


def inputs_of(path: Path, cluster: Cluster) -> list[Path]:
    """A cluster file, and the profiles and the noise that it names."""
    noise = cluster.goodput.noise if cluster.goodput is not None else None
    return [path, *(Path(group.profile) for group in cluster.worker), *([Path(noise)] if noise else [])]


def check_writable(option: str, output: Path | None) -> None:
    """Raises InputError if `output` cannot be written: makes a file in its folder, and removes it."""
    if output is None:
        return
    if output.is_dir():
        raise InputError(option, "", f"{output}, a folder", "a file to write")
    if not output.parent.is_dir():
        raise InputError(option, "", f"no folder {output.parent}", "a file in a folder that exists")
    probe = temporary_beside(output)
    try:
        with open(probe, "xb"):
            probe.unlink()
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise InputError(option, "", f"{output}: {found.lower()}", "a file that can be written") from None


def check_picture(option: str, output: Path | None, endings: Iterable[str] = PICTURES) -> None:
    """Raises InputError if the ending of a picture's file names no format, or it cannot be written."""
    check_writable(option, output)
    if output is not None and output.suffix.lower() not in endings:
        raise InputError(option, "", f"the ending {output.suffix!r}", f"one of {' '.join(endings)}")


def check_folder(option: str, folder: Path | None) -> None:
    """Raises InputError if files cannot be made in `folder`, which may be made for that."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"{folder}: {(error.strerror or str(error)).lower()}"
        raise InputError(option, "", found, "a folder to write to") from None
    check_writable(option, folder / "picture.png")
