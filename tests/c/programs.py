"""The C test programs: built from the whole core with failpoints, plain or under a sanitizer, and run.

    python tests/c/programs.py address|thread [--faults 300]

builds every program under that sanitizer and runs it: AddressSanitizer with UndefinedBehaviorSanitizer, or
ThreadSanitizer. Any report ends the program that caused it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

C = Path(__file__).resolve().parent
CSRC = C.parents[1] / "csrc"
FLAGS = ("-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-ffp-contract=off")
UNDEFINED = "undefined,float-cast-overflow,float-divide-by-zero"
SANITIZERS: Mapping[str, tuple[str, ...]] = {
    "none": ("-O2",),
    "address": ("-O1", f"-fsanitize=address,{UNDEFINED}", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-fsanitize=thread"),
}
# A worker that is killed frees nothing, and one that exits under torture has its memory reachable.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=99:second_deadlock_stack=1",
}
PROTOCOL = ("late-reader", "late-reader-meets-saver", "observer-steps")


def compile_core(
    folder: Path, flags: Iterable[str], compiler: Iterable[str] = ("cc",), csrc: Path = CSRC
) -> list[Path]:
    """The core's objects, compiled with these flags into `folder` unless they are there."""
    if not folder.exists():
        folder.mkdir(parents=True)
        sources = [str(path) for path in sorted(csrc.glob("*.c"))]
        subprocess.run([*compiler, *flags, "-c", *sources], check=True, cwd=folder)
    return sorted(folder.glob("*.o"))


def build(
    folder: Path,
    name: str,
    sanitizer: str = "none",
    *,
    compiler: Iterable[str] = ("cc",),
    csrc: Path = CSRC,
) -> Path:
    """Compile tests/c/NAME.c with the core, or another copy of it, into `folder`; the program's path."""
    program = folder / f"{name}-{sanitizer}"
    flags = [*FLAGS, *SANITIZERS[sanitizer], "-DPYPS_FAILPOINTS"]
    inputs = compile_core(folder / f"core-{sanitizer}", flags, compiler, csrc)
    if name == "kernels":  # the arithmetic alone: its test defines no failpoint
        inputs = [o for o in inputs if o.stem.startswith("kernels") or o.stem in ("codec", "error")]
    command = [*compiler, *flags, str(C / f"{name}.c"), *map(str, inputs), "-o", str(program)]
    subprocess.run([*command, "-lm", "-lpthread"], check=True)
    return program


def mutated(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the core in `folder` with one text in one file replaced."""
    copy = folder / "csrc"
    shutil.copytree(CSRC, copy)
    text = (copy / file).read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise ValueError(f"{file}: found {text.count(old)} times; expected once: {old!r}")
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    return copy


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a segment folder of its own, which must be empty afterwards."""
    command = [str(program), *arguments]
    if program.name.endswith("-thread") and shutil.which("setarch"):
        # its shadow memory has fixed places that an address randomized over 32 bits may hit
        command = ["setarch", platform.machine(), "-R", *command]
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=parent) as shm:
        every = {**os.environ, **ENVIRONMENT, "PYPS_SHM_DIR": shm, **environment}
        done = subprocess.run(command, env=every, capture_output=True, text=True, check=False)
        left = os.listdir(shm)
    if left and done.returncode == 0:
        return subprocess.CompletedProcess(command, 1, done.stdout, f"segments left: {left}")
    return done


def suite(sanitizer: str, faults: int) -> list[tuple[str, ...]]:
    """Each program with its arguments. ThreadSanitizer sees threads alone, so no torture of processes."""
    commands = [("protocol", name) for name in PROTOCOL]
    if sanitizer == "thread":
        rounds = str(10 * faults)
        return [*commands, ("threads", "asp", rounds), ("threads", "bsp", rounds)]
    torture = [
        ("torture", policy, optimizer, str(faults), "1")
        for policy, optimizer in (("asp", "adamw"), ("bsp", "momentum"))
    ]
    return [("kernels",), *commands, *torture]


def main() -> int:
    """Run the suite; exit code 1 at the first failure, with what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizer", choices=sorted(SANITIZERS))
    parser.add_argument("--faults", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built: dict[str, Path] = {}
        for name, *arguments in suite(options.sanitizer, options.faults):
            if name not in built:
                built[name] = build(Path(folder), name, options.sanitizer)
            done = run(built[name], *arguments)
            print(name, *arguments, "ok" if done.returncode == 0 else done.stdout + done.stderr, flush=True)
            if done.returncode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
