"""A run that was stopped goes on: what it goes on from, and what of its folder still holds.

Steps after the checkpoint are undone: they are trained again, so their records go. Times of earlier parts are
moved where the machine was started anew since, so that all times of a folder are on one clock.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pyps import native
from pyps.checkpoint.folder import find_checkpoint, newest_checkpoint, verify_folder
from pyps.errors import Busy, InputError, SegmentNotFound, reason_of
from pyps.formats.checkpoint import Checkpoint
from pyps.formats.events import EVENTS, EventLog, RunEvent, read_events
from pyps.formats.files import write_lines
from pyps.formats.records import StepRecord, read_records
from pyps.formats.setup import SETUP_FILE, read_setup
from pyps.report.report import REPORT, read_report
from pyps.run.before import BEFORE, restore_previous
from pyps.store.policies import Policy
from pyps.worker.data.epochs import drop_undone_epochs

SAME_CLOCK_SECONDS = 60.0  # a time of day is corrected by less than that
OWN_STORE = re.compile(r"run-\d+-[0-9a-f]{12}")  # the segment of one run alone, by a number that no other has
OTHERS = 0o022  # write permissions of the group and of all
DEATH_SECONDS = 15.0  # in which the workers of a launcher that was killed end


@dataclass(frozen=True)
class Resumed:
    """Hold what a run goes on from.

    run_dir: the folder that it continues in; None: a new one. path, checkpoint: where its state is and what
    that is; None where it had no checkpoint yet, and starts anew.
    """

    run_dir: Path | None
    path: Path | None
    checkpoint: Checkpoint | None

    @property
    def version(self) -> int:
        return self.checkpoint.version if self.checkpoint is not None else 0


def find_resumed(resume: str | os.PathLike[str]) -> Resumed:
    """The newest checkpoint of a run's folder, or the checkpoint itself, with every file verified.

    Raises InputError.
    """
    given = Path(resume).absolute()
    if (given / SETUP_FILE).exists():
        _check_plain(given)
    _settle(given)
    run_dir = given if (given / SETUP_FILE).exists() else None
    path = newest_checkpoint(given) if run_dir is not None else find_checkpoint(given)
    return Resumed(run_dir, path, verify_folder(path) if path is not None else None)


def _check_plain(run_dir: Path) -> None:
    """Raise InputError for a link or a pipe in a folder that the run will write to: it may lead elsewhere."""
    for entry in sorted(os.scandir(run_dir), key=lambda entry: entry.name):
        if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
            found = "a link" if entry.is_symlink() else "something that is neither a file nor a folder"
            expected = "nothing that leads out of the run's folder: move it away"
            raise InputError(entry.path, "", found, expected)


def check_unfinished(resumed: Resumed, samples: int) -> None:
    """Raise InputError if a run of `samples` has nothing left to train. 0: it has no end."""
    run_dir, checkpoint = resumed.run_dir, resumed.checkpoint
    if not samples or checkpoint is None or (run_dir is not None and not _has_ended(run_dir)):
        return
    try:
        left = sum(count for _, count in checkpoint.state.get("ranges", ()))
        trained = int(checkpoint.state.get("samples_assigned", 0) - left)
    except (TypeError, ValueError) as error:
        raise InputError(str(resumed.path), "state", str(error), "that of a store") from None
    if trained >= samples:
        found = f"{samples:,}: this run has finished ({trained:,} of {samples:,} samples)"
        raise InputError(str(run_dir or resumed.path), "samples", found, "more --samples, or --epochs")


def _has_ended(run_dir: Path) -> bool:
    """Return whether all that a run leaves is there: its launcher may have been killed just before."""
    with contextlib.suppress(InputError):
        return read_report(run_dir / REPORT).outcome == "finished"
    return False


def run_of(resume: str | os.PathLike[str]) -> Path | None:
    """The folder of the run that a checkpoint, or the folder itself, belongs to; None if it is elsewhere."""
    given = Path(resume).absolute()
    for folder in (given, given.parent, given.parent.parent, Path(os.path.realpath(given)).parent.parent):
        if (folder / SETUP_FILE).exists():
            _settle(folder)
            return folder
    return None


def _settle(run_dir: Path) -> None:
    """Undo a start that was killed before it had trained. Raises InputError while it may still train."""
    if (run_dir / BEFORE).is_dir():
        with EventLog(run_dir / EVENTS):
            restore_previous(run_dir)


def new_store() -> str:
    """A name for the segment of one run alone."""
    return f"run-{os.getpid()}-{secrets.token_hex(6)}"


def check_policy_named(policy: str | Policy | None, where: str) -> None:
    """Raise InputError for a policy that would be imported, where a file that may be another's names it."""
    if isinstance(policy, str) and "." in policy.partition(":")[0]:
        expected = f"that you name it yourself, as its module's code runs: --policy {policy}"
        raise InputError(where, "policy", repr(policy), expected)


def is_owned(run_dir: Path) -> bool:
    """Return whether only this user may write to a run's folder and its run.json."""
    found = [os.stat(path) for path in (run_dir, run_dir / SETUP_FILE)]
    return all(one.st_uid == os.geteuid() and not one.st_mode & OTHERS for one in found)


def continue_folder(run_dir: Path, version: int | None, events: Path) -> int:
    """Make a run's folder ready to go on from a version; whatever stops this, it can be done again. The last
    version that its records knew.

    version: None: what the store has; then the workers drop what is undone. events: the event log. Raises
    InputError for a damaged file, Busy if workers of the run do not end.
    """
    _remove_segment(read_setup(run_dir).store)
    before = read_events(events) if events.exists() else []
    shift, last = _shift(before), 0
    for path in run_dir.glob("worker-*.jsonl"):
        records = list(read_records(path))
        last = max([last, *(record.version for record in records)])
        kept = (record for record in records if version is None or record.version <= version)
        write_lines(path, [_moved(record, shift) for record in kept])
    drop_undone_epochs(run_dir, version)
    if shift:
        moved = [msgspec.structs.replace(e, monotonic_seconds=e.monotonic_seconds + shift) for e in before]
        try:
            events.write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in moved))  # its lock is held
        except OSError as error:
            expected = "a file to write to, with room for its events"
            raise InputError(str(events), "", reason_of(error), expected) from None
    return last


def _remove_segment(store: str) -> None:
    """A launcher that was killed left its store's segment behind; its workers end soon after it."""
    deadline = time.monotonic() + DEATH_SECONDS
    while OWN_STORE.fullmatch(store):  # else it is elsewhere, or no run's: whoever wrote run.json named it
        try:
            native.unlink(store)
        except SegmentNotFound:
            return
        except Busy:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _shift(events: Sequence[RunEvent]) -> float:
    """Seconds to add to the times of a folder, so that they are on this machine's present clock."""
    if not events:
        return 0.0
    shift = (events[-1].unix_seconds - events[-1].monotonic_seconds) - (time.time() - time.monotonic())
    return shift if abs(shift) > SAME_CLOCK_SECONDS else 0.0


def _moved(record: StepRecord, shift: float) -> StepRecord:
    spans = [(kind, begin + shift, end + shift) for kind, begin, end in record.spans]
    return msgspec.structs.replace(record, spans=spans) if shift else record
