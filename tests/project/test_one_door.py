"""Define what drifts apart is found: a store that lacks a verb, or has it with other types.

Each change is made to a copy of the package. mypy and tests/store/test_backend.py must both fail there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("pyps.store", "pyps.remote", "pyps.shards")
PARITY = ROOT / "tests" / "store" / "test_backend.py"
OPTIONS = ["-q", "-rf", "--tb=no", "-c", os.devnull, "-p", "no:cacheprovider", PARITY.name]
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
# What `make test` changes, all at once: by name, the class that mypy finds fault with and the verb.
SAMPLED = {
    "local: a type changed": ("LocalBackend", "start"),
    "link: another verb's types": ("LinkBackend", "status"),
    "shards: a method dropped": ("ShardedBackend", "pull"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with what mypy has read of it, so that it reads the changed modules alone."""
    folder = tmp_path_factory.mktemp("door")
    ignored = shutil.ignore_patterns("__pycache__", "lib")
    shutil.copytree(ROOT / "pyps", folder / "pyps", ignore=ignored)
    shutil.copy(ROOT / "pyps_commands.py", folder)
    if (cache := ROOT / ".mypy_cache").is_dir():
        shutil.copytree(cache, folder / "cache")
    return folder


def mypy(folder: Path) -> str:
    """Return what mypy finds in the rooms of the door; "" if nothing."""
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", "cache", "--no-error-summary"]
    rooms = [option for room in ROOMS for option in ("-p", room)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *rooms], cwd=folder, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def parity(folder: Path) -> str:
    """Return what the test that is made from the list of verbs finds in the copy; "" if nothing."""
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
    return "" if done.returncode == 0 else done.stdout


@contextmanager
def changed(copy: Path, names: Iterable[str]) -> Iterator[None]:
    """The copy with these changes."""
    before: dict[Path, str] = {}
    for change in map(CHANGES.__getitem__, names):
        file = copy / "pyps" / change.file
        before[file] = text = file.read_text(encoding="utf-8")
        assert text.count(change.before) == 1, f"{change.file}: {change.before!r} once"
        file.write_text(text.replace(change.before, change.after), encoding="utf-8")
    try:
        yield
    finally:
        for file, text in before.items():
            file.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_stores_that_differ_are_found(copy: Path) -> None:
    with changed(copy, SAMPLED):
        found, failed = mypy(copy), parity(copy)
    for kind, verb in SAMPLED.values():
        assert f'"{kind}"' in found, "mypy sees it"
        assert f"[{verb}-{kind}]" in failed, "the test sees it"


@pytest.mark.slow
@pytest.mark.thorough
def test_stores_as_they_are_do_not_differ(copy: Path) -> None:
    """`make test` looks at them itself: in make lint, and in tests/store/test_backend.py."""
    assert (mypy(copy), parity(copy)) == ("", "")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", CHANGES)
def test_a_store_that_differs_is_found(copy: Path, name: str) -> None:
    with changed(copy, [name]):
        assert "error" in mypy(copy), "mypy sees it"
        assert parity(copy), "the test sees it"
