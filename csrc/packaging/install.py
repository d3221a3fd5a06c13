"""Installs what an extra of pyproject.toml needs into this Python's environment, and shows how far it is.

    .venv/bin/python csrc/packaging/install.py demo

The package itself is not installed: its build needs what is. Versions are those of constraints.txt.
Modules are compiled when they are first imported: compiling all of them would take half of the time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = ["-m", "pip", "install", "--no-compile", "--progress-bar", "off", "-c", str(ROOT / "constraints.txt")]
LOOK_SECONDS = 1.0
SAY_SECONDS = 10.0
MEGABYTE = 1e6
LAST_LINES = 30  # of pip's, shown if it fails
NAMED = re.compile(
    r"(Collecting|Processing|Downloading|Using cached) (?:\S*/)?([A-Za-z0-9_.]+?)(?:[-=<>~!; ].*?)?(\(.*\))?$"
)
DOES = {"Downloading": "downloads", "Using cached": "has", "Processing": "reads", "Collecting": "looks for"}


def main() -> int:
    """pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extra", help="a name of [project.optional-dependencies]")
    parser.add_argument("--list", action="store_true", help="print the requirements and install nothing")
    given = parser.parse_args()
    extra = given.extra
    if given.list:
        print(*requirements(extra), sep="\n")
        return 0
    began = time.monotonic()
    command = [sys.executable, *PIP, *requirements(extra)]
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    progress = Progress(began)
    said: list[str] = []
    reader = threading.Thread(target=read, args=(pip, said, progress))
    reader.start()
    while reader.is_alive():
        reader.join(LOOK_SECONDS)
        progress.show()
    if pip.wait():
        print("\n".join(said[-LAST_LINES:]), file=sys.stderr)
        return pip.returncode
    progress.end()
    return 0


def requirements(extra: str) -> list[str]:
    """Return what the build, the package and its extra need. Exits, naming the extras, where it is none of
    them.
    """
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = whole["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    if extra not in extras:
        sys.exit(f"install: found {extra!r}; expected one of {', '.join(extras)}")
    own = re.compile(rf"{project['name']}\[(.*)\]")  # an extra that has others

    def packages(name: str) -> Iterator[str]:
        for requirement in extras[name]:
            if found := own.fullmatch(requirement):
                for other in found[1].split(","):
                    yield from packages(other)
            else:
                yield requirement

    return [*whole["build-system"]["requires"], *project["dependencies"], *packages(extra)]


def read(pip: subprocess.Popen[str], said: list[str], progress: Progress) -> None:
    """Follow what pip prints to its end."""
    assert pip.stdout is not None
    for line in pip.stdout:
        said.append(line.rstrip())
        progress.read(said[-1].strip())


class Progress:
    """A line on what pip does and since when: on a terminal it changes, elsewhere another one follows."""

    def __init__(self, began: float, every: float = SAY_SECONDS) -> None:
        """every: seconds between two lines where no terminal shows one that changes."""
        self._began, self._last, self._every = began, began, every
        self._doing = "looks for packages"
        self._packages = 0
        self._modules = Path(sysconfig.get_path("purelib"))
        self._before = megabytes(self._modules)

    def read(self, line: str) -> None:
        """A line of pip's."""
        if line.startswith("Installing collected packages:"):
            self._packages = line.count(",") + 1
        elif found := NAMED.match(line):
            self._doing = f"{DOES[found[1]]} {found[2]} {found[3] or ''}".rstrip()

    def show(self) -> None:
        now = time.monotonic()
        changes = sys.stdout.isatty()
        if not changes and now - self._last < self._every:
            return
        self._last = now
        doing = self._doing
        if self._packages:
            size = megabytes(self._modules) - self._before
            doing = f"unpacks {self._packages} packages: {size:,.0f} MB so far"
        line = f"  {now - self._began:3.0f} s  pip {doing}"
        print(f"\r{line[:79]:<79}" if changes else line, end="" if changes else "\n", flush=True)

    def end(self) -> None:
        size = megabytes(self._modules) - self._before
        line = f"  {time.monotonic() - self._began:3.0f} s  installed {size:,.0f} MB"
        print(f"\r{line:<79}" if sys.stdout.isatty() else line, flush=True)


def megabytes(folder: Path) -> float:
    """Return what the files below a folder hold; those that vanish meanwhile count nothing, nor do
    folders.
    """
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
    return size / MEGABYTE


if __name__ == "__main__":
    sys.exit(main())
