"""Where a command may write, checked before its work: to no file that it reads, to each once, where files can
be made, and pictures only in known formats.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pyps.errors import InputError, reason_of
from pyps.formats import Cluster
from pyps.formats.files import temporary_beside

PICTURES = (".png", ".svg", ".pdf")
PLAN_PICTURES = (".png", ".svg")  # as pyps.solver.report.plots draws them


def check_outputs(
    outputs: Mapping[str, Sequence[Path | None]],
    inputs: Sequence[Path | None] = (),
    pictures: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Raise InputError if an output cannot be written, is an input, also by another name, or another output,
    or if the ending of a picture names no format.

    outputs: by option; None: not given. pictures: the endings of those that are pictures.
    """
    taken: dict[Path, str] = {}
    given = [(option, path) for option, paths in outputs.items() for path in paths if path is not None]
    for option, path in given:
        if any(_is_same(path, read) for read in inputs if read is not None):
            raise InputError(option, "", f"{path}, which is an input", "another file")
        check_writable(option, path)
        file = Path(os.path.realpath(path.parent)) / path.name
        if file in taken:
            raise InputError(option, "", f"{path}, the file of {taken[file]}", "another file")
        taken[file] = option
        if option in pictures and path.suffix.lower() not in pictures[option]:
            expected = f"one of {' '.join(pictures[option])}"
            raise InputError(option, "", f"the ending {path.suffix!r}", expected)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):  # one of them does not exist
        return one == other


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
        found = f"{output}: {reason_of(error)}"
        raise InputError(option, "", found, "a file that can be written") from None


def check_folder(option: str, folder: Path | None) -> None:
    """Raises InputError if files cannot be made in `folder`, which may be made for that."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"{folder}: {reason_of(error)}"
        raise InputError(option, "", found, "a folder to write to") from None
    check_writable(option, folder / "picture.png")
