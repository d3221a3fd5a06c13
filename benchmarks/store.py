"""Store traffic against memcpy, and push + pull against gloo, all in one run: python benchmarks/store.py.

One worker, one thread, interleaved rounds; medians with the range. Bytes are what an operation reads and
writes of fp32 data: memcpy and pull 8 a parameter, SGD push 12, AdamW push 28.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np

from pyps import Hyper, Store

BARS = {"pull": 0.9, "SGD push": 0.9, "AdamW push": 0.85}  # of memcpy's bytes per second
BYTES = {"memcpy": 8, "pull": 8, "SGD push": 12, "AdamW push": 28}


def seconds_of(call: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def store_times(parameters: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of memcpy, pull and both pushes, interleaved; two rounds to warm up are dropped."""
    times: dict[str, list[float]] = {name: [] for name in [*BYTES, "push + pull"]}
    initial = {"w": np.zeros(parameters, np.float32)}
    name = f"bench-{os.getpid()}"
    with (
        Store.create(
            f"{name}-sgd", initial, batches=[1], optimizer="sgd", policy="asp", max_participants=2
        ) as sgd,
        Store.create(
            f"{name}-adamw", initial, batches=[1], optimizer="adamw", policy="asp", max_participants=2
        ) as adamw,
    ):
        source, copy = np.ones(parameters, np.float32), np.zeros(parameters, np.float32)
        flat = np.zeros(sgd.layout.flat_elements, np.float32)
        for store in (sgd, adamw):
            store.join()
        for number in range(rounds + 2):
            row = {
                "memcpy": seconds_of(lambda: np.copyto(copy, source)),
                "pull": seconds_of(lambda: sgd.pull(flat)),
            }
            for kind, store in (("SGD push", sgd), ("AdamW push", adamw)):
                store.start()
                area = store.stage()
                area.flat.fill(1e-3)
                row[kind] = seconds_of(lambda s=store, a=area: s.push(a, 1, Hyper(lr=1e-3)))  # type: ignore[misc]
            row["push + pull"] = row["SGD push"] + row["pull"]
            if number >= 2:
                for kind, seconds in row.items():
                    times[kind].append(seconds)
    return times


def gloo_peer(
    rank: int, parameters: int, rounds: int, port: int, results: multiprocessing.Queue[float]
) -> None:
    """One end of a gloo exchange: the gradient goes over, the parameters come back."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    data = torch.ones(parameters)
    for number in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            dist.send(data, 1)
            dist.recv(data, 1)
            if number:
                results.put(time.perf_counter() - begin)
        else:
            dist.recv(data, 0)
            dist.send(data, 0)
    dist.destroy_process_group()


def gloo_times(parameters: int, rounds: int) -> list[float]:
    """Seconds of sending the array to another process and receiving it back."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    peers = [context.Process(target=gloo_peer, args=(r, parameters, rounds, port, results)) for r in (0, 1)]
    for peer in peers:
        peer.start()
    times = [results.get(timeout=120) for _ in range(rounds)]
    for peer in peers:
        peer.join(30)
    return times


def line(name: str, times: list[float], note: str) -> str:
    """One row of the table."""
    low, middle, high = (1e3 * f(times) for f in (min, statistics.median, max))
    return f"{name:<24}{middle:9.1f} ms  ({low:.1f} to {high:.1f})  {note}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    times = store_times(options.parameters, options.rounds)
    gloo = gloo_times(options.parameters, max(3, options.rounds // 2))
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    print(f"{today}, {platform.machine()}, {os.cpu_count()} cores, {options.parameters:,} parameters")
    memcpy = statistics.median(times["memcpy"])
    for name, size in BYTES.items():
        middle = statistics.median(times[name])
        ratio = (size / middle) / (BYTES["memcpy"] / memcpy)
        note = (
            f"{size * options.parameters / middle / 1e9:5.1f} GB/s, {ratio:.2f} x memcpy's bytes per second"
        )
        print(line(name, times[name], note + (f" (bar {BARS[name]})" if name in BARS else "")))
    exchange = statistics.median(times["push + pull"])
    print(line("push + pull", times["push + pull"], f"{exchange / (2 * memcpy):.2f} x two memcpy"))
    print(line("gloo send + recv", gloo, f"{statistics.median(gloo) / exchange:.2f} x push + pull"))


if __name__ == "__main__":
    main()
