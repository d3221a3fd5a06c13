"""How long the simulator takes for an event, from ten workers to ten thousand.

    python benchmarks/simulate.py [--workers 10 100 1000 10000] [--iterations 20] [--full] [--save]

Workers are of seven speeds, with 10 % lognormal jitter; with a link, each step moves a megabyte each way over
a server link of a tenth of a gigabyte per second and worker. An event is a decision of the core. --full adds
100 iterations of the most workers; --save puts table and plot into bench-out/.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from record import kept_at, machine, save_table, table

from pyps.formats import Jitter
from pyps.simulate import Result, Scenario, SimWorker, simulate

POLICIES = ("ssp", "r2sp", "bsp", "saps:threshold=fixed")
FULL = ("ssp", "r2sp")
FULL_ITERATIONS, FULL_SECONDS = 100, 60.0


@dataclass(frozen=True)
class Timing:
    """Hold what one simulation took: processor seconds and by the clock."""

    policy: str
    link: bool
    workers: int
    iterations: int
    processor: float
    clock: float
    result: Result

    @property
    def name(self) -> str:
        return f"{self.policy}{', link' * self.link}"

    def row(self) -> list[str]:
        named = [self.policy, "shared" if self.link else "none", str(self.workers), str(self.iterations)]
        events, each = self.result.events, 1e6 * self.processor / self.result.events
        seconds = [f"{self.processor:.1f}", f"{self.clock:.1f}", f"{each:.1f}"]
        return [*named, str(events), *seconds, f"{self.result.idle_share:.0%}"]


Series = dict[tuple[str, bool], list[Timing]]


def cluster(workers: int, *, link: bool) -> Scenario:
    """Steps of 0.14 to 0.2 s, unlike."""
    made = tuple(
        SimWorker(f"w{k}", 4, functools.partial(_cost, 0.01 * (1 + k % 7 / 6)), Jitter(sigma=0.1))
        for k in range(workers)
    )
    if not link:
        return Scenario(made)
    return Scenario(made, up_bytes=1e6, down_bytes=1e6, server_bandwidth=1e8 * workers)


def _cost(each: float, batch: int) -> float:
    return 0.1 + each * batch


def measure(policy: str, workers: int, iterations: int, *, link: bool) -> Timing:
    scenario = cluster(workers, link=link)
    worked, began = time.process_time(), time.perf_counter()
    result = simulate(scenario, policy, iterations=iterations)
    took = time.process_time() - worked, time.perf_counter() - began
    return Timing(policy, link, workers, iterations, *took, result)


def growth(timings: Sequence[Timing]) -> float:
    """p of seconds ~ events ** p, by least squares on logarithms; 1 is a constant time for an event."""
    events = np.log([t.result.events for t in timings])
    return float(np.polyfit(events, np.log([t.processor for t in timings]), 1)[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--plot", help="a PNG of seconds over events")
    chosen = parser.parse_args(arguments)
    measure(POLICIES[0], 10, 2, link=True)  # once before: imports, caches
    series = {
        (policy, link): [measure(policy, n, chosen.iterations, link=link) for n in chosen.workers]
        for policy in POLICIES
        for link in (False, True)
    }
    cases = [(policy, link) for policy in FULL for link in (False, True)] if chosen.full else []
    full = [measure(policy, max(chosen.workers), FULL_ITERATIONS, link=link) for policy, link in cases]
    text = f"{machine()}.\n\n{_table(series, full)}\n\n{_verdicts(series, full)}"
    print(text)
    if chosen.save:
        save_table("simulate", text)
        _draw(series, str(kept_at("simulate-growth.png")))
    if chosen.plot:
        _draw(series, chosen.plot)


def _table(series: Series, full: list[Timing]) -> str:
    heading = ["policy", "link", "workers", "iterations", "events", "processor s", "clock s", "us an event"]
    return table(
        [[*heading, "idle"], *(t.row() for t in [*(t for ts in series.values() for t in ts), *full])]
    )


def _verdicts(series: Series, full: list[Timing]) -> str:
    grows = ", ".join(f"{ts[0].name} {growth(ts):.2f}" for ts in series.values())
    lines = [f"- seconds grow as events to the power of: {grows} (1: an event's time is constant)"]
    for t in full:
        met = "met" if t.processor < FULL_SECONDS else "**missed**"
        took = f"{t.processor:.0f} s of one processor, {t.clock:.0f} s by the clock"
        lines.append(
            f"- {met}: {t.workers} workers, {t.iterations} iterations of {t.name}: {took} "
            f"(threshold: < {FULL_SECONDS:g} s)"
        )
    return "\n".join(lines)


def _draw(series: Series, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for timings in series.values():
        events, seconds = [t.result.events for t in timings], [t.processor for t in timings]
        axes.plot(events, seconds, ".--" if timings[0].link else ".-", label=timings[0].name)
    lo, hi = (f(t.result.events for ts in series.values() for t in ts) for f in (min, max))
    axes.plot([lo, hi], [1e-5 * lo, 1e-5 * hi], color="0.7", lw=1, label="10 us an event")
    axes.set(xscale="log", yscale="log", xlabel="events", ylabel="processor seconds")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
