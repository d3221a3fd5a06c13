"""One and two threads that share a worker's chunks: CPU time of the busier one.

    python benchmarks/threads.py [--parameters 25000000] [--rounds 9] [--docs]

Walls say little where other processes want the same cores, so this counts what each thread of the process
ran. With idle cores a call lasts as long as the busier one works. Interleaved rounds, medians with the range.
With --docs the table goes to docs/results, one for each instruction set.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from record import machine, table, write_section

from pyps import Hyper, Store
from pyps.native import isa
from pyps.store.staging import StagingBuffer

COUNTS = (1, 2)
HYPER = Hyper(lr=1e-3)
THREAD_CPU_CLOCK = 6  # with a thread's number the clock of its CPU time, as pthread_getcpuclockid makes it


def busy_milliseconds(call: Callable[[], object]) -> float:
    """CPU time of the thread that ran longest."""

    def ran() -> dict[int, int]:
        tasks = map(int, os.listdir("/proc/self/task"))
        return {task: time.clock_gettime_ns(~task << 3 | THREAD_CPU_CLOCK) for task in tasks}

    before = ran()
    call()
    return max(now - before.get(task, 0) for task, now in ran().items()) / 1e6


def measure(store: Store, rounds: int) -> dict[tuple[str, int], list[float]]:
    """Milliseconds by operation and threads; one round to warm up is dropped."""
    flat = np.zeros(store.layout.flat_elements, np.float32)
    found: dict[tuple[str, int], list[float]] = {}

    def staged() -> StagingBuffer:
        store.start()
        staging = store.stage()
        staging.flat.fill(1e-3)
        return staging

    for number in range(rounds + 1):
        for threads in COUNTS:
            if store.set_threads(threads) != threads:
                raise SystemExit(f"{store.name}: found no slot for {threads} threads")
            times = {"push": busy_milliseconds(partial(store.push, staged(), 1, HYPER))}
            times["exchange"] = busy_milliseconds(partial(store.exchange, staged(), 1, HYPER, flat))
            times["pull"] = busy_milliseconds(partial(store.pull, flat))
            for name, spent in times.items():
                if number:
                    found.setdefault((name, threads), []).append(spent)
    return found


def shared(parameters: int, rounds: int) -> str:
    """The table."""
    lines = [["shared by two threads", "one, CPU ms (range)", "two, busier one (range)", "one / two"]]
    for optimizer in ("sgd", "adamw"):
        initial = {"w": np.zeros(parameters, np.float32)}
        name = f"threads-{os.getpid()}-{optimizer}"
        with Store.create(name, initial, batches=[1], policy="asp", optimizer=optimizer) as store:
            store.join(0)
            times = measure(store, rounds)
        for operation in ("push", "exchange", "pull"):
            one, two = (times[operation, threads] for threads in COUNTS)
            ratio = statistics.median(one) / statistics.median(two)
            shown = (f"{statistics.median(t):.1f} ({min(t):.1f} to {max(t):.1f})" for t in (one, two))
            lines.append([f"{optimizer} {operation}", *shown, f"{ratio:.2f}"])
    return table(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    found = shared(options.parameters, options.rounds)
    text = f"{machine()}; {options.parameters:,} fp32 parameters.\n\n{found}"
    print(text)
    if options.docs:
        write_section(f"threads-{isa()}", text)


if __name__ == "__main__":
    main()
