"""Pulls while four writers push without pause: python benchmarks/pulls.py [--pulls 1000000] [--save].

Every push adds one to every parameter, so a chunk of version v holds v everywhere: a chunk of two values is
torn, and one older than the version that the pull reports is a lie. Prints how long a pull takes alone and
under the pushes, at the median, the 99.9th percentile and the worst, and how many pushes came meanwhile.
The parameters stay below 2^24, where fp32 counts exactly: the store is made anew before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from typing import Any

import numpy as np
from record import machine, save_table, table

from pyps import Hyper, Store

WRITERS = 4
LAST_VERSION = 1 << 23


def write(name: str, rank: int, stop: Any) -> None:
    """Push -1 for every parameter, again and again; the step is w - lr * g."""
    with Store.open(name) as store:
        store.join(rank)
        while not stop.is_set():
            store.start()
            staging = store.stage()
            staging.flat.fill(-1.0)
            store.push(staging, 1, Hyper(lr=1.0))


def pull_once(store: Store, flat: Any, chunks: Any) -> float:
    """Seconds of one pull, checked."""
    begin = time.perf_counter()
    _, version = store.pull(flat)
    seconds = time.perf_counter() - begin
    low, high = chunks.min(axis=1), chunks.max(axis=1)
    if (low != high).any() or low.min() != version:
        torn = int((low != high).argmax())
        raise SystemExit(f"chunk {torn}: {low[torn]} to {high[torn]} in a pull of version {version}")
    return seconds


def measure(parameters: int, chunk: int, pulls: int, writers: int) -> tuple[Any, int]:
    """Seconds of each pull, and how many pushes happened meanwhile."""
    times: list[float] = []
    pushes = 0
    while len(times) < pulls:
        name, context = f"pulls-{os.getpid()}-{len(times)}", multiprocessing.get_context("spawn")
        initial, batches = {"w": np.zeros(parameters, np.float32)}, [1] * max(1, writers)
        options = {"policy": "asp:scaling=none", "chunk_params": chunk, "max_participants": writers + 4}
        with Store.create(name, initial, batches=batches, **options) as store:
            stop = context.Event()
            processes = [context.Process(target=write, args=(name, k, stop)) for k in range(writers)]
            for process in processes:
                process.start()
            store.join(role="observer")
            while writers and store.status().version < 10 * writers:
                time.sleep(0.01)
            flat = np.zeros(store.layout.flat_elements, np.float32)
            chunks = flat.reshape(-1, chunk)
            first = store.status().version
            while len(times) < pulls and store.status().version < LAST_VERSION:
                times += [pull_once(store, flat, chunks) for _ in range(min(1000, pulls - len(times)))]
            pushes += store.status().version - first
            stop.set()
            for process in processes:
                process.join(30)
    return np.array(times), pushes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--pulls", type=int, default=1_000_000)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = [["pulls", "how many", "pushes meanwhile", "median, us", "99.9 %, us", "worst, us"]]
    for label, writers, pulls in (
        ("no pushes", 0, max(1, options.pulls // 10)),
        (f"{WRITERS} writers push", WRITERS, options.pulls),
    ):
        times, pushes = measure(options.parameters, options.chunk, pulls, writers)
        middle, high = (1e6 * float(np.quantile(times, q)) for q in (0.5, 0.999))
        worst = 1e6 * times.max()
        rows.append([label, f"{pulls:,}", f"{pushes:,}", f"{middle:.1f}", f"{high:.1f}", f"{worst:.0f}"])
    cores = len(os.sched_getaffinity(0))
    head = f"{machine()}; {options.parameters:,} parameters in chunks of {options.chunk:,}"
    tail = (
        f"With {WRITERS} writers and a reader on {cores} cores the tail is the scheduler's: a pull that is "
        "preempted waits for its turn."
    )
    text = f"{head}; no chunk torn, none older than reported.\n\n{table(rows)}\n\n{tail}"
    print(text)
    if options.save:
        save_table("pulls", text)


if __name__ == "__main__":
    main()
