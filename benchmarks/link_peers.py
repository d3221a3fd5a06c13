"""Other ways to carry a gradient there and parameters back between the two hosts of benchmarks/shaped.py.

iperf3 moves the bytes and nothing more. gloo sends and receives. A call of torch's rpc, and of a Ray actor
(Ray's object store carries its argument and its result), takes the step where the parameters are. This
process is on the client's host.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import numpy as np
import peers
from record import seconds_of
from shaped import CLIENT, DEVICE, SERVER, Shaped

Turn = Callable[[], tuple[float, int]]  # seconds and bytes of one step
SPAWN = multiprocessing.get_context("spawn")
CLONE_NEWNET = 0x40000000
GLOO_PORT, RPC_PORT = 6501, 6502
IPERF3 = "iperf3"


def enter(namespace: str) -> None:
    """Make it this process's network, before it has threads."""
    if not namespace:
        return
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


@contextmanager
def iperf3(n: int, pair: Shaped) -> Iterator[dict[str, Turn]]:
    """The bytes of n fp32 numbers there, then back."""
    command = pair.command(pair.server, "iperf3", "--server", "--bind", SERVER)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def one_way(*options: str) -> float:
        client = ["iperf3", "--client", SERVER, "--bytes", str(4 * n), "--json", *options]
        while True:
            done = subprocess.run(client, capture_output=True, text=True)
            if not done.returncode:
                return 4 * n * 8 / json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]
            if server.poll() is not None:
                raise RuntimeError(f"iperf3: {done.stdout}")

    try:
        yield {IPERF3: lambda: (one_way() + one_way("--reverse"), 8 * n)}
    finally:
        server.terminate()
        server.wait()


def gloo_server(namespace: str, n: int, method: str) -> None:
    enter(namespace)
    peers.gloo_server(n, method)


@contextmanager
def gloo(n: int, pair: Shaped) -> Iterator[dict[str, Turn]]:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    method = f"tcp://{CLIENT}:{GLOO_PORT}"
    server = SPAWN.Process(target=gloo_server, args=(pair.server, n, method), daemon=True)
    server.start()
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=2)
    gradient, weights = torch.full((n,), 1e-3), torch.zeros(n)

    def turn() -> tuple[float, int]:
        dist.send(torch.ones(1), 1)
        return seconds_of(lambda: (dist.send(gradient, 1), dist.recv(weights, 1))), 8 * n

    yield {"gloo send + recv": turn}
    dist.send(torch.zeros(1), 1)
    dist.destroy_process_group()
    server.join(30)


def rpc_process(namespace: str, name: str, rank: int, n: int, pipe: Connection) -> None:
    enter(namespace)
    # These two hosts share memory, which TensorPipe would use.
    by_tcp = {"_transports": ["uv"], "_channels": ["basic"]}
    peers.rpc_process(name, rank, f"tcp://{SERVER}:{RPC_PORT}", n, pipe, **by_tcp)


@contextmanager
def torch_rpc(n: int, pair: Shaped) -> Iterator[dict[str, Turn]]:
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    mine, theirs = SPAWN.Pipe()
    hosts = [("server", pair.server), ("client", pair.client)]
    processes = [
        SPAWN.Process(target=rpc_process, args=(host, name, rank, n, theirs), daemon=True)
        for rank, (name, host) in enumerate(hosts)
    ]
    for process in processes:
        process.start()

    def turn() -> tuple[float, int]:
        mine.send(True)
        return float(mine.recv()), 8 * n

    yield {"torch rpc": turn}
    mine.send(False)
    for process in processes:
        process.join(30)


@contextmanager
def ray_actor(n: int, pair: Shaped) -> Iterator[dict[str, Turn]]:
    import on_ray
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    memory = ("--object-store-memory", str(peers.ray_bytes(n)))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir=on_ray.MEMORY))
        stack.enter_context(on_ray.near_raylet(pair, folder, *memory))
        stack.enter_context(on_ray.far_raylet(pair, folder, *memory))
        address = f"{SERVER}:{on_ray.PORT}"
        ray.init(address, _node_ip_address=CLIENT, logging_level="error", log_to_driver=False)
        stack.callback(ray.shutdown)
        actor = ray.remote(peers.Parameters).options(num_cpus=1).remote(n)  # the first host alone has CPUs
        gradient, weights = np.full(n, 1e-3, np.float32), np.zeros(n, np.float32)

        def step() -> None:
            np.copyto(weights, ray.get(actor.step.remote(gradient)))

        yield {"Ray actor (object store)": lambda: (seconds_of(step), 8 * n)}
