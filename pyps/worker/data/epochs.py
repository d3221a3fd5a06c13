"""Calls a validation once for each finished epoch, whichever rank is there to do it, also after a resume.

    worker.batches(dataset, on_epoch=validate)        # validate(1) after the first epoch, on one rank

The lowest rank that lives does it; where that dies meanwhile, the next one. epochs.jsonl in the run's folder
says which epochs are done. A run that goes on in the middle of an epoch waits for that epoch's end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pyps.errors import InputError
from pyps.formats.records import LineReader, append_whole, drop_half_line
from pyps.native.status import MemberState
from pyps.native.values import Role
from pyps.store.store import Store

EPOCHS = "epochs.jsonl"
LOOK_SECONDS = 1.0  # between two looks whether the rank that validates still lives
GONE = (MemberState.LEFT, MemberState.DEAD)
OnEpoch = Callable[[int], object]


class Epoch(msgspec.Struct, frozen=True):
    """An epoch that a rank has validated; epoch: 1 is the first. version: of the parameters."""

    epoch: int
    rank: int
    version: int


class Epochs:
    """The epochs of a run as one worker sees them.

    on_epoch: called with the number of finished epochs. refresh: brings the newest parameters into the model;
    their version. run_dir: of the run; None: what other processes did is not known.
    """

    def __init__(
        self, on_epoch: OnEpoch, refresh: Callable[[], int], store: Store, rank: int, run_dir: Path | None
    ) -> None:
        self._on_epoch, self._refresh, self._store, self._rank = on_epoch, refresh, store, rank
        self._path = run_dir / EPOCHS if run_dir is not None else None
        self._done: int | None = None  # epochs that need nothing more
        self._next_look = 0.0

    def follow(self, samples: int, dataset_length: int, global_batch: int) -> None:
        """Begin a step that comes after `samples` of the run. Raises InputError for a stream."""
        if not dataset_length:
            raise InputError("batches", "on_epoch", "a dataset without a length", "one with a length")
        epoch, within = divmod(samples, dataset_length)
        if self._done is None:
            self._done = min(epoch, self._known()) if within < global_batch else epoch
        self._reach(epoch)

    def end(self, dataset_length: int) -> None:
        """All samples are trained; the model has the final parameters."""
        if dataset_length:
            self._done = self._known() if self._done is None else self._done
            self._next_look = 0.0
            self._reach(self._store.layout.samples // dataset_length)

    def _reach(self, epoch: int) -> None:
        if self._done is None or epoch <= self._done or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        if (self._rank == self._lowest() and self._validate(epoch)) or self._known() >= epoch:
            self._done, self._next_look = epoch, 0.0

    def _validate(self, epoch: int) -> bool:
        """Return whether it is done; the file's lock is that of the rank that does it, also while it dies."""
        if self._path is None:
            self._call(epoch)
            return True
        import fcntl  # Windows has none, and has no run's folder here

        with self._path.open("ab", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            drop_half_line(self._path)
            if self._known() < epoch:
                done = Epoch(epoch, self._rank, self._call(epoch))
                append_whole(file, msgspec.json.encode(done) + b"\n")
        return True

    def _call(self, epoch: int) -> int:
        version = self._refresh()
        self._on_epoch(epoch)
        return version

    def _known(self) -> int:
        if self._path is None or not self._path.exists():
            return 0
        return max((line.epoch for line in LineReader(self._path).new(Epoch)), default=0)

    def _lowest(self) -> int:
        """The lowest rank whose worker is there."""
        workers = (m for m in self._store.members() if m.role is Role.WORKER and m.state not in GONE)
        return min((m.rank for m in workers if m.rank is not None), default=self._rank)


def drop_undone_epochs(run_dir: Path, version: int | None) -> None:
    """The run goes on from a version: later epochs are trained again. None: that is not known. A kill leaves
    the file as before or after, and it needs no room on the disk.
    """
    path = run_dir / EPOCHS
    if version is None or not path.exists():
        return
    epochs = LineReader(path).new(Epoch)
    kept = next((k for k, line in enumerate(epochs) if line.version > version), len(epochs))
    os.truncate(path, sum(map(len, path.read_bytes().splitlines(keepends=True)[:kept])))
