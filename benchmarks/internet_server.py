"""Measure what a server carries, with real connections: python benchmarks/internet_server.py [--seconds 5]
[--save].

Workers in threads of four processes join one server over TCP on loopback, each with a connection of its own,
and push int4 gradients and pull int8 parameters as fast as they can, as internet.py's do every
few minutes. Counted are exchanges and bytes a second, and the processor time of the server alone. From that,
what a server of a thousand such workers needs: an exchange costs `fixed + each * parameters`, by two sizes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import psutil
from record import company, machine, save_table, table

from pyps import Hyper, Store
from pyps.remote import open_store
from pyps.remote.server import Server
from pyps.store.codec import Codec, fed_back

SPAWN = multiprocessing.get_context("spawn")
PROCESSES, SIZES, CONNECTIONS = 4, (100_000, 1_000_000), (16, 64, 252)
WORKERS, ROUND_SECONDS, PARAMETERS = 1111, 286.0, 25_000_000  # of benchmarks/internet.py, with a quorum


def serve(n: int, connections: int, pipe: Connection) -> None:
    name = f"carry-{secrets.token_hex(4)}"
    zeros = {"w": np.zeros(n, np.float32)}
    with (
        Store.create(name, zeros, batches=[1] * connections, policy="asp", max_participants=300),
        Server(name, "tcp://127.0.0.1:*", insecure=True, sessions_per_client=256) as server,
    ):
        pipe.send(server.address)
        pipe.recv()


def work(address: str, ranks: list[int], seconds: float, ready: object, pipe: Connection) -> None:
    """So many workers; sends (exchanges, bytes)."""
    counts = [(0, 0)] * len(ranks)

    def one(k: int) -> None:
        with open_store(f"{address}{'&' if '?' in address else '?'}pull=int8") as store:
            store.join(rank=ranks[k])
            flat = np.zeros(store.layout.flat_elements, np.float32)
            how = fed_back(Codec.INT4)
            ready.wait()  # type: ignore[attr-defined]
            before, done, end = store.traffic.sent + store.traffic.received, 0, time.monotonic() + seconds
            while time.monotonic() < end:
                store.start()
                staging = store.stage()
                staging.flat.fill(1e-3)
                store.exchange(staging, 1, Hyper(lr=1e-3), flat, encoding=how)
                done += 1
            counts[k] = done, store.traffic.sent + store.traffic.received - before

    threads = [threading.Thread(target=one, args=(k,)) for k in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((sum(done for done, _ in counts), sum(size for _, size in counts)))


@dataclass(frozen=True)
class Carried:
    """exchanges, megabytes: a second; cpu: of the server, in milliseconds an exchange; memory in MB."""

    exchanges: float
    megabytes: float
    cpu: float
    memory: float


def carried(n: int, connections: int, seconds: float) -> Carried:
    mine, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=serve, args=(n, connections, theirs), daemon=True)
    server.start()
    address, ready = mine.recv(), SPAWN.Barrier(connections + 1)
    pipes, workers = [], []
    for k in range(PROCESSES):
        here, there = SPAWN.Pipe()
        ranks = list(range(k, connections, PROCESSES))
        worker = SPAWN.Process(target=work, args=(address, ranks, seconds, ready, there), daemon=True)
        worker.start()
        pipes.append(here)
        workers.append(worker)
    ready.wait()
    process = psutil.Process(server.pid)
    before = process.cpu_times()
    found = [pipe.recv() for pipe in pipes]
    after, memory = process.cpu_times(), process.memory_info().rss / 1e6
    spent = after.user + after.system - before.user - before.system
    for worker in workers:
        worker.join()
    mine.send(None)
    server.join(30)
    exchanges = sum(done for done, _ in found)
    size = sum(size for _, size in found) / 1e6
    return Carried(exchanges / seconds, size / seconds, 1e3 * spent / exchanges, memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    others = company()
    head = [
        "parameters",
        "connections",
        "exchanges/s",
        "MB/s",
        "server CPU, ms an exchange",
        "its memory, MB",
    ]
    rows, cpu = [head], {}
    for n in SIZES:
        for connections in CONNECTIONS:
            one = carried(n, connections, options.seconds)
            rows.append([f"{n:,}", str(connections), f"{one.exchanges:.0f}", f"{one.megabytes:.0f}"])
            rows[-1] += [f"{one.cpu:.2f}", f"{one.memory:.0f}"]
            cpu[n] = one.cpu  # of the most connections
    each = (cpu[SIZES[1]] - cpu[SIZES[0]]) / (SIZES[1] - SIZES[0])
    whole = cpu[SIZES[0]] + each * (PARAMETERS - SIZES[0])
    rate = WORKERS / ROUND_SECONDS
    those = f"{WORKERS:,} workers that exchange {PARAMETERS:,} parameters every {ROUND_SECONDS:.0f} s"
    need = f"{rate:.1f} exchanges a second of about {whole:.0f} ms of a core: {rate * whole / 1e3:.2f} cores"
    text = f"{table(rows)}\n\n{those} are {need}; {machine()}{others}"
    print(text)
    if options.save:
        save_table("internet-server", text, "internet.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
