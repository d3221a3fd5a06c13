"""Push throughput of a model over two servers against one: python benchmarks/shards.py [--save].

Four hosts (network namespaces, so root) on one switch, each with a link that tc tbf shapes: two workers push
fp32 gradients as fast as they can, first to one server, then to two. Rounds alternate; medians with range.
Each push adds 1 to every parameter, so that at version v all are v: checked after each round.

--kills N: instead, on loopback, two workers push while a worker, the far server or the first one is killed
(kill -9) N times at random moments; then every parameter is the version, and no confirmed push is missing.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from record import machine, save_table, table
from shaped import star

from pyps import Hyper
from pyps.errors import PypsError
from pyps.remote import create_store, open_store
from pyps.remote.server import Server
from pyps.store import Store

SPAWN = multiprocessing.get_context("spawn")
CLONE_NEWNET = 0x40000000
ADDS_ONE = Hyper(lr=1.0)
WORKERS = 2
BAR = 1.7
PYPS = str(Path(sys.executable).parent / "pyps")


def enter(namespace: str) -> None:
    """Make it this process's network, before it has threads."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def serve(namespace: str, address: str, names: list[str], home: str | None, pipe: Connection) -> None:
    """One server for each of these stores; with `home` the last one is of several servers."""
    enter(namespace)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(name, f"tcp://{address}:*", insecure=True, home=home))
            for name in names
        ]
        pipe.send([server.address for server in servers])
        pipe.recv()


def step(store: Store, flat: Any) -> int:
    """A push, and a pull too where there is an array for it; the version."""
    claim, staging = store.start(), store.stage()
    staging.flat.fill(-1.0)
    if flat is None:
        return store.push(staging, claim.count, ADDS_ONE).version
    return store.exchange(staging, claim.count, ADDS_ONE, flat)[1]


def work(namespace: str, rank: int, addresses: dict[str, str], pipe: Connection) -> None:
    """Takes (store, pushes, with pulls) and gives the seconds that they took from the signal on."""
    enter(namespace)
    with ExitStack() as stack:
        stores = {name: stack.enter_context(open_store(address)) for name, address in addresses.items()}
        for store in stores.values():
            store.join(rank)
        flat = np.empty(next(iter(stores.values())).layout.flat_elements, np.float32)
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            name, pushes, pulls = asked
            began = time.perf_counter()
            for _ in range(pushes):
                step(stores[name], flat if pulls else None)
            pipe.send(time.perf_counter() - began)


@contextmanager
def process(function: Any, *arguments: Any) -> Iterator[Connection]:
    mine, theirs = SPAWN.Pipe()
    one: BaseProcess = SPAWN.Process(target=function, args=(*arguments, theirs), daemon=True)
    one.start()
    try:
        yield mine
        mine.send(None)
    finally:
        one.join(30)


def joined(*addresses: str) -> str:
    hosts = [address.removeprefix("tcp://").partition("/")[0] for address in addresses]
    name = addresses[0].partition("?")[0].rpartition("/")[2]
    return f"tcp://{','.join(hosts)}/{name}?insecure=1"


def create(namespace: str, addresses: dict[str, str], n: int, pipe: Connection) -> None:
    enter(namespace)
    for address in addresses.values():
        create_store(address, {"w": np.zeros(n)}, batches=[1] * WORKERS, policy="asp:scaling=none").close()
    pipe.send(None)
    pipe.recv()


def check(namespace: str, addresses: dict[str, str], pipe: Connection) -> None:
    """Return whether every parameter of each store is its version."""
    enter(namespace)
    found = []
    for address in addresses.values():
        with open_store(address) as store:
            snapshot = store.snapshot()
            found.append(bool((snapshot.tensors["w"] == snapshot.version).all()))
    pipe.send(found)
    pipe.recv()


def throughput(rate: str, n: int, pushes: int, rounds: int) -> dict[tuple[str, bool], list[float]]:
    """Pushes a second of all workers, by the servers' number and whether each push came with a pull."""
    found: dict[tuple[str, bool], list[float]] = {}
    with ExitStack() as stack:
        hosts = stack.enter_context(star(rate, 2 + WORKERS))
        home = stack.enter_context(
            process(serve, hosts.hosts[0], hosts.addresses[0], ["alone", "shared"], None)
        )
        alone, first = home.recv()
        far = stack.enter_context(process(serve, hosts.hosts[1], hosts.addresses[1], ["shared"], first))
        addresses = {"one server": alone, "two servers": joined(first, *far.recv())}
        with process(create, hosts.hosts[2], addresses, n) as made:
            made.recv()
        workers = [
            stack.enter_context(process(work, hosts.hosts[2 + k], k, addresses)) for k in range(WORKERS)
        ]
        for worker in workers:
            worker.recv()
        for k in range(rounds + 1):
            for pulls in (False, True):
                for name in addresses:
                    for worker in workers:
                        worker.send((name, pushes if k else 1, pulls))
                    seconds = max(worker.recv() for worker in workers)
                    if k:
                        found.setdefault((name, pulls), []).append(WORKERS * pushes / seconds)
            with process(check, hosts.hosts[2], addresses) as checked:
                assert checked.recv() == [True, True], "a parameter is not its store's version"
    return found


