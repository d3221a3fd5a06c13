"""Define what each benchmark does with its figures: medians with ranges, machine and date, kept in a file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "bench-out"


def seconds_of(call: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def milliseconds(times: list[float]) -> str:
    """The median and the range, as text."""
    low, middle, high = (1e3 * f(times) for f in (min, statistics.median, max))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


@contextmanager
def others_share() -> Iterator[list[float]]:
    """How busy others kept this machine meanwhile, as a share of its processors; the list holds it
    afterwards.
    """

    def busy() -> float:
        user, nice, system, _, _, interrupt, soft, steal = (
            int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        )
        return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")

    found: list[float] = []
    began, all_before, own_before = time.monotonic(), busy(), sum(os.times()[:4])
    yield found
    others = busy() - all_before - (sum(os.times()[:4]) - own_before)
    found.append(max(0.0, others) / (time.monotonic() - began) / (os.cpu_count() or 1))


def company(seconds: float = 3.0) -> str:
    """Return what follows the machine's name if others keep more than a tenth of it busy now; else
    nothing.
    """
    with others_share() as found:
        time.sleep(seconds)
    return ", with other work at the same time" if found[0] > 0.1 else ""


def machine() -> str:
    """Processor, cores, kernels and date: what the figures below it hold for."""
    from pyps import native

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("model name", "CPU part"))
    ]
    cores = len(os.sched_getaffinity(0))
    return (
        f"{names[0] if names else platform.machine()}, {cores} cores, {native.isa()} kernels, "
        f"{datetime.now(UTC):%Y-%m-%d}"
    )


def table(rows: list[list[str]]) -> str:
    """A Markdown table, aligned so that a terminal shows it as well; the first row is the heading."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]

    def line(cells: list[str]) -> str:
        padded = [
            c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = (
        "|" + "|".join("-" * (w + 2) if k == 0 else "-" * (w + 1) + ":" for k, w in enumerate(widths)) + "|"
    )
    return "\n".join([line(rows[0]), rule, *(line(row) for row in rows[1:])])


def save_table(name: str, text: str, page: str = "benchmarks.md") -> None:
    """Keep a table as bench-out/PAGE-NAME.md, from which that page of docs/results/ is brought up to date."""
    write_whole(kept_at(f"{page.removesuffix('.md')}-{name}.md"), f"{text}\n")


def kept_at(name: str) -> Path:
    """Return where bench-out/ keeps a file of this name; the folder is there then."""
    OUT.mkdir(exist_ok=True)
    return OUT / name


def write_whole(path: Path, text: str) -> None:
    """Entirely or not at all: who is killed meanwhile leaves what was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class Kept:
    """Figures of a long benchmark by what they are of, so that one that was cut off goes on.

    path: a file with a line of JSON for each, that several processes may add to; None: nothing is kept.
    A line that a kill has cut is left out.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._found = path, dict[str, Any]()
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                with suppress(ValueError):
                    self._found.update([json.loads(line)])

    def get(self, what: str) -> Any:
        """The figures of this; None: there are none yet."""
        return self._found.get(what)

    def add(self, what: str, figures: Any) -> None:
        self._found[what] = figures
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"\n{json.dumps([what, figures])}\n")  # not behind a line that was cut
