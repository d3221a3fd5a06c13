"""A disk that is full while a run trains: training goes on, and the end says what is missing."""

from __future__ import annotations

import errno
import os
import warnings
from io import FileIO
from pathlib import Path
from typing import Any, cast

import pytest
from run_tools import make_record, make_setup

from pyps.errors import InputError
from pyps.formats.events import EventLog
from pyps.formats.records import RecordWriter, append_whole, read_run, record_path
from pyps.report.report import StoreTotals, read_report
from pyps.run import main
from pyps.run.launcher import Launcher, TrainingFailed


class FullFile(FileIO):
    """Has room for `room` bytes more."""

    room = 0

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: self.room]
        self.room -= len(part)
        return super().write(part)


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_line_is_whole_or_not_there(tmp_path: Path, room: int) -> None:
    with FullFile(str(tmp_path / "lines"), "ab") as file:
        file.room = 100
        assert append_whole(file, b"first\n")
        file.room = room
        assert not append_whole(file, b"second\n")
        file.room = 100
        assert append_whole(file, b"third\n")
    assert (tmp_path / "lines").read_bytes() == b"first\nthird\n"


def test_records_are_left_out_with_one_warning(tmp_path: Path) -> None:
    record = make_record(0, 1, 4, [("compute", 0.0, 1.0)])
    path = record_path(tmp_path, 0, 1)
    writer = RecordWriter(path)
    file = writer.file = FullFile(str(path), "ab")
    with pytest.warns(UserWarning, match=r"worker-0-1\.jsonl: the disk is full") as seen:
        writer.write(record)
    assert len(seen) == 1
    with warnings.catch_warnings(action="error"):
        writer.write(record)
        file.room = 10_000
        writer.write(record)
    writer.close()
    assert len(read_run(tmp_path)) == 1


def test_a_line_that_a_kill_has_cut_is_not_continued(tmp_path: Path) -> None:
    """By the rank's next process, which in a container may have the same pid."""
    record, path = make_record(0, 1, 4, [("compute", 0.0, 1.0)]), record_path(tmp_path, 0, 1)
    with RecordWriter(path) as writer:
        writer.write(record)
        writer.file.write(b'{"rank":0,"pi')
    with RecordWriter(path) as again:
        again.write(record)
    assert len(read_run(tmp_path)) == 2


class EndsWith(Launcher):
    """A launcher of no process, whose run ends with `error`."""

    def __init__(self, spec: Any, log: EventLog, error: Exception | None) -> None:
        self.spec, self.log, self.totals, self.error = spec, log, StoreTotals(), error

    def __enter__(self) -> EndsWith:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, TrainingFailed("rank 0 died")])
def test_a_report_that_does_not_fit_hides_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Exit code 1, not 2: something was trained."""

    def full(path: Path, value: object) -> None:
        raise InputError(str(path), "", "no space left on device", "a place to write to")

    monkeypatch.setattr(main, "write_json", full)
    spec = type("Spec", (), {"run_dir": tmp_path, "setup": make_setup({0: 4}), "store": "model"})
    with EventLog(tmp_path / "run.jsonl") as log, pytest.raises(TrainingFailed) as raised:
        main.launch(EndsWith(cast(Any, spec), log, error))
    said = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert raised.value.exit_code == 1
    assert any("trace.json: found no space left on device" in line for line in said)
    assert error is None or raised.value is error


def test_a_run_on_a_store_that_is_used_up_fails(tmp_path: Path) -> None:
    """Not in silence: no process failed, but nothing was trained."""
    served = {"run_dir": tmp_path, "setup": make_setup({0: 4}), "store": "tcp://127.0.0.1:7077/model"}
    spec = type("Spec", (), served)
    with EventLog(tmp_path / "run.jsonl") as log:
        launcher = EndsWith(cast(Any, spec), log, None)
        launcher.totals = StoreTotals(versions=300)
        with pytest.raises(TrainingFailed, match="used up before"):
            main.launch(launcher)
    assert read_report(tmp_path / "report.json").outcome == "failed"