def report(rate: str, n: int, found: dict[tuple[str, bool], list[float]], save: bool) -> bool:
    rows = [[f"pushes of {WORKERS} workers, links of {rate}", "a second (range)", "x one server"]]
    met = True
    for (name, pulls), rates in found.items():
        middle = statistics.median(rates)
        ratio = middle / statistics.median(found["one server", pulls])
        met = met and (name == "one server" or pulls or ratio >= BAR)
        text = f"{middle:.2f} ({min(rates):.2f} to {max(rates):.2f})"
        rows.append([f"{name}, {'push and pull' if pulls else 'push'}", text, f"{ratio:.2f}"])
    verdict = f"Two servers take {'at least' if met else 'less than'} {BAR} times one server's pushes."
    text = f"{machine()}; {n:,} fp32 parameters, no encoding.\n\n{table(rows)}\n\n{verdict}"
    print(text)
    if save:
        save_table("shards", text)
    return met


def push_on(address: str, rank: int, pipe: Connection) -> None:
    """Push until something is lost; "+" before each push, "." after it."""
    try:
        with open_store(address) as store:
            store.join(rank)
            while True:
                claim, staging = store.start(), store.stage()
                staging.flat.fill(-1.0)
                pipe.send("+")
                store.push(staging, claim.count, ADDS_ONE)
                pipe.send(".")
                flat, version = store.pull()
                if set(flat.tolist()) != {float(version)}:
                    pipe.send("x")
    except (PypsError, OSError):
        return


class Storm:
    """Two servers and two workers on loopback, and what the workers have said."""

    def __init__(self, folder: Path, n: int) -> None:
        self.ports, self.said = [_free_port() for _ in range(2)], {"+": 0, ".": 0, "x": 0}
        self.folder, self.n = folder, n
        self.servers: list[subprocess.Popen[bytes]] = [self.serve(k) for k in range(2)]
        self.address = joined(*(f"tcp://127.0.0.1:{port}/model" for port in self.ports))
        self.pipes: dict[int, Connection] = {}
        self.workers: dict[int, BaseProcess] = {}

    def serve(self, k: int) -> subprocess.Popen[bytes]:
        place = self.folder / str(k)
        place.mkdir(exist_ok=True)
        options = ["--bind", f"tcp://127.0.0.1:{self.ports[k]}", "--insecure", "--client-timeout", "1"]
        if k:
            options += ["--home", f"tcp://127.0.0.1:{self.ports[0]}/model?insecure=1"]
        server = subprocess.Popen(
            [PYPS, "serve", "model", *options],
            env={**os.environ, "PYPS_SHM_DIR": str(place)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert server.stdout is not None
        server.stdout.readline()
        return server

    def listen(self) -> None:
        for rank, pipe in list(self.pipes.items()):
            try:
                while pipe.poll():
                    self.said[pipe.recv()] += 1
            except (EOFError, OSError):
                del self.pipes[rank]

    def keep_working(self) -> None:
        """Start workers in place of those that have ended."""
        for rank in range(WORKERS):
            if rank not in self.workers or not self.workers[rank].is_alive():
                self.listen()
                mine, theirs = SPAWN.Pipe(duplex=False)
                worker = SPAWN.Process(target=push_on, args=(self.address, rank, theirs), daemon=True)
                worker.start()
                theirs.close()
                self.pipes[rank], self.workers[rank] = mine, worker

    def kill(self, victim: str) -> None:
        if victim == "worker":
            os.kill(self.workers[0].pid or 0, signal.SIGKILL)
            self.workers[0].join()
            return
        k = 0 if victim == "first server" else 1
        self.servers[k].kill()
        self.servers[k].wait()
        self.servers[k] = self.serve(k)

    def run_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.listen()
            self.keep_working()
            time.sleep(0.01)

    def wait_for_pushes(self, more: int) -> None:
        goal = self.said["."] + more
        while self.said["."] < goal:
            self.run_for(0.05)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def storm(kills: int, n: int, seed: int) -> bool:
    draw = random.Random(seed)
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        one = Storm(Path(folder), n)
        try:
            create_store(
                one.address,
                {"w": np.zeros(n)},
                batches=[1] * WORKERS,
                policy="asp:scaling=none",
                chunk_params=1024,
            ).close()
            for k in range(kills):
                one.wait_for_pushes(5)
                one.run_for(draw.uniform(0.0, 0.2))
                victim = draw.choice(["worker", "far server", "first server"])
                one.kill(victim)
                print(f"{k + 1}: {victim} killed after {one.said['.']} pushes", flush=True)
            one.wait_for_pushes(5)
            for worker in one.workers.values():
                worker.kill()
                worker.join()
            one.listen()
            with open_store(one.address) as store:
                snapshot = store.snapshot()
            values = set(snapshot.tensors["w"].tolist())
            exact = values == {float(snapshot.version)} and not one.said["x"]
            counted = one.said["."] <= snapshot.version <= one.said["+"]
            print(
                f"version {snapshot.version}, every parameter {sorted(values)}; "
                f"pushes begun {one.said['+']}, confirmed {one.said['.']}; "
                f"pulls that were not one version: {one.said['x']}"
            )
            return exact and counted
        finally:
            for server in one.servers:
                server.terminate()
                server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, help="default: 5,000,000; with --kills 8,192")
    parser.add_argument("--rate", default="200mbit", help="of each link, as tc writes it")
    parser.add_argument("--pushes", type=int, default=6, help="of each worker in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args()
    if options.kills:
        met = storm(options.kills, options.parameters or 8192, options.seed)
    else:
        n = options.parameters or 5_000_000
        met = report(
            options.rate, n, throughput(options.rate, n, options.pushes, options.rounds), options.save
        )
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
