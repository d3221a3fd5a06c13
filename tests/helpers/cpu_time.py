"""Prints what tests cost: CPU seconds by room, and the twenty dearest tests with the processes they started.

A plugin of pytest that conftest.py registers for `--cpu`. A busy machine changes CPU seconds little.
With several lanes, each measures its own tests, and pytest's main process adds and prints.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Generator, Iterator

import pytest

DEAREST = 20
TICKS = os.sysconf("SC_CLK_TCK")
USED = slice(
    11, 15
)  # of the fields after the name in /proc/PID/stat: its own time and that of ended children


def children(pid: int) -> Iterator[int]:
    """The living processes that descend from `pid`."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as listed:
                started = [int(child) for child in listed.read().split()]
            for child in started:
                yield child
                yield from children(child)
    except OSError:  # it has ended
        return


def cpu_seconds() -> float:
    """Return the seconds of this process and all that it started, living or reaped."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    for pid in children(os.getpid()):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                total += sum(map(int, stat.read().rpartition(")")[2].split()[USED])) / TICKS
        except OSError:
            continue
    return total


class CpuTime:
    """Measures in a lane, or adds what lanes report."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seen = 0.0
        self.other = 0.0  # imports and collection, of all lanes
        self.tests: Counter[str] = Counter()

    def since_last(self) -> float:
        last, self.seen = self.seen, cpu_seconds()
        return max(0.0, self.seen - last)

    def pytest_collection_finish(self) -> None:
        self.other += self.since_last()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        try:
            yield
        finally:
            item.user_properties.append(("cpu", self.since_last()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.tests[report.nodeid] += dict(report.user_properties).get("cpu", 0.0)

    def pytest_sessionfinish(self) -> None:
        output: dict[str, float] | None = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["other"] = self.other

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.other += getattr(node, "workeroutput", {}).get("other", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rooms: Counter[str] = Counter()
        for name, used in self.tests.items():
            rooms[name.split("::")[0].removeprefix("tests/").split("/")[0]] += used
        listed = ", ".join(f"{room} {used:.0f}" for room, used in rooms.most_common())
        write = terminalreporter.write_line
        terminalreporter.section(f"the {DEAREST} tests that used most CPU seconds")
        for name, used in self.tests.most_common(DEAREST):
            write(f"{used:7.1f}  {name}")
        total = rooms.total() + self.other
        write(f"CPU seconds: {total:.0f}; imports and collection {self.other:.0f}, {listed}")
