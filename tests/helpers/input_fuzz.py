"""Hostile inputs for the commands that read files: each ends with 0, 2 or 3 and one message, and harms none.

    python tests/helpers/input_fuzz.py [--count 5000] [--real 200] [--seed 0]

Seeded. `--count` cases go through the entry point in this process, `--real` ones through the real command.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyps import cli

LIMIT_SECONDS = 10.0
CODES = (0, 2, 3)
NUMBERS = [
    "0",
    "-1",
    "1e308",
    "1e-320",
    "nan",
    "inf",
    "-inf",
    "2147483648",
    "1e400",
    "0.5",
    '""',
    "[]",
    "{}",
    "true",
]
TEXTS = [
    "[/x]",
    "[bold]",
    "a\\u0000b",
    "",
    "é☃",
    "x" * 300,
    "../p.json",
    ".",
    "-",
    "\\u001b[31m",
    "$(id)",
    "a\\nb",
]
KEYS = ["price", "quantum", "batch", "x" * 5000, "global_batch", "", "name", "[/x]"]

PROFILE = {
    "schema": "pyps.profile/1",
    "device": {"name": "gpu"},
    "model": {"name": "m", "parameters": 1000, "tokens_per_sample": 16},
    "points": [{"batch": b, "seconds": 0.01 + 0.001 * b} for b in (1, 2, 4, 8, 16)],
    "max_batch": 32,
}
CLUSTER = """
[job]
global_batch = 24
[[worker]]
name = "a"
count = 2
profile = "p.json"
price_per_hour = 1.0
[[worker]]
name = "b"
profile = "q.json"
min_batch = 2
price_per_hour = 0.5
"""
NODES = """
[job]
global_batch = 2048
unit = "tokens"
target = 1e6
[[worker]]
name = "a"
count = 2
profile = "p.json"
devices = 2
parallel = "data"
bandwidth = 1e9
inside_bandwidth = 1e10
price_per_hour = 1.0
[[worker]]
name = "b"
profile = "q.json"
devices = 2
parallel = "data"
bandwidth = 1e9
inside_bandwidth = 1e10
inside_latency = 1e-6
max_accumulation = 3
price_per_hour = 0.5
[sync]
kind = "ring"
overlap = 0.6
tail = 0.1
[sharding]
stage = 3
optimizer_bytes = 8
whole = 0.2
"""
CSV = "batch,seconds\n1,0.01\n2,0.012\n8,0.02\n"
WIDE_CSV = (
    "batch,seconds,peak_bytes,link_bytes,link_seconds\n1,0.01,99,,\n2,0.012,120,5,0.1\n8,0.02,200,9,0.2\n"
)
COMMANDS: list[tuple[str, list[str]]] = [
    ("plan", ["c.toml", "-o", "plan.json"]),
    ("plan", ["c.toml", "--explain", "--json"]),
    ("plan", ["c.toml", "-o", "c.toml"]),
    ("plan", ["c.toml", "--quantile", "0.9"]),
    ("plan", ["c.toml", "--global-batch", "7"]),
    ("plan", ["what-if", "c.toml", "--add", "a*2"]),
    ("plan", ["pareto", "c.toml"]),
    ("plan", ["c.toml", "--timeline", "t.xyz"]),
    ("plan", ["c.toml", "--target", "1e9", "--json"]),
    ("plan", ["c.toml", "--target", "nan"]),
    ("plan", ["c.toml", "--json", "--nosuch"]),
    ("profile", ["show", "p.json"]),
    ("profile", ["show", "p.json", "--plot", "p.json"]),
    ("profile", ["compare", "p.json", "q.json"]),
    ("profile", ["merge", "p.json", "q.json", "-o", "out.json"]),
    ("profile", ["import", "m.csv", "-o", "m.csv", "--no-plot"]),
    ("profile", ["import", "m.csv", "-o", "out.json", "--no-plot"]),
    ("profile", ["import", "m.csv", "--name", "TEXT", "-o", "out.json", "--no-plot"]),
    ("profile", ["digits_mlp", "--memory-budget", "nan"]),
    ("simulate", ["c.toml", "--policies", "bsp", "--iterations", "2"]),
    ("simulate", ["c.toml", "--policies", "bsp", "--iterations", "2", "--trace", "c.toml"]),
    ("simulate", ["c.toml", "--policies", "bsp", "--iterations", "2", "--json"]),
]


@dataclass(frozen=True)
class Outcome:
    """Hold what a command came to. seconds: of the processor, which a loaded machine does not make longer."""

    code: int
    out: str
    err: str
    seconds: float


def mutated(text: str, luck: random.Random) -> str:
    """The text of a file with a few things wrong."""
    for _ in range(luck.choice([0, 1, 1, 2])):
        kind = luck.randrange(8)
        lines = text.split("\n")
        at = luck.randrange(len(lines))
        if kind == 0:
            text = text[: luck.randrange(len(text) + 1)]
        elif kind == 1:
            numbers = [k for k, sign in enumerate(text) if sign.isdigit()] or [0]
            where = luck.choice(numbers)
            text = text[:where] + luck.choice(NUMBERS) + text[where + 1 :]
        elif kind == 2:
            quotes = [k for k, sign in enumerate(text) if sign == '"'] or [0]
            where = luck.choice(quotes)
            text = text[: where + 1] + luck.choice(TEXTS) + text[where + 1 :]
        elif kind == 3:
            lines.insert(at, f"{luck.choice(KEYS)} = {luck.choice(NUMBERS)}")
            text = "\n".join(lines)
        elif kind == 4:
            lines.insert(at, ".".join(["a"] * luck.choice([3, 2000])) + " = 1")
            text = "\n".join(lines)
        elif kind == 5:
            lines.insert(at, lines[luck.randrange(len(lines))])
            text = "\n".join(lines)
        elif kind == 6:
            where = luck.randrange(len(text) + 1)
            text = text[:where] + chr(luck.choice([0, 7, 127, 255, 8364])) + text[where:]
        else:
            text = "[" * luck.choice([1, 3000]) + text
        if not text:
            break
    return text


def prepared(folder: Path, luck: random.Random) -> tuple[str, list[str], dict[Path, bytes]]:
    """A command, its arguments and the inputs that it finds in the folder."""
    texts = {
        "c.toml": luck.choice([CLUSTER, NODES]),
        "p.json": json.dumps(PROFILE),
        "q.json": json.dumps(PROFILE, indent=1),
        "m.csv": luck.choice([CSV, WIDE_CSV]),
    }
    command, arguments = luck.choice(COMMANDS)
    touched = [name for name in texts if any(name in argument for argument in arguments)] or ["p.json"]
    for name in touched if luck.random() < 0.3 else [luck.choice([*touched, "p.json"])]:
        texts[name] = mutated(texts[name], luck)
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    odd = luck.random()
    if odd < 0.02:
        (folder / "q.json").unlink()
        os.mkfifo(folder / "q.json")
    elif odd < 0.04:
        (folder / "p.json").unlink()
        (folder / "p.json").mkdir()
    given = [luck.choice(TEXTS).replace("\\u0000", "") if part == "TEXT" else part for part in arguments]
    files = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return command, given, files


def in_process(command: str, arguments: list[str], folder: Path) -> Outcome:
    """The command through its entry point."""
    out, err, code, before = io.StringIO(), io.StringIO(), 0, os.getcwd()

    def late(_: int, __: types.FrameType | None) -> None:
        raise TimeoutError(f"over {LIMIT_SECONDS:g} s")

    usual = signal.signal(signal.SIGALRM, late)
    began = time.process_time()
    os.chdir(folder)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3 * LIMIT_SECONDS)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.call_command(command, f"pyps {command}", arguments)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
        os.chdir(before)
    return Outcome(code, out.getvalue(), err.getvalue(), time.process_time() - began)


def really(command: str, arguments: list[str], folder: Path) -> Outcome:
    """The command as the user starts it, on an ASCII terminal's locale."""
    began = children_seconds()
    program = str(Path(sys.executable).parent / "pyps")
    done = subprocess.run(
        [program, command, *arguments],
        cwd=folder,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
        timeout=6 * LIMIT_SECONDS,
        check=False,
    )
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return Outcome(done.returncode, out, err, children_seconds() - began)


