"""The checkpoints of a run: when one is due, and a thread that writes it while training goes on.

A strict snapshot is one version of the store, taken while workers push. Writing it then has time: its thread
has a low priority, so that on a busy machine the workers come first.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pyps.checkpoint.folder import FOLDER
from pyps.checkpoint.local_states import open_states
from pyps.checkpoint.state import save
from pyps.errors import InputError, LinkLost, PypsError, StoreError
from pyps.native.status import Status
from pyps.run.options import interval_of
from pyps.run.ranks import with_split
from pyps.run.spec import RunSpec

SNAPSHOT_SECONDS = 60.0
LOW_PRIORITY = 10  # as of nice(1)

OnWritten = Callable[[int, Path], None]  # (version, folder)
OnFailed = Callable[[PypsError], None]


class Checkpointer:
    """Writes a run's checkpoints, one at a time. `path`: the last one that is whole, `version`: its version.
    `writes`: whether this launcher writes any.

    on_written, on_failed: called by update(), finish() and wait(), never by the thread.
    """

    def __init__(self, spec: RunSpec, on_written: OnWritten, on_failed: OnFailed) -> None:
        self.path = spec.resumed.path
        self.version = spec.resumed.version
        self._spec, self._on_written, self._on_failed = spec, on_written, on_failed
        self._every = interval_of(spec.options.checkpoint_every, "checkpoint_every")
        self.writes = spec.options.keep_checkpoints > 0 and any(rank.rank == 0 for rank in spec.ranks)
        self._thread: threading.Thread | None = None
        self._result: tuple[int, Path] | PypsError | None = None
        self._last_version, self._last_time = self.version, time.monotonic()

    def update(self, status: Status) -> None:
        """Begin to write a checkpoint if one is due and none is under way."""
        if not status.all_joined and status.version == self.version:
            self._last_time = time.monotonic()  # it trains from here
        self._collect()
        if self._thread is None and self._is_due(status.version):
            self._begin(SNAPSHOT_SECONDS, low_priority=True)
            self._last_version, self._last_time = status.version, time.monotonic()

    def begin_last(self, version: int, seconds: float) -> None:
        """Begin to write one of a store at `version` if it is newer than the last."""
        self._collect()
        if self.writes and self._thread is None and version > self.version:
            self._begin(seconds, low_priority=False)

    def wait(self, seconds: float) -> bool:
        """Wait for the one under way; whether none is any longer."""
        if self._thread is not None:
            self._thread.join(seconds)
        self._collect()
        return self._thread is None

    def _is_due(self, version: int) -> bool:
        if not self.writes or version <= self.version:
            return False
        every = self._every
        if every.versions:
            return version // every.versions > self._last_version // every.versions
        return bool(every.seconds) and time.monotonic() - self._last_time >= every.seconds

    def _begin(self, seconds: float, *, low_priority: bool) -> None:
        self._result = None
        self._thread = threading.Thread(target=self._write, args=(seconds, low_priority), daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        if isinstance(self._result, PypsError):
            if isinstance(self._result, LinkLost):  # again, once the store is back
                self._last_version, self._last_time = self.version, -math.inf
            self._on_failed(self._result)
        elif self._result is not None:
            self.version, self.path = self._result
            self._on_written(*self._result)

    def _write(self, seconds: float, low_priority: bool) -> None:
        spec = self._spec
        try:
            with spec.open_store() as store:
                if spec.journal is not None:
                    store.journal(spec.journal)
                state = store.state(seconds)
            local = open_states(spec.run_dir, [rank.total.pushes for rank in state.header.ranks])
            if low_priority:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
            with contextlib.ExitStack() as opened:
                for file in local.values():
                    opened.enter_context(file)
                path = save(
                    state,
                    spec.run_dir / FOLDER,
                    keep=spec.options.keep_checkpoints,
                    policy=str(spec.policy),
                    seed=spec.options.seed,
                    plan=with_split(spec.plan, [rank.total.batch for rank in state.header.ranks]),
                    local=local,
                )
            self._result = state.header.version, path
        except (StoreError, InputError) as error:
            self._result = error
        except Exception as error:  # such as MemoryError: a thread's own traceback is easily missed
            self._result = PypsError(repr(error))
