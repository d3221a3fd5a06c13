"""The C test programs: built from the whole core with failpoints, plain or under a sanitizer, and run.

    python tests/c/programs.py address|thread [--faults 300] [--forks 3000] [--only forks]

builds every program under that sanitizer and runs it: AddressSanitizer with UndefinedBehaviorSanitizer, or
ThreadSanitizer. Any report ends the program that caused it. What reads untrusted bytes, a
segment or encoded data, is also run on mutations of a corpus; tests/c/libfuzzer.py looks for new ones.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

C = Path(__file__).resolve().parent
CSRC = C.parents[1] / "csrc"
BUILT = C.parents[1] / "build" / "tests"
FLAGS = (f"-I{CSRC}", "-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-ffp-contract=off")
FLAGS += ("-DVIEWS_ALLOCATED=2u",)  # so that most views get their memory when they are first needed
FLAGS += ("-DLEAST_CHUNKS=2u",)  # so that a crew of threads shares small stores too
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
FORKS_A_PIECE = 500
FUZZED = ("attach", "decode", "journal")
PROTOCOL = (
    "late-reader",
    "late-reader-meets-saver",
    "stopped-reader",
    "observer-steps",
    "late-decision",
    "late-remover",
    "stopped-pusher",
    "leaver",
    "late-closer",
    "fork-while-opening",
    "anonymous-reader",
)
DEATHS = (
    "killed-joiners",
    "stopped-joiners",
    "killed-helpers",
    "killed-reapers",
    "killed-reader",
    "stopped-readers",
)
MISUSE = (
    "null-arguments",
    "double-close",
    "other-abi",
    "other-files",
    "constants",
    "sizes",
    "truncated",
    "other-clock",
    "changed-tensor",
    "averaged-alone",
)
OUTCOMES = (
    "invalid",
    "not-finite",
    "false-look",
    "rejected",
    "fenced",
    "before-turn",
    "staged",
    "left-staged",
    "interrupted",
    "no-space",
    "no-space-for-a-view",
    "full",
    "full-round",
    "full-before",
    "damaged",
    "no-descriptor",
)
WAITS = ("passed-time", "odd-timeouts", "paused-job", "killed-waiter", "interrupted-wait")
EDGES = (
    "full-house",
    "huge-round",
    "false-master",
    "many-deaths",
    "out-of-descriptors",
    "out-of-locks",
    "taken-descriptor",
    "taken-journal",
    "fork-while-a-crew-ends",
    "first-thread-ends",
    "staging-in-round",
    "retry-in-round",
    "step-after-time-out",
    "parked-push",
    "check-in-round",
    "unknown-policy",
    "damaged-ranks",
    "full-round",
    "changing-round",
    "changing-view",
    "own-view",
    "refused-view",
    "schedule",
)


class Change(NamedTuple):
    """One text in one file of the core that a mutant has otherwise."""

    file: str
    old: str
    new: str


def once(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """`folder`/`name`, filled by `make` unless it is there. Another lane of the tests waits meanwhile, if its
    name is the same before the last hyphen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / name
    with (folder / f"{name.rpartition('-')[0]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            part = Path(tempfile.mkdtemp(dir=folder))  # what is interrupted is not there
            make(part)
            part.rename(place)
    return place


def compile_core(folder: Path, flags: Iterable[str], compiler: Iterable[str]) -> list[Path]:
    """The core's objects, compiled with these flags into `folder` unless they are there."""
    sources = [str(path) for path in sorted(CSRC.rglob("*.c"))]
    command = [*compiler, *flags, "-Wmissing-prototypes", "-c", *sources]
    once(folder.parent, folder.name, lambda part: subprocess.run(command, check=True, cwd=part))
    return sorted(folder.glob("*.o"))


def kept_core(sanitizer: str, flags: Iterable[str], compiler: Iterable[str]) -> list[Path]:
    """The core's objects, kept from one run of the tests to the next, until something of them changes."""
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True).stdout
    digest = hashlib.blake2b(version + repr((*compiler, *flags)).encode(), digest_size=8)
    for path in sorted(CSRC.rglob("*.[ch]")):
        digest.update(path.read_bytes())
    folder = BUILT / f"core-{sanitizer}-{digest.hexdigest()}"
    for other in {*BUILT.glob(f"core-{sanitizer}-*")} - {folder}:
        shutil.rmtree(other, ignore_errors=True)
    return compile_core(folder, flags, compiler)


def compile_changed(folder: Path, flags: Iterable[str], compiler: Iterable[str], change: Change) -> Path:
    """The object of one changed file. Raises ValueError unless the text is there exactly once."""
    text = (CSRC / change.file).read_text(encoding="utf-8")
    if text.count(change.old) != 1:
        raise ValueError(
            f"{change.file}: found {text.count(change.old)} times; expected once: {change.old!r}"
        )
    source = folder / Path(change.file).name
    source.write_text(text.replace(change.old, change.new), encoding="utf-8")
    subprocess.run([*compiler, *flags, "-c", str(source)], check=True, cwd=folder)
    return source.with_suffix(".o")


