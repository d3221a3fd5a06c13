"""Reads this process's memory on its host: what it holds, what is free, and what its allocator keeps.

Free memory is the least of what the machine has available and what each control group around this process
(version 1 or 2, up to the root) leaves: its limit minus its usage, where inactive file pages count as free.

By default glibc returns large blocks to the kernel, and every training step allocates them again page by
page, at a cost that grows faster than the batch. `disable_malloc_trim` avoids that, in training and in
profiling.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
LIBC: Any = None if os.name == "nt" else ctypes.CDLL(None)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
KEEP = {M_TRIM_THRESHOLD: 2**31 - 1, M_MMAP_THRESHOLD: 2**30}  # bytes
NO_LIMIT = 1 << 62  # version 1 writes "unlimited" as a larger number


@dataclass(frozen=True)
class GroupFiles:
    """The names of a control group version's files; a limit that is not a number counts as none."""

    limits: tuple[str, ...]
    usage: str
    inactive: str


VERSION_1 = GroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = GroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


def disable_malloc_trim(environment: Mapping[str, str] = os.environ) -> bool:
    """Makes this process's allocator keep freed memory for the next step.

    Returns False if the allocator is not glibc's, or the user has tuned it.
    """
    tuned = [name for name in environment if name.startswith("MALLOC_")]
    if tuned or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "") or not hasattr(LIBC, "mallopt"):
        return False
    return all(LIBC.mallopt(option, value) for option, value in KEEP.items())


def trim_malloc() -> None:
    """Returns the allocator's free memory to the kernel, for when memory has become scarce."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def cpu_free_bytes(proc: Path = PROC) -> int:
    """Bytes that this process can still allocate within the machine's memory and its control groups."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    free = int(found[1]) * 1024 if found else NO_LIMIT
    for folder, files in groups(proc):
        free = min(free, _group_free(folder, files))
    return max(0, free)


def cpu_held_bytes(proc: Path = PROC) -> int:
    """Bytes of this process that are resident in memory."""
    return int((proc / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def groups(proc: Path = PROC) -> Iterator[tuple[Path, GroupFiles]]:
    """The folders of the control groups that bound this process's memory, innermost first."""
    paths = _paths(proc, "self")
    for line in _text(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        files = VERSION_2 if kind[0] == "cgroup2" else VERSION_1
        key = "" if kind[0] == "cgroup2" else "memory"
        if not kind[0].startswith("cgroup") or key not in ("", *kind[2].split(",")) or key not in paths:
            continue
        root, mount = (_unescaped(field) for field in fields[3:5])
        yield from ((folder, files) for folder in _upwards(Path(mount), root, paths[key]))


def cgroup_peers(processes: Sequence[int], proc: Path = PROC) -> int:
    """The number of these processes in this process's control groups, including this one."""
    mine = _paths(proc, "self")
    others = {process for process in processes if process != os.getpid()}
    return 1 + sum(_paths(proc, str(process)) == mine for process in others)


def _paths(proc: Path, process: str) -> dict[str, str]:
    """The paths of a process in the version 1 hierarchy "memory" and in version 2, whose name is empty."""
    found = {}
    for line in _text(proc / process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            if name in ("", "memory"):
                found[name] = path
    return found


def _upwards(mount: Path, root: str, path: str) -> Iterator[Path]:
    """From the group's folder up to the mount; the mount alone if a container hides the folders between."""
    inside = path.removeprefix(root.rstrip("/")).strip("/")
    folder = mount / inside
    if ".." in Path(inside).parts or not folder.is_dir():
        folder = mount
    yield folder
    while folder != mount:
        folder = folder.parent
        yield folder


def _group_free(folder: Path, files: GroupFiles) -> int:
    limit = min(_number(folder / name) for name in files.limits)
    if limit >= NO_LIMIT:
        return NO_LIMIT
    stat = _text(folder / "memory.stat")
    found = re.search(rf"^{files.inactive} (\d+)$", stat, re.MULTILINE)
    used = _number(folder / files.usage)
    return limit - (0 if used >= NO_LIMIT else max(0, used - (int(found[1]) if found else 0)))


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else NO_LIMIT


def _text(path: Path) -> str:
    """The file's text, empty if the file or its process does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
