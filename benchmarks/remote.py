"""A worker's step over TCP compared with bare sockets and gloo: python benchmarks/remote.py [--save].

The gradient goes over, the SGD step is taken there, the parameters come back; a server process and this one,
on loopback, where nothing but the work itself costs time. The bare socket moves the same bytes and does
nothing with them. Rounds are interleaved; medians with range. Bytes are those of a step, both ways, with all
headers but TCP's. --rate 1gbit: between two hosts (network namespaces, so root) with a link that tc tbf
shapes. There iperf3, gloo, torch rpc and a Ray actor are timed too, if they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import secrets
import shutil
import socket
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import link_peers
import numpy as np
from link_peers import Turn, enter
from peers import LR, gloo
from record import machine, milliseconds, save_table, seconds_of, table
from shaped import SERVER, Shaped, shaped

from pyps import Hyper, Store
from pyps.remote import open_store
from pyps.remote.keys import KeyFolder
from pyps.remote.server import Server
from pyps.store.codec import Codec, Encoding, fed_back

HYPER = Hyper(lr=LR)
SPAWN = multiprocessing.get_context("spawn")


def receive(connection: socket.socket, buffer: memoryview) -> None:
    while len(buffer):
        buffer = buffer[connection.recv_into(buffer) :]


@dataclass(frozen=True)
class Host:
    """Where the server is. namespace: of its network; empty: this one's."""

    address: str = "127.0.0.1"
    namespace: str = ""


def echo(n: int, host: Host, pipe: Connection) -> None:
    """Takes as many numbers as it gives back, until the other side hangs up."""
    enter(host.namespace)
    data = np.zeros(n, np.float32)
    with socket.create_server((host.address, 0)) as listener:
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                receive(connection, memoryview(data).cast("B"))
                connection.sendall(data)


@contextmanager
def bare(n: int, host: Host) -> Iterator[dict[str, Turn]]:
    mine, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=echo, args=(n, host, theirs))
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


def serve(n: int, host: Host, keys: str | None, pipe: Connection) -> None:
    enter(host.namespace)
    name = f"remote-{secrets.token_hex(4)}"
    zeros = {"w": np.zeros(n, np.float32)}
    with (
        Store.create(name, zeros, batches=[1], policy="asp", max_participants=8),
        Server(name, f"tcp://{host.address}:*", keys=keys, insecure=keys is None) as server,
    ):
        pipe.send(server.address)
        pipe.recv()


@contextmanager
def served(n: int, host: Host, keys: str | None) -> Iterator[str]:
    mine, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=serve, args=(n, host, keys, theirs))
    server.start()
    address = mine.recv()
    yield f"{address}?keys={keys}/client.key" if keys else address
    mine.send(None)
    server.join(30)


@contextmanager
def ours(
    n: int, host: Host, label: str, codec: Codec, pull: Codec, keys: str | None, whole: bool
) -> Iterator[dict[str, Turn]]:
    """whole: by exchange, else by a push and a pull."""
    with served(n, host, keys) as address:
        option = f"{'&' if '?' in address else '?'}pull={pull.name.lower()}"
        with open_store(address + option) as store:
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


def peers_on(n: int, pair: Shaped) -> list[AbstractContextManager[dict[str, Turn]]]:
    """The others between two hosts; what is not installed is named and left out."""
    found = [link_peers.gloo(n, pair), link_peers.torch_rpc(n, pair)]
    if shutil.which("iperf3"):
        found.append(link_peers.iperf3(n, pair))
    else:
        print("no iperf3 (Debian: apt install iperf3): its row is left out")
    if importlib.util.find_spec("ray"):
        found.append(link_peers.ray_actor(n, pair))
    else:
        print("Ray is not installed: its row is left out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    parser.add_argument("--rate", help="of a link between two hosts, as tc writes it: 1gbit")
    options = parser.parse_args()
    n = options.parameters
    f32, int8, int4 = Codec.F32, Codec.INT8, Codec.INT4
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        host, others = Host(), [by_gloo(n)]
        if options.rate:
            pair = stack.enter_context(shaped(options.rate))
            enter(pair.client)
            host, others = Host(SERVER, pair.server), peers_on(n, pair)
        KeyFolder.open(keys := str(Path(folder) / "keys")).save()
        rivals = [
            bare(n, host),
            *others,
            ours(n, host, "pyps push + pull", f32, f32, None, False),
            ours(n, host, "pyps exchange", f32, f32, None, True),
            ours(n, host, "pyps exchange, encrypted", f32, f32, keys, True),
            ours(n, host, "pyps exchange, int8 both ways", int8, int8, None, True),
            ours(n, host, "pyps exchange, int4 and int8", int4, int8, None, True),
            ours(n, host, "the same, encrypted", int4, int8, keys, True),
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
    report(n, found, options.rate, options.save)


def report(n: int, found: dict[str, list[tuple[float, int]]], rate: str | None, save: bool) -> None:
    medians = {name: statistics.median(s for s, _ in results) for name, results in found.items()}
    speeds = {name: results[-1][1] / medians[name] for name, results in found.items()}
    rows = [[f"a step over TCP, {rate or 'loopback'}", "ms (range)", "x bare socket", "bytes a parameter"]]
    if wire := speeds.get(link_peers.IPERF3):
        rows[0].append("of iperf3's rate")
    for name, results in found.items():
        ratio = medians[name] / medians["bare socket"]
        rows.append([name, milliseconds([s for s, _ in results]), f"{ratio:.2f}"])
        rows[-1].append(f"{results[-1][1] / n:.3f}")
        if wire:
            rows[-1].append(f"{speeds[name] / wire:.2f}")
    text = f"{machine()}; {n:,} fp32 parameters.\n\n{table(rows)}"
    print(text)
    if save:
        save_table("remote-shaped" if rate else "remote", text)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
