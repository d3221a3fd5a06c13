"""List segments and whether a process holds them, and remove those that are free."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pyps import native
from pyps.errors import Busy, InputError, SegmentNotFound, StoreError

PREFIX = "pyps-"
STAGED = ".staged-"  # in the names of files with gradients, after that of their segment
SHARD = re.compile(r"(?P<store>.*)\.shard-(?P<index>\d+)-of-(?P<count>\d+)")
DEFAULT_FOLDER = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment file; `state` is "free", "in use", or the C name of why it cannot be one of ours.

    `bytes` is the length of the file, `resident_bytes` what of it holds memory.
    """

    name: str
    bytes: int
    resident_bytes: int
    state: str
    detail: str = ""

    @property
    def in_use(self) -> bool:
        return self.state == "in use"


def folder() -> Path:
    """Where segments lie: PYPS_SHM_DIR, or /dev/shm. Raises InputError if that is not a folder."""
    path = Path(os.environ.get("PYPS_SHM_DIR") or DEFAULT_FOLDER)
    if not path.is_dir():
        raise InputError("environment", "PYPS_SHM_DIR", f"no folder at {path}", "a folder of a tmpfs")
    return path


def segment_path(name: str) -> Path:
    """The file of the segment of this name. Raises InputError if there is no folder for it."""
    return folder() / f"{PREFIX}{name}"


def shard_name(store: str, index: int, count: int) -> str:
    """The segment of a shard of a store over several servers."""
    return f"{store}.shard-{index}-of-{count}"


def staged_path(name: str, number: int) -> Path:
    """A file with a gradient that was sent to this segment, one of several (pyps.shards.staged)."""
    return folder() / f"{PREFIX}{name}{STAGED}{number}"


def staged_paths(name: str) -> list[Path]:
    """Return those that there are."""
    return sorted(folder().glob(f"{PREFIX}{name}{STAGED}*"))


def segments() -> list[Segment]:
    """All segments, by name."""
    files = (path for path in sorted(folder().glob(PREFIX + "*")) if STAGED not in path.name)
    found = (inspect(path) for path in files)
    return [segment for segment in found if segment is not None]


def inspect(path: Path) -> Segment | None:
    """Return what one file is; None if it has gone meanwhile."""
    name = path.name.removeprefix(PREFIX)
    try:
        status = path.lstat()
        native.probe(name)
        state, detail = "free", ""
    except (FileNotFoundError, SegmentNotFound):
        return None
    except Busy:
        state, detail = "in use", ""
    except StoreError as error:
        state, detail = error.code, error.message
    return Segment(_shown(name), status.st_size, status.st_blocks * 512, state, _shown(detail))


def _shown(text: str) -> str:
    """With escapes for what a terminal would obey or could not show; a legal name has none of it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def collect_garbage() -> tuple[list[Segment], list[Segment]]:
    """Remove every segment that no live process holds: (removed, kept). What is not ours is kept."""
    removed, kept = [], []
    for segment in segments():
        if segment.state != "free":
            kept.append(segment)
            continue
        try:
            native.unlink(segment.name)
            removed.append(segment)
            for path in staged_paths(segment.name):
                path.unlink(missing_ok=True)
        except SegmentNotFound:
            pass  # another process removed it
        except StoreError:
            kept.append(segment)  # opened since we looked
    return removed, kept


def remove_all(store: str) -> None:
    """Remove what servers of this store have left here: head, shards, and gradients sent to them."""
    for path in sorted(folder().glob(f"{PREFIX}{store}*")):
        name = path.name.removeprefix(PREFIX)
        segment, staged, _ = name.partition(STAGED)
        found = SHARD.fullmatch(segment)
        if segment != store and (found is None or found["store"] != store):
            continue
        with contextlib.suppress(SegmentNotFound):
            if staged:
                path.unlink(missing_ok=True)
            else:
                native.unlink(name, force=True)
