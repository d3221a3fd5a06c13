"""Define whether tests leave something behind: living processes, segments, temporary files."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from pathlib import Path

import psutil

MARK = "PYPS_TEST_LANE"  # in the environment of each process that the tests start
SHARED = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # end when this process ends
TMPFS = "/dev/shm"
TORCHS = (
    "torchelastic_",
    "torchinductor_",
)  # its own folders for logs and compiled code, which it never removes
GRACE_SECONDS = 10.0  # a process that was killed or let go may take a moment to end


@contextmanager
def nothing_left() -> Iterator[None]:
    """AssertionError at the end for what is left of all that was started or made meanwhile."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    usual = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)  # pytest keeps the folders of three runs
    cache = f"{usual}/torchinductor_{getpass.getuser()}"  # torch's own choice
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    get_temp_dir()  # multiprocessing's own, which it removes later than this
    files = Path(tempfile.mkdtemp(prefix="pyps-tests-"))
    segments = Path(tempfile.mkdtemp(prefix="test-pyps-", dir=TMPFS if os.path.isdir(TMPFS) else None))
    before = tempfile.tempdir, os.environ.get("TMPDIR", usual)
    tempfile.tempdir = os.environ["TMPDIR"] = str(files)
    os.environ["PYPS_SHM_DIR"] = str(segments)
    try:
        yield
        _, alive = psutil.wait_procs(started(mark), GRACE_SECONDS)
        made = [path.name for path in files.iterdir() if not _is_torchs(path)]
        left = [*map(describe, alive), *os.listdir(segments), *made]
    finally:
        tempfile.tempdir, os.environ["TMPDIR"] = before
        shutil.rmtree(files, ignore_errors=True)
        shutil.rmtree(segments, ignore_errors=True)
    assert not left, "left behind by the tests of this lane: " + ", ".join(sorted(left))


def _is_torchs(path: Path) -> bool:
    """Return whether torch made this, which it removes as its process ends, or never."""
    of_2_4 = path / "_remote_module_non_scriptable.py"
    return path.name.startswith(TORCHS) or of_2_4.exists()


def started(mark: str) -> list[psutil.Process]:
    """The living processes that have this mark or descend from this process."""
    found = psutil.Process().children(recursive=True)
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in dict.fromkeys(found) if not any(n in describe(process) for n in SHARED)]


def describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"process {process.pid}"
