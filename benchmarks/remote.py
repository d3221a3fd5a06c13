"""A worker's step over TCP compared with bare sockets and gloo: python benchmarks/remote.py [--docs].

The gradient goes over, the SGD step is taken there, the parameters come back; a server process and this one,
on loopback, where nothing but the work itself costs time. The bare socket moves the same bytes and does
nothing with them. Rounds are interleaved; medians with range. Bytes are those of a step, both ways, with all
headers but TCP's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from peers import LR, gloo
from record import machine, milliseconds, seconds_of, table, write_section

from pyps import Hyper, Store
from pyps.remote.keys import make_keys
from pyps.remote.server import Server
from pyps.remote.store import RemoteStore
from pyps.store.codec import Codec, Encoding, fed_back

HYPER = Hyper(lr=LR)
Turn = Callable[[], tuple[float, int]]  # seconds and bytes of one step
SPAWN = multiprocessing.get_context("spawn")


def receive(connection: socket.socket, buffer: memoryview) -> None:
    while len(buffer):
        buffer = buffer[connection.recv_into(buffer) :]


def echo(n: int, pipe: Connection) -> None:
    """Takes as many numbers as it gives back, until the other side hangs up."""
    data = np.zeros(n, np.float32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                receive(connection, memoryview(data).cast("B"))
                connection.sendall(data)


@contextmanager
def bare(n: int) -> Iterator[dict[str, Turn]]:
    mine, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=echo, args=(n, theirs))
    server.start()
    gradient, weights = np.full(n, 1e-3, np.float32), np.zeros(n, np.float32)
    with socket.create_connection(mine.recv()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def turn() -> tuple[float, int]:
            def step() -> None:
                connection.sendall(b"x")
                connection.sendall(gradient)
                receive(connection, memoryview(weights).cast("B"))

            return seconds_of(step), 1 + 8 * n

        yield {"bare socket": turn}
    server.join(30)


def serve(n: int, keys: str | None, pipe: Connection) -> None:
    name = f"remote-{secrets.token_hex(4)}"
    zeros = {"w": np.zeros(n, np.float32)}
    with (
        Store.create(name, zeros, batches=[1], policy="asp", max_participants=8),
        Server(name, "tcp://127.0.0.1:*", keys=keys, insecure=keys is None) as server,
    ):
        pipe.send(server.address)
        pipe.recv()


@contextmanager
def served(n: int, keys: str | None) -> Iterator[str]:
    mine, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=serve, args=(n, keys, theirs))
    server.start()
    address = mine.recv()
    yield f"{address}?keys={keys}/client.key" if keys else address
    mine.send(None)
    server.join(30)


@contextmanager
def ours(
    n: int, label: str, codec: Codec, pull: Codec, keys: str | None, whole: bool
) -> Iterator[dict[str, Turn]]:
    """whole: by exchange, else by a push and a pull."""
    with served(n, keys) as address:
        option = f"{'&' if '?' in address else '?'}pull={pull.name.lower()}"
        with RemoteStore.open(address + option) as store:
            store.join()
            flat = np.zeros(store.layout.flat_elements, np.float32)
            how: Encoding = fed_back(codec)

            def turn() -> tuple[float, int]:
                store.start()
                staging = store.stage()
                staging.flat.fill(1e-3)
                before = store.traffic.sent + store.traffic.received

                def step() -> Any:
                    if whole:
                        return store.exchange(staging, 1, HYPER, flat, encoding=how)
                    return store.push(staging, 1, HYPER, encoding=how), store.pull(flat)

                seconds = seconds_of(step)
                return seconds, store.traffic.sent + store.traffic.received - before

            yield {label: turn}


@contextmanager
def by_gloo(n: int) -> Iterator[dict[str, Turn]]:
    with gloo(n) as turns:
        yield {name: (lambda turn=turn: (turn(), 8 * n)) for name, turn in turns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--docs", action="store_true", help="write the table to docs/results/benchmarks.md")
    options = parser.parse_args()
    n = options.parameters
    f32, int8, int4 = Codec.F32, Codec.INT8, Codec.INT4
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_keys(keys := str(Path(folder) / "keys"))
        rivals = [
            bare(n),
            by_gloo(n),
            ours(n, "pyps push + pull", f32, f32, None, False),
            ours(n, "pyps exchange", f32, f32, None, True),
            ours(n, "pyps exchange, encrypted", f32, f32, keys, True),
            ours(n, "pyps exchange, int8 both ways", int8, int8, None, True),
            ours(n, "pyps exchange, int4 and int8", int4, int8, None, True),
            ours(n, "the same, encrypted", int4, int8, keys, True),
        ]
        turns: dict[str, Turn] = {}
        for rival in rivals:
            turns |= stack.enter_context(rival)
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in turns}
        for k in range(options.rounds + 1):
            for name, turn in turns.items():
                result = turn()
                if k:
                    found[name].append(result)
    report(n, found, options.docs)


def report(n: int, found: dict[str, list[tuple[float, int]]], docs: bool) -> None:
    socket_ms = statistics.median(seconds for seconds, _ in found["bare socket"])
    rows = [["a step over TCP, loopback", "ms (range)", "x bare socket", "bytes a parameter"]]
    for name, results in found.items():
        times = [seconds for seconds, _ in results]
        ratio = statistics.median(times) / socket_ms
        rows.append([name, milliseconds(times), f"{ratio:.2f}", f"{results[-1][1] / n:.3f}"])
    text = f"{machine()}; {n:,} fp32 parameters.\n\n{table(rows)}"
    print(text)
    if docs:
        write_section("remote", text)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
