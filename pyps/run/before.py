"""Define what the folder of a resumed run held before: kept until the new start has trained, else put back.

    .before/    hard links of the files that a start replaces, and copies of what it appends to

A launcher that is killed meanwhile leaves that folder; the next one puts its files back first. What ranks
printed stays in their logs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Self

from pyps.errors import InputError, reason_of
from pyps.formats.events import EVENTS
from pyps.formats.setup import SETUP_FILE
from pyps.report.report import REPORT
from pyps.worker.data.epochs import EPOCHS

BEFORE = ".before"
REPLACED = (SETUP_FILE, "plan.json", REPORT, "trace.json")
WRITTEN = (EVENTS, EPOCHS)
RECORDS = "worker-*.jsonl"


class Before:
    """The files of a run's folder as they are now; a context manager, under the lock of its event log. Raises
    InputError where they cannot be kept.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._sizes: dict[str, int] | None = None  # of the records, until the new start has trained

    def __enter__(self) -> Self:
        run_dir, temporary = self._run_dir, self._run_dir / f"{BEFORE}.new"
        self._sizes = dict.fromkeys(self._record_sizes(), sys.maxsize)  # a late worker may write
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            for name in (*self._sizes, *REPLACED):
                if (run_dir / name).exists():
                    _link(run_dir / name, temporary / name)
            for name in WRITTEN:
                if (run_dir / name).exists():
                    shutil.copyfile(run_dir / name, temporary / name)
            os.rename(temporary, run_dir / BEFORE)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            expected = "a folder to write to, with room for its events"
            raise InputError(str(run_dir), "", reason_of(error), expected) from None
        return self

    def begin(self) -> None:
        """The folder is ready: what its records hold now is of earlier parts."""
        self._sizes = self._record_sizes()

    def _record_sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._run_dir.glob(RECORDS)}

    def look(self) -> None:
        """Once the new start has trained a step, its files stay. In a container its workers may have the pids
        of earlier ones, and so their files.
        """
        before = self._sizes
        if before is not None and any(n > before.get(name, 0) for name, n in self._record_sizes().items()):
            self._sizes = None
            _remove(self._run_dir)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.look()
        if self._sizes is None or kind is None:
            _remove(self._run_dir)
            return
        restore_previous(self._run_dir)
        if error is not None:
            error.add_note(f"nothing was trained: {self._run_dir} is as it was")


def restore_previous(run_dir: Path) -> None:
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
