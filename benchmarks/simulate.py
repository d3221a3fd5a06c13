"""How long the simulator takes for an event, from ten workers to ten thousand.

    python benchmarks/simulate.py [--workers 10 100 1000 10000] [--iterations 20] [--plot growth.png]

Workers are of seven speeds, with 10 % lognormal jitter; with a link, each step moves a megabyte each way over
a server link of a tenth of a gigabyte per second and worker. An event is a decision of the core.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from record import machine, seconds_of, table

from pyps.formats import Jitter
from pyps.simulate import Result, Scenario, SimWorker, simulate

POLICIES = ("ssp", "r2sp", "bsp", "saps")


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


def measure(policy: str, workers: int, iterations: int, *, link: bool) -> tuple[float, Result]:
    """Seconds of the machine's, and what came of it."""
    scenario, results = cluster(workers, link=link), []
    seconds = seconds_of(lambda: results.append(simulate(scenario, policy, iterations=iterations)))
    return seconds, results[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--plot", help="a PNG of the time an event takes")
    chosen = parser.parse_args(arguments)
    rows = [["policy", "link", "workers", "events", "seconds", "us an event", "idle"]]
    curves: dict[str, list[float]] = {}
    for policy in POLICIES:
        for link in (False, True):
            for workers in chosen.workers:
                seconds, result = measure(policy, workers, chosen.iterations, link=link)
                each = 1e6 * seconds / result.events
                curves.setdefault(f"{policy}{', link' * link}", []).append(each)
                named = [policy, "shared" if link else "none", str(workers), str(result.events)]
                rows.append([*named, f"{seconds:.1f}", f"{each:.1f}", f"{result.idle_share:.0%}"])
    print(f"{chosen.iterations} iterations; {machine()}\n\n{table(rows)}")
    if chosen.plot:
        _draw(chosen.workers, curves, chosen.plot)


def _draw(workers: list[int], curves: dict[str, list[float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(workers, values, ".-", label=name)
    axes.set(xscale="log", ylim=(0, None), xlabel="workers", ylabel="microseconds an event")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
