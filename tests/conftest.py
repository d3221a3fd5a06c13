"""Fixtures: an empty folder for segments, workers, ranks, the built wheel, the reference.

Options: --cpu prints what the tests cost; with --real-torch no process leaves a part of torch out.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sampled
from hypothesis import settings
from leftovers import nothing_left
from programs import once

if TYPE_CHECKING:
    from ranks import Ranks

    from pyps.worker.step.loop import Worker

ROOT = Path(__file__).resolve().parent.parent
QUICK_START = str(ROOT / "tests" / "helpers" / "quick_start")
# Hundreds of processes import torch: compiled anew, each import takes twice the CPU seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(threads, "1")  # for small matrices, threads only wait

SAMPLED_EXAMPLES = 15  # of 100, where a test says no number
settings.register_profile("seeded", derandomize=True)  # --hypothesis-profile=default draws new examples
settings.load_profile("seeded")
settings.register_profile("sampled", settings.get_profile("seeded"), max_examples=SAMPLED_EXAMPLES)

THOROUGH_SECONDS = 600  # on an idle machine none takes 100
TIMED_RERUNS = 3  # what is right but for a stall passes one of four; what is wrong fails all
# Their tests start processes or sanitizers.
SLOW_FOLDERS = ("benchmarks", "c", "matrix", "remote", "run", "sharding", "torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pyps")
    group.addoption("--cpu", action="store_true", help="print CPU seconds by room, and the dearest tests")
    group.addoption("--real-torch", action="store_true", help="processes of tests import all of torch")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--real-torch") and QUICK_START not in os.environ.get("PYTHONPATH", ""):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (QUICK_START, os.environ.get("PYTHONPATH"))))
    sampled.thorough = config.option.markexpr != "not thorough"
    if not sampled.thorough:
        settings.load_profile("sampled")
    if config.getoption("--cpu"):
        from cpu_time import CpuTime

        config.pluginmanager.register(CpuTime(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of these folders are slow; elsewhere a test or its module says so. Timed ones get reruns,
    thorough ones the time that they may need where other programs have most of the machine.
    """
    for item in items:
        assert " at 0x" not in item.nodeid, f"{item.nodeid}: lanes need the same name of a test"
        if item.path.parent.name in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=TIMED_RERUNS))
        if item.get_closest_marker("thorough") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(THOROUGH_SECONDS))


def pytest_collection_finish() -> None:
    """Keep what is imported by now: no collection of garbage need look at it again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _nothing_left() -> Iterator[None]:
    """Fails the session that leaves a process, a segment or a temporary file behind."""
    with nothing_left():
        yield


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new PYPS_SHM_DIR (on tmpfs where there is one); fails the test that leaves a segment behind."""
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix="test-pyps-", dir=parent))
    monkeypatch.setenv("PYPS_SHM_DIR", str(folder))
    left: list[str] = []
    try:
        yield folder
        left = sorted(path.name for path in folder.iterdir())
    finally:
        shutil.rmtree(folder)
    assert not left, f"segments left behind: {left}"


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that this test starts compile nothing, and import less of torch."""
    monkeypatch.setenv("QUICK_START", "1")


@pytest.fixture
def worker(shm: Path) -> Iterator[Worker]:
    """The only worker of a run of 3 epochs in batches of 10."""
    from worker_tools import SAMPLES  # here: most tests need no torch

    from pyps.worker.step.loop import join

    with join("run", 0, batches=[10], samples=3 * SAMPLES, seed=5) as alone:
        yield alone


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """The file of a plan for two workers."""
    from run_tools import make_plan  # here: many tests need no plan

    from pyps.formats import write_json

    write_json(tmp_path / "plan.json", make_plan())
    return tmp_path / "plan.json"


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder of this run of the tests, the same in all its lanes."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def programs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs.build() keeps the programs for the whole run, one of each for a sanitizer."""
    return once(shared_folder(tmp_path_factory), "programs-shared", lambda folder: None)


@pytest.fixture(scope="session")
def _started() -> Iterator[list[Ranks]]:
    pools: list[Ranks] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def ranks(_started: list[Ranks]) -> Ranks:
    """Four gloo ranks, the same for all tests until one fails and leaves them in an unknown state."""
    if not _started or _started[-1].closed:
        from ranks import Ranks  # here: most tests need no torch

        _started.append(Ranks(4))
    return _started[-1]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what git would give: the source folder gets no build products."""
    folder = once(shared_folder(tmp_path_factory), "wheel-built", build_wheel)
    (built,) = folder.glob("*.whl")
    return built


def build_wheel(out: Path) -> None:
    """Build it into a folder, from a copy in it."""
    source = out / "source"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    compiler = out / "cc"  # the flags of the build, but quicker: what is tested here is how others link it
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    quick = {**os.environ, "CC": str(compiler)}
    build = [sys.executable, "-c", f"from setuptools.build_meta import build_wheel as b; b({str(out)!r})"]
    done = subprocess.run(build, cwd=source, env=quick, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """docs/reference, as `make reference` writes it."""

    def make(_: Path) -> None:
        command = [sys.executable, ROOT / "docs" / "make_reference.py"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    once(shared_folder(tmp_path_factory), "reference-made", make)
    return ROOT / "docs" / "reference"
