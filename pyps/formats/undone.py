"""What a run lost with its store: undone.jsonl, a line for each time that rank 0 made the store again from a
checkpoint. Rank 0's worker writes it; the launcher passes it on as events.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pyps.formats.records import LineReader, append_whole

UNDONE = "undone.jsonl"


class Undone(msgspec.Struct, frozen=True):
    """version: of the checkpoint; pushes: known to have come after it."""

    version: int
    pushes: int


def append_undone(run_dir: Path, undone: Undone) -> None:
    """Add a line; nothing where the disk is full. Raises OSError."""
    with (run_dir / UNDONE).open("ab", buffering=0) as file:
        append_whole(file, msgspec.json.encode(undone) + b"\n")


def read_undone(run_dir: Path) -> list[Undone]:
    """All lines; none without the file. Raises InputError for one of something else."""
    try:
        return LineReader(run_dir / UNDONE).new(Undone)
    except OSError:
        return []
