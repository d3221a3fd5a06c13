"""What drifts apart is found: a store that lacks a verb, or has it with other types.

Each change is made to a copy of the package. mypy and tests/store/test_backend.py must both fail there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("pyps.store", "pyps.remote", "pyps.shards")
PARITY = ROOT / "tests" / "store" / "test_backend.py"
OPTIONS = ["-q", "-x", "-c", os.devnull, "-p", "no:cacheprovider", PARITY.name]
DROPPED = "_dropped = "  # in place of what makes a method of the table


@dataclass(frozen=True)
class Change:
    """In a file of pyps, `before` becomes `after`; before: once in it."""

    file: str
    before: str
    after: str


LOCAL, AWAY, LINK = "native/local.py", "remote/away.py", "remote/link.py"
SHARDED, TABLE, SHARDS = "shards/sharded.py", "remote/verbs.py", "shards/verbs.py"
CHANGES = {
    "local: a verb renamed": Change(LOCAL, "def reap(self)", "def collect(self)"),
    "local: a type changed": Change(
        LOCAL, "def start(self, timeout: float)", "def start(self, timeout: str)"
    ),
    "local: a result changed": Change(LOCAL, "def status(self) -> Status:", "def status(self) -> Member:"),
    "local: a method dropped": Change(LOCAL, "def keep_residual(", "def _keep_residual("),
    "link: a verb renamed": Change(AWAY, "reap = call(verbs.REAP)", "collect = call(verbs.REAP)"),
    "link: another verb's types": Change(AWAY, "status = call(verbs.STATUS)", "status = call(verbs.MEMBERS)"),
    "link: a type changed": Change(LINK, "def snapshot(self, out: Flat,", "def snapshot(self, out: int,"),
    "link: a method dropped": Change(LINK, "def pull_encoded(", "def _pull_encoded("),
    "shards: a verb renamed": Change(SHARDED, "def begin_transfer(", "def start_transfer("),
    "shards: a type changed": Change(
        SHARDED,
        "def state(self, timeout: float) -> FlatState:",
        "def state(self, timeout: int) -> FlatState:",
    ),
    "shards: a method dropped": Change(SHARDED, "def pull(self, out", "def _pull(self, out"),
    "table: a verb of the link dropped": Change(TABLE, "REAP = verb(", DROPPED + "verb("),
    "table: a verb of shards dropped": Change(SHARDS, "DROP = verb(", DROPPED + "verb("),
}
SAMPLED = ("local: a verb renamed", "link: another verb's types", "shards: a method dropped")


NAMES = [  # of all changes; `make test` makes a few
    pytest.param(name, marks=() if name in SAMPLED else pytest.mark.thorough, id=name) for name in CHANGES
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that mypy has read once, so that it reads the changed modules alone."""
    folder = tmp_path_factory.mktemp("door")
    ignored = shutil.ignore_patterns("__pycache__", "lib")
    shutil.copytree(ROOT / "pyps", folder / "pyps", ignore=ignored)
    for part in ("solver", "profiler"):
        (folder / "pyps" / part).symlink_to(ROOT / part)
    if (cache := ROOT / ".mypy_cache").is_dir():
        shutil.copytree(cache, folder / "cache")
    assert mypy(folder) == "", "the package as it is"
    assert parity(folder), "the package as it is"
    return folder


def mypy(folder: Path) -> str:
    """What mypy finds in the rooms of the door; "" if nothing."""
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", "cache", "--no-error-summary"]
    rooms = [option for room in ROOMS for option in ("-p", room)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *rooms], cwd=folder, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def parity(folder: Path) -> bool:
    """Whether the copy passes the test that is made from the list of verbs."""
    shutil.copy(PARITY, folder)
    run = f"import pyps, pytest, sys; print(pyps.__file__); sys.exit(pytest.main({OPTIONS}))"
    done = subprocess.run(
        [sys.executable, "-c", run],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(str(folder)), done.stdout + done.stderr
    return done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_store_that_differs_is_found(copy: Path, name: str) -> None:
    change = CHANGES[name]
    file = copy / "pyps" / change.file
    text = file.read_text(encoding="utf-8")
    assert text.count(change.before) == 1, f"{change.file}: {change.before!r} once"
    file.write_text(text.replace(change.before, change.after), encoding="utf-8")
    try:
        assert "error" in mypy(copy), "mypy sees it"
        assert not parity(copy), "the test sees it"
    finally:
        file.write_text(text, encoding="utf-8")