def build(
    folder: Path,
    name: str,
    sanitizer: str = "none",
    *,
    compiler: Iterable[str] = ("cc",),
    change: Change | None = None,
) -> Path:
    """Compile tests/c/NAME.c with the core into `folder`, unless it is there, or with a mutant; its path."""
    program = f"{name}-{sanitizer}"
    if change:
        return _build(Path(tempfile.mkdtemp(dir=folder)) / program, name, sanitizer, compiler, change)
    built = once(folder, f"{program}-built", lambda to: _build(to / program, name, sanitizer, compiler))
    return built / program


def _build(
    program: Path, name: str, sanitizer: str, compiler: Iterable[str], change: Change | None = None
) -> Path:
    flags = [*FLAGS, *SANITIZERS[sanitizer], "-DPYPS_FAILPOINTS"]
    inputs = kept_core(sanitizer, flags, compiler)
    if name == "kernels":  # the arithmetic alone: its test defines no failpoint
        inputs = [o for o in inputs if o.stem.startswith("kernels") or o.stem in ("codec", "error")]
    if change:
        changed = compile_changed(program.parent, flags, compiler, change)
        inputs = [changed if path.name == changed.name else path for path in inputs]
    own = [C / f"{name}.c", *([C / "fuzz_main.c"] if name.startswith("fuzz_") else [])]
    command = [*compiler, *flags, *map(str, [*own, *inputs]), "-o", str(program)]
    subprocess.run([*command, "-lm", "-lpthread"], check=True)
    return program


def corpus(of: str) -> Path:
    """Inputs that reach as much of the code as any that were found: hexadecimal, one a line."""
    return C / "corpus" / f"{of}.hex"


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


@cache
def usable(sanitizer: str) -> bool:
    """Return whether the compiler has this sanitizer's library, and the machine lets it run."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "empty.c", Path(folder) / f"empty-{sanitizer}"
        source.write_text("int main(void) { return 0; }\n", encoding="utf-8")
        command = ["cc", *SANITIZERS[sanitizer], str(source), "-o", str(program)]
        built = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return built and run(program).returncode == 0


def suite(sanitizer: str, faults: int, forks: int) -> list[tuple[str, ...]]:
    """Each program with its arguments. Forks come in pieces: what AddressSanitizer keeps of memory that was
    freed grows with them, and each fork copies its pages' table. ThreadSanitizer sees threads alone, so no
    torture of processes.
    """
    commands = [("protocol", name) for name in PROTOCOL]
    if sanitizer == "thread":
        rounds = str(10 * faults)
        return [*commands, ("threads", "asp", rounds, "3"), ("threads", "bsp", rounds, "1")]
    torture = [
        ("torture", policy, optimizer, str(faults), "1", chunks, buffers, clip_norm, "1", "0", threads, "0")
        for policy, optimizer, chunks, buffers, clip_norm, threads in (
            ("asp", "adamw", "4", "2", "0", "1"),
            ("bsp", "momentum", "1", "1", "100", "1"),
            ("bsp", "momentum", "4", "1", "100", "3"),
        )
    ]
    commands += [("deaths", name) for name in DEATHS]
    commands += [("misuse", name) for name in MISUSE]
    commands += [("outcomes", name) for name in OUTCOMES]
    commands += [("waits", name) for name in WAITS]
    commands += [("edges", name) for name in EDGES]
    fuzz = [(f"fuzz_{of}", str(corpus(of)), "1", str(100 * faults)) for of in FUZZED]
    calls = [("calls", str(seed), "2000", "3") for seed in range(1, faults // 30)]
    pieces = [("forks", str(min(FORKS_A_PIECE, forks - done))) for done in range(0, forks, FORKS_A_PIECE)]
    return [("kernels",), *commands, *pieces, *fuzz, *calls, *torture]


def main() -> int:
    """Run the suite; exit code 1 at the first failure, with what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizer", choices=sorted(SANITIZERS))
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--forks", type=int, default=3000, help="of processes with crews")
    parser.add_argument("--only", metavar="PROGRAM", help="of the programs this one")
    options = parser.parse_args()
    commands = suite(options.sanitizer, options.faults, options.forks)
    with tempfile.TemporaryDirectory() as folder:
        built: dict[str, Path] = {}
        for name, *arguments in (one for one in commands if options.only in (None, one[0])):
            if name not in built:
                built[name] = build(Path(folder), name, options.sanitizer)
            done = run(built[name], *arguments)
            print(name, *arguments, "ok" if done.returncode == 0 else done.stdout + done.stderr, flush=True)
            if done.returncode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
