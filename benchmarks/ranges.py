"""What a worker moves and keeps that needs a part of the parameters: python benchmarks/ranges.py [--docs].

Times: pulls and pushes of 1 % of a model, in one piece and as scattered rows of a table, against those of
all of it, interleaved. Memory: a store of 7,000,000,000 parameters in --folder (with 40 GB to spare;
little is written), whose worker joins, pulls 1 %, pushes 1 %, and holds codes of all of it: what each
adds to the segment's blocks and to the process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from record import machine, milliseconds, seconds_of, table, write_section

from pyps import Hyper, Store
from pyps.native.local import LocalBackend
from pyps.native.values import Codec, Config, Optimizer, Tensor
from pyps.store.codec import encoded_bytes
from pyps.store.policies import policy_named

COLUMNS = 500  # of the table: a row is 2 KB
HYPER = Hyper(lr=1e-3)
PULL_BAR = 0.03  # of a full pull, for 1 % of the parameters
CODES_BAR = 1.2  # of its codes: what a worker that sends codes keeps
MIB = 1 << 20


def times(parameters: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each operation, interleaved."""
    rows = parameters // COLUMNS
    name = f"ranges-{os.getpid()}"
    initial = {"table": np.zeros((rows, COLUMNS), np.float32)}
    found: dict[str, list[float]] = {}
    with Store.create(name, initial, batches=[1], policy="asp", max_participants=2) as store:
        store.join()
        chosen = np.sort(np.random.default_rng(0).choice(rows, rows // 100, replace=False))
        flat = np.zeros(store.layout.flat_elements, np.float32)
        parts = {
            "1 %, one piece": np.array([[parameters // 3, parameters // 100]]),
            "1 %, rows": store.ranges("table", rows=chosen),
        }
        values = {what: np.full(int(ranges[:, 1].sum()), 1e-3, np.float32) for what, ranges in parts.items()}
        for number in range(rounds + 2):
            operations: dict[str, Callable[[], object]] = {"pull": lambda: store.pull(flat)}
            for what, ranges in parts.items():
                out = values[what].copy()
                operations[f"pull, {what}"] = lambda r=ranges, o=out: store.pull(o, ranges=r)
            for operation, call in operations.items():
                seconds = seconds_of(call)
                if number > 1:
                    found.setdefault(operation, []).append(seconds)
            for what in ("", *parts):
                store.start()
                staging = store.stage()
                staging.flat.fill(1e-3)
                options = {"ranges": parts[what], "gradient": values[what]} if what else {}
                seconds = seconds_of(lambda s=staging, o=options: store.push(s, 1, HYPER, **o))
                if number > 1:
                    found.setdefault(f"push, {what}" if what else "push", []).append(seconds)
    return found


def sparse_store(name: str, parameters: int) -> Store:
    """A store of one table of zeros, none of which is written."""
    policy = policy_named("asp")
    tensor = Tensor("table", (parameters // COLUMNS, COLUMNS), 0, 0, parameters, False)
    config = Config(
        tensors=(tensor,),
        initial=(None,),  # type: ignore[arg-type]
        batches=(1,),
        groups=1,
        optimizer=Optimizer.SGD,
        policy=policy.number,
        policy_params=policy.params(),
        round_timeout_seconds=policy.round_timeout_seconds,
        samples=0,
        chunk_params=0,
        max_participants=2,
        snapshot_spares=0,
        staging_buffers=0,
    )
    return Store(name, LocalBackend.create(name, config, keep=False))


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(parameters: int, folder: Path) -> list[list[str]]:
    """What each step of a worker adds to the segment and to the process, as rows of a table."""
    name = f"large-{os.getpid()}"
    lines = [["a worker's step", "segment, MiB", "process, MiB", "of its codes"]]
    with sparse_store(name, parameters) as store:
        path = folder / f"pyps-{name}"
        codes = encoded_bytes(Codec.INT8, store.layout.flat_elements)
        rows = store.layout.parameters // COLUMNS
        part = np.array([[rows // 2 * COLUMNS, parameters // 100]])
        values = np.full(parameters // 100, 1e-3, np.float32)
        before = path.stat().st_blocks * 512, resident()

        def report(step: str) -> None:
            grown = path.stat().st_blocks * 512 - before[0], resident() - before[1]
            share = f"{grown[0] / codes:.3f}"
            lines.append([step, *(f"{each / MIB:,.0f}" for each in grown), share])

        store.join()
        report("join")
        store.pull(values, ranges=part)
        report("pull 1 %")
        store.start()
        values.fill(1e-3)
        store.push(None, 1, HYPER, ranges=part, gradient=values)
        report("push 1 %")
        if not np.allclose(store.pull(ranges=part[:, :2])[0], -1e-6):
            raise SystemExit("the pushed part was not applied")
        store.backend.staging_codes(store.stage().index, codes)
        report("int8 codes of all")
        store.leave()
        report("leave")
    return lines


def main() -> None:
    """Print the tables and the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--large", type=int, default=7_000_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    found = times(options.parameters, options.rounds)
    middle: dict[str, Any] = {what: statistics.median(seconds) for what, seconds in found.items()}
    lines = [["operation", "ms (range)", "of all"]]
    for what, seconds in found.items():
        whole = middle[what.partition(",")[0]]
        lines.append([what, milliseconds(seconds), f"{100 * middle[what] / whole:.2f} %"])
    os.environ["PYPS_SHM_DIR"] = str(options.folder)
    kept = memory(options.large, options.folder)
    share = middle["pull, 1 %, one piece"] / middle["pull"]
    most = max(float(line[-1]) for line in kept[1:])
    pull, codes = (f"{'met' if met else 'missed'}" for met in (share < PULL_BAR, most < CODES_BAR))
    bars = (
        f"A pull of 1 % takes {100 * share:.2f} % of a full one (bar {100 * PULL_BAR:.0f} %): {pull}. "
        f"A worker's memory is at most {most:.3f} of its int8 codes (bar {CODES_BAR}): {codes}."
    )
    head = f"{machine()}; {options.parameters:,} parameters; below, a store of {options.large:,}."
    text = f"{head}\n\n{table(lines)}\n\n{table(kept)}\n\n{bars}"
    print(text)
    if options.docs:
        write_section("ranges", text)


if __name__ == "__main__":
    main()
