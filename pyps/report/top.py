"""The stores that `pyps top` shows, read without joining them.

Where a run's folder is known, its records and events add to what the store says: the folder is named by the
target, or by a local worker's environment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pyps.errors import InputError, PypsError, SegmentNotFound
from pyps.formats.events import RunEvent
from pyps.formats.records import RunReader
from pyps.formats.setup import SETUP_FILE, VARIABLE, read_setup
from pyps.remote import open_store
from pyps.remote.address import is_address
from pyps.report.live import LiveRun, Tracker
from pyps.report.run_data import events_of
from pyps.store.activity import StoreActivity, look
from pyps.store.policies import policy_name
from pyps.store.segments import segments
from pyps.store.store import Store


@dataclass(frozen=True, slots=True)
class TopStore:
    """One store. `error`: why it cannot be read; then the rest is empty.

    turn_rank, gap_seconds: under a policy of turns, the rank on turn, and the mean from push to push.
    """

    name: str
    run_dir: str | None = None
    policy: str = ""
    parameters: int = 0
    turn_rank: int | None = None
    gap_seconds: float | None = None
    run: LiveRun = field(default_factory=LiveRun)
    error: str = ""


class _Launched(msgspec.Struct):
    """Hold what is read here of a worker's settings."""

    run_dir: str


class StoreTop:
    """Looks at one store again and again."""

    def __init__(self, name: str, run_dir: Path | None = None) -> None:
        self.name = name
        self._store: Store | None = None
        self._run_dir: Path | None = None
        self._records: RunReader | None = None
        self._tracker = Tracker(None, 0.0, local=not is_address(name))
        if run_dir is not None:
            self._follow(run_dir)

    def look(self) -> TopStore:
        """The store as it is now; one that has gone or cannot be read says so in `error`."""
        folder = self._run_dir
        try:
            if self._store is None:
                self._store = open_store(self.name)
            return self._figures(self._store, look(self._store))
        except SegmentNotFound as error:
            self.close()
            name = str(folder) if folder is not None else self.name
            return TopStore(name, error=str(error) if folder is None else _without_store(folder))
        except PypsError as error:
            self.close()
            return TopStore(self.name, str(folder) if folder is not None else None, error=str(error))

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _figures(self, store: Store, state: StoreActivity) -> TopStore:
        if self._run_dir is None and not is_address(self.name):
            self._find_run(state)
        events = events_of(self._run_dir) if self._run_dir is not None else []
        records = self._records.new() if self._records is not None else []
        status, turns = state.status, state.status.turn_rank >= 0
        return TopStore(
            name=self.name,
            run_dir=str(self._run_dir) if self._run_dir is not None else None,
            policy=policy_name(store.layout.policy),
            parameters=store.layout.parameters,
            turn_rank=status.turn_rank if turns else None,
            gap_seconds=status.gap_nanoseconds * 1e-9 if turns else None,
            run=self._tracker.update(records, state, _now(events), events),
        )

    def _find_run(self, state: StoreActivity) -> None:
        """Follow a local run from the environment of one of its workers."""
        for member in state.members:
            folder = _run_dir_of(member.pid)
            if folder is not None and (folder / SETUP_FILE).exists():
                with suppress(InputError):
                    self._follow(folder)
                return

    def _follow(self, folder: Path) -> None:
        """Read the run in a folder from now on. Raises InputError."""
        setup, events = read_setup(folder), events_of(folder)
        began = [e.monotonic_seconds for k, e in enumerate(events) if e.kind == "resumed" or not k]
        self._tracker = Tracker(setup, began[-1] if began else 0.0, local=not is_address(self.name))
        self._run_dir, self._records = folder, RunReader(folder)


def find_stores(target: str | None) -> list[StoreTop]:
    """The stores that a target means: a run's folder, an address, a store's name; None: all of this machine.

    Raises InputError where there is no such thing.
    """
    if target is None:
        return [StoreTop(s.name) for s in segments() if s.in_use]
    if is_address(target):
        return [StoreTop(target)]
    if Path(target).is_dir():
        return [StoreTop(read_setup(target).store, Path(target))]
    if "/" in target or target not in {s.name for s in segments()}:
        names = ", ".join(s.name for s in segments()) or "none on this machine"
        expected = f"a run's folder, an address such as tcp://host:port/name, or a store: {names}"
        raise InputError("top", "", repr(target), expected)
    return [StoreTop(target)]


def _now(events: Sequence[RunEvent]) -> float:
    """The present time on the clock of the run's host, which may be another one than this."""
    if not events:
        return time.monotonic()
    return time.time() - events[-1].unix_seconds + events[-1].monotonic_seconds


def _without_store(run_dir: Path) -> str:
    """Why a run has no store."""
    events = events_of(run_dir)
    if events and events[-1].kind == "ended":
        return f"the run has ended ({events[-1].detail}; see pyps report {run_dir})"
    return f"no store: the run starts, or its launcher was killed (see pyps report {run_dir})"


def _run_dir_of(pid: int) -> Path | None:
    """The run's folder, as its launcher wrote it into a worker's environment."""
    try:
        values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = f"{VARIABLE}=".encode()
    found = [value.removeprefix(name) for value in values if value.startswith(name)]
    try:
        return Path(msgspec.json.decode(found[0], type=_Launched).run_dir) if found else None
    except msgspec.DecodeError:
        return None
