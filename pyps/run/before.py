"""What the folder of a resumed run held before: kept until the new start has trained, else put back.

    .before/    hard links of the files that a start replaces, and copies of what it appends to

A launcher that is killed meanwhile leaves that folder; the next one puts its files back first. What ranks
printed stays in their logs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Self

from pyps.formats.events import EVENTS
from pyps.formats.setup import SETUP_FILE
from pyps.report.report import REPORT
from pyps.worker.epochs import EPOCHS

BEFORE = ".before"
REPLACED = (SETUP_FILE, "plan.json", REPORT, "trace.json")
WRITTEN = (EVENTS, EPOCHS)
RECORDS = "worker-*.jsonl"


class Before:
    """The files of a run's folder as they are now; a context manager, under the lock of its event log."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._records: set[str] | None = None  # until the new start has trained

    def __enter__(self) -> Self:
        run_dir, temporary = self._run_dir, self._run_dir / f"{BEFORE}.new"
        self._records = {path.name for path in run_dir.glob(RECORDS)}
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name in (*self._records, *REPLACED):
            if (run_dir / name).exists():
                _link(run_dir / name, temporary / name)
        for name in WRITTEN:
            if (run_dir / name).exists():
                shutil.copyfile(run_dir / name, temporary / name)
        os.rename(temporary, run_dir / BEFORE)
        return self

    def look(self) -> None:
        """Once the new start has trained a step, its files stay."""
        if self._records is not None:
            new = (path for path in self._run_dir.glob(RECORDS) if path.name not in self._records)
            if any(path.stat().st_size for path in new):
                self._records = None
                _remove(self._run_dir)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.look()
        if self._records is None or kind is None:
            _remove(self._run_dir)
            return
        put_back(self._run_dir)
        if error is not None:
            error.add_note(f"nothing was trained: {self._run_dir} is as it was")


def put_back(run_dir: Path) -> None:
    """Make the folder what it was before a start that has not succeeded; nothing if there was none."""
    before = run_dir / BEFORE
    if not before.is_dir():
        return
    for path in (*run_dir.glob(RECORDS), *(run_dir / name for name in (*REPLACED, *WRITTEN))):
        if not (before / path.name).exists():
            path.unlink(missing_ok=True)
    for path in before.iterdir():
        temporary = run_dir / f".{path.name}.before"
        temporary.unlink(missing_ok=True)
        _link(path, temporary)
        os.replace(temporary, run_dir / path.name)
        temporary.unlink(missing_ok=True)  # rename leaves a second name of the same file
    _remove(run_dir)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _remove(run_dir: Path) -> None:
    """At once, so that no half of it is put back."""
    gone = run_dir / f"{BEFORE}.new"
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(run_dir / BEFORE, gone)
    shutil.rmtree(gone, ignore_errors=True)
