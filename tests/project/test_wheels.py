"""Define what a release uploads: the wheel without the core, and the core compiled for another processor."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
from try_wheels import JOIN, STORE

from pyps import native
from pyps.remote.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = "qemu-aarch64-static"
# What Windows lacks is missing, too.
ELSEWHERE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name in ("fcntl", "resource", "termios"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
import pyps, pyps.cli.plan, pyps.cli.profile, pyps.solver, pyps.torch
import os
assert pyps.__file__.startswith(os.getcwd()), pyps.__file__
"""
# What makes this clone importable everywhere would find its core.
NO_CLONE = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"

Elsewhere = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without the core, built from a copy of what git would give."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("pure")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout
    for name in filter(None, found.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    build = [sys.executable, "-c", f"from setuptools.build_meta import build_wheel as b; b({str(out)!r})"]
    done = subprocess.run(
        build, cwd=source, env={**os.environ, "PYPS_NO_CORE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(pure: Path, tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """Runs Python where that wheel is installed."""
    home = tmp_path_factory.mktemp("installed").resolve()
    with zipfile.ZipFile(pure) as archive:
        archive.extractall(home)
    (home / "sitecustomize.py").write_text(NO_CLONE)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": f"{home}"}
        return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)

    return run


def test_the_pure_wheel_is_for_any_machine(pure: Path) -> None:
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as archive:
        assert not [name for name in archive.namelist() if ".so" in name or name.endswith(".a")]


def test_all_but_the_store_can_be_imported_without_the_core(elsewhere: Elsewhere) -> None:
    done = elsewhere("-c", ELSEWHERE)
    assert done.returncode == 0, done.stderr


def test_the_planner_gives_the_same_plan(elsewhere: Elsewhere) -> None:
    command = ["-m", "pyps", "plan", str(ROOT / "benchmarks" / "clusters" / "three-types.toml"), "--json"]
    here = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    there = elsewhere(*command)
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout


@pytest.mark.parametrize("command", ["run", "simulate", "serve", "shm"])
def test_a_command_that_needs_the_core_says_so_in_a_line(elsewhere: Elsewhere, command: str) -> None:
    done = elsewhere("-m", "pyps", command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pyps {command}: this installation has no C core")
    assert "expected Linux on x86-64 or aarch64" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_store_says_what_it_needs(elsewhere: Elsewhere) -> None:
    done = elsewhere("-c", STORE)
    assert done.stdout.startswith("this installation has no C core"), done.stderr


@pytest.mark.thorough
def test_a_worker_trains_at_a_server(elsewhere: Elsewhere, shm: Path) -> None:
    with Server("model", "tcp://127.0.0.1:*", insecure=True) as server:
        done = elsewhere("-c", JOIN, server.address)
        assert done.stdout == "12 steps\n", done.stderr


def cross_compiler() -> list[str]:
    """A C compiler for aarch64 that links without a shared library; [] if there is none."""
    if found := shutil.which("aarch64-linux-gnu-gcc"):
        return [found, "-static"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static"]
    return []


def kernels(folder: Path, compiler: list[str]) -> Path:
    """The test program of the kernels, which prints whose it has used."""
    sources = [programs.C / "kernels.c", *sorted((programs.CSRC / "kernels").glob("*.c"))]
    sources.append(programs.CSRC / "error.c")
    program = folder / "kernels"
    flags = [*programs.FLAGS, "-O2", *map(str, sources), "-o", str(program), "-lm"]
    subprocess.run([*compiler, *flags], check=True)
    return program


@pytest.mark.thorough
def test_the_wheels_compiler_finds_what_the_processor_has(tmp_path: Path) -> None:
    """Kernels that are scalar in the wheel alone is right, and slow."""
    if not importlib.util.find_spec("ziglang"):
        pytest.skip("needs zig (the extra `wheels` has it)")
    target = f"{platform.machine()}-linux-gnu.2.17"
    program = kernels(tmp_path, [sys.executable, "-m", "ziglang", "cc", "-target", target])
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{native.isa()}\n"), done.stdout + done.stderr


@pytest.mark.thorough
def test_the_neon_kernels_have_the_scalar_bits(tmp_path: Path) -> None:
    compiler = cross_compiler()
    if not compiler or not shutil.which(EMULATOR):
        pytest.skip(f"needs a C compiler for aarch64 (the extra `wheels` has one) and {EMULATOR}")
    program = kernels(tmp_path, compiler)
    done = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "neon\n"), done.stdout + done.stderr
