"""Define what huge pages are worth: two stores that are alike but for PYPS_HUGE_PAGES.

    python benchmarks/pages.py [--parameters 25000000] [--table 200000000] [--rounds 31] [--save]

Every round times each operation on both, in turn; a ratio is of one round. Rows are others in each round:
100,000 of 64 numbers, or fewer of a small table.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from record import machine, milliseconds, save_table, seconds_of, table

from pyps import Hyper, Store

HYPER = Hyper(lr=1e-3, momentum=0.9)
COLUMNS = 64
WARM_UP = 2  # rounds that do not count
Pair = tuple[Store, Store]  # of small pages, of huge ones


@contextmanager
def pair(optimizer: str, parameters: int) -> Iterator[Pair]:
    """Joined, and with as much memory as they will have."""
    options = {"batches": [1], "policy": "asp:scaling=none", "optimizer": optimizer, "snapshot_spares": 1}
    initial = {"w": np.zeros(parameters // COLUMNS * COLUMNS, np.float32)}
    before = os.environ.get("PYPS_HUGE_PAGES")
    with ExitStack() as stack:
        made = []
        for wanted in "01":
            os.environ["PYPS_HUGE_PAGES"] = wanted
            name = f"bench-{os.getpid()}-{wanted}"
            store = Store.create(name, initial, max_participants=2, **options)  # type: ignore[arg-type]
            made.append(stack.enter_context(store))
            store.join()
            store.start()
            store.push(store.stage(), 1, HYPER)
        os.environ.pop("PYPS_HUGE_PAGES") if before is None else os.environ.update(PYPS_HUGE_PAGES=before)
        yield made[0], made[1]


def dense(optimizer: str, parameters: int, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of pushes and pulls, by operation and store."""
    found: dict[str, list[list[float]]] = {f"push, {optimizer}": [[], []], f"pull, {optimizer}": [[], []]}
    with pair(optimizer, parameters) as stores:
        flat = np.zeros(stores[0].layout.flat_elements, np.float32)
        for number in range(rounds + WARM_UP):
            for k in (0, 1) if number % 2 else (1, 0):
                store = stores[k]
                store.start()
                staging = store.stage()
                staging.flat.fill(1e-3)
                pushed = seconds_of(lambda s=store, g=staging: s.push(g, 1, HYPER))  # type: ignore[misc]
                pulled = seconds_of(lambda s=store: s.pull(flat))  # type: ignore[misc]
                for times, seconds in zip(found.values(), (pushed, pulled), strict=True):
                    if number >= WARM_UP:
                        times[k].append(seconds)
    return found


def sparse(parameters: int, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of pulls of rows, by store."""
    found: list[list[float]] = [[], []]
    rows, draw = parameters // COLUMNS, np.random.default_rng(0)
    count = min(100_000, rows // 10)
    out = np.zeros(count * COLUMNS, np.float32)
    with pair("sgd", parameters) as stores:
        for number in range(rounds + WARM_UP):
            first = np.sort(draw.choice(rows, count, replace=False)) * COLUMNS
            parts = np.stack([first, np.full_like(first, COLUMNS)], axis=1)
            for k in (0, 1) if number % 2 else (1, 0):
                seconds = seconds_of(lambda s=stores[k], p=parts: s.pull(out, ranges=p))  # type: ignore[misc]
                if number >= WARM_UP:
                    found[k].append(seconds)
    return {f"pull, {count:,} rows of {4 * parameters / 1e6:,.0f} MB": found}


def rows_of(found: dict[str, list[list[float]]]) -> Iterator[list[str]]:
    """Each operation's times, and its ratio with the quartiles."""
    for operation, (small, huge) in found.items():
        ratios = sorted(b / a for a, b in zip(small, huge, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        ratio = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
        yield [operation, milliseconds(small), milliseconds(huge), ratio]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--table", type=int, default=200_000_000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    lines = [["operation", "small, ms (range)", "huge, ms (range)", "ratio (quartiles)"]]
    for optimizer in ("sgd", "adamw"):
        lines += rows_of(dense(optimizer, options.parameters, options.rounds))
    lines += rows_of(sparse(options.table, options.rounds))
    text = f"{machine()}; {options.parameters:,} parameters.\n\n{table(lines)}"
    print(text)
    if options.save:
        save_table("pages", text)


if __name__ == "__main__":
    main()