def children_seconds() -> float:
    used = os.times()
    return used.children_user + used.children_system


def faults(outcome: Outcome, arguments: list[str], files: dict[Path, bytes], folder: Path) -> Iterator[str]:
    """Yield what a command must not do."""
    if outcome.code not in CODES:
        yield f"exit code {outcome.code}"
    if "Traceback" in outcome.out + outcome.err:
        yield "a traceback"
    messages = [line for line in outcome.err.splitlines() if line.startswith("pyps ")]
    if outcome.code and len(messages) != 1 and "Usage:" not in outcome.err:
        yield f"{len(messages)} messages"
    if "--json" in arguments:
        try:
            json.loads(outcome.out)
        except ValueError:
            yield "no JSON on stdout"
    for path, data in files.items():
        if not path.is_file() or path.read_bytes() != data:
            yield f"{path.name} was changed"
    for path in folder.iterdir():
        if path.name.endswith(".tmp"):
            yield f"{path.name} was left"
        if path not in files and path.suffix == ".json" and path.is_file():
            try:
                json.loads(path.read_bytes())
            except ValueError:
                yield f"{path.name} is half-written"


def fuzz(seeds: range, *, real: bool = False) -> list[str]:
    """The faults of the cases with these seeds, each with its command."""
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            folder, luck = Path(name), random.Random(seed)
            command, arguments, files = prepared(folder, luck)
            what = f"seed {seed}: {command} {' '.join(arguments)!r}"
            try:
                outcome = (really if real else in_process)(command, arguments, folder)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                found.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
                continue
            found += [
                f"{what}: {fault}: {outcome.err[-200:]!r}"
                for fault in faults(outcome, arguments, files, folder)
            ]
            if outcome.seconds > LIMIT_SECONDS:
                found.append(f"{what}: {outcome.seconds:.1f} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--real", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fuzz(range(20))  # the first cases import, and compile, what commands need
    found = fuzz(range(options.seed, options.seed + options.count))
    found += fuzz(range(options.seed, options.seed + options.real), real=True)
    print("\n".join(found) or f"{options.count} inputs and {options.real} by the real command: no fault")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
