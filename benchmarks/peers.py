"""A push and a pull compared with gloo, torch rpc, a Ray actor and hivemind's averager:

    python benchmarks/peers.py [--parameters 25000000] [--rounds 7] [--save]

Ours: one worker pushes its gradient and takes the SGD step in the store (an exchange; and as two calls, push
and pull). gloo: the gradient is sent to a process that steps and sends the parameters back. rpc and Ray: a
call of a server object with the gradient, which steps and returns the parameters. hivemind: two peers give
their gradients and get the mean, without the time in which it looks for peers. All on one machine, each
process with one thread; servers step in place with w -= lr * g. Rounds are interleaved; medians with range.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from ray_token import use_ray_token
from record import machine, milliseconds, save_table, seconds_of, table

from pyps import Hyper, Store

LR = 1e-3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ours(n: int) -> Iterator[dict[str, Callable[[], float]]]:
    with Store.create(
        f"peers-{os.getpid()}", {"w": np.zeros(n, np.float32)}, batches=[1], policy="asp", max_participants=2
    ) as store:
        store.join()
        flat = np.zeros(store.layout.flat_elements, np.float32)

        def staged() -> Any:
            store.start()
            staging = store.stage()
            staging.flat.fill(1e-3)
            return staging

        def exchange() -> float:
            staging = staged()
            return seconds_of(lambda: store.exchange(staging, 1, Hyper(lr=LR), flat))

        def push_and_pull() -> float:
            staging = staged()
            return seconds_of(lambda: (store.push(staging, 1, Hyper(lr=LR)), store.pull(flat)))

        yield {"pyps exchange": exchange, "pyps push + pull": push_and_pull}


def gloo_server(n: int, method: str) -> None:
    """Steps with gradients of rank 0 and sends the parameters back, until no more come."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=method, rank=1, world_size=2)
    weights, gradient, more = torch.zeros(n), torch.zeros(n), torch.zeros(1)
    while True:
        dist.recv(more, 0)
        if not more:
            break
        dist.recv(gradient, 0)
        weights.sub_(gradient, alpha=LR)
        dist.send(weights, 0)
    dist.destroy_process_group()


@contextmanager
def gloo(n: int) -> Iterator[dict[str, Callable[[], float]]]:
    import torch
    import torch.distributed as dist

    method = f"tcp://127.0.0.1:{free_port()}"
    server = multiprocessing.get_context("spawn").Process(target=gloo_server, args=(n, method), daemon=True)
    server.start()
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=2)
    gradient, weights = torch.full((n,), 1e-3), torch.zeros(n)

    def turn() -> float:
        dist.send(torch.ones(1), 1)
        return seconds_of(lambda: (dist.send(gradient, 1), dist.recv(weights, 1)))

    yield {"gloo send + recv": turn}
    dist.send(torch.zeros(1), 1)
    dist.destroy_process_group()
    server.join(30)


WEIGHTS: list[Any] = []


def rpc_step(gradient: Any) -> Any:
    """On the rpc server."""
    import torch

    if not WEIGHTS:
        WEIGHTS.append(torch.zeros_like(gradient))
    return WEIGHTS[0].sub_(gradient, alpha=LR)


def rpc_process(name: str, rank: int, method: str, n: int, pipe: Connection, **transports: Any) -> None:
    """The server, or the client that times a call whenever it is asked to."""
    import torch
    import torch.distributed.rpc as rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=method, rpc_timeout=120, **transports)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    if name == "client":
        gradient = torch.full((n,), 1e-3)
        while pipe.recv():
            pipe.send(seconds_of(lambda: rpc.rpc_sync("server", rpc_step, args=(gradient,))))
    rpc.shutdown()


@contextmanager
def torch_rpc(n: int) -> Iterator[dict[str, Callable[[], float]]]:
    method, context = f"tcp://127.0.0.1:{free_port()}", multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    processes = [
        context.Process(target=rpc_process, args=(name, rank, method, n, theirs), daemon=True)
        for rank, name in enumerate(("server", "client"))
    ]
    for process in processes:
        process.start()

    def turn() -> float:
        mine.send(True)
        return float(mine.recv())

    yield {"torch rpc": turn}
    mine.send(False)
    for process in processes:
        process.join(30)


class Parameters:
    """A parameter server made with nothing but Ray."""

    def __init__(self, n: int) -> None:
        self.weights = np.zeros(n, np.float32)

    def step(self, gradient: Any) -> Any:
        self.weights -= np.float32(LR) * gradient
        return self.weights


def ray_bytes(n: int) -> int:
    """The object store of a Ray actor's host: four steps' arrays, and no less than Ray allows."""
    return max(64 * n, 80 << 20)


@contextmanager
def ray_actor(n: int) -> Iterator[dict[str, Callable[[], float]]]:
    use_ray_token()
    try:
        import ray
    except ImportError:
        print("Ray is not installed: its row is left out")
        yield {}
        return
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(num_cpus=2, object_store_memory=min(ray_bytes(n), 4 << 30), **options)
    actor = ray.remote(Parameters).remote(n)
    gradient, weights = np.full(n, 1e-3, np.float32), np.zeros(n, np.float32)

    def turn() -> float:
        """The result is copied: what Ray returns is a read-only view of its own memory."""
        return seconds_of(lambda: np.copyto(weights, ray.get(actor.step.remote(gradient))))

    try:
        yield {"Ray actor": turn}
    finally:
        ray.shutdown()


MATCHMAKING = 0.5  # seconds that hivemind looks for peers, 5 by default: for the internet


def averager(n: int, addresses: list[str]) -> tuple[Any, Any]:
    """A peer of hivemind's, and its table of peers."""
    import hivemind
    import torch

    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=addresses, start=True)
    options = {"target_group_size": 2, "min_matchmaking_time": MATCHMAKING}
    tensors = [torch.full((n,), 1e-3)]
    return hivemind.DecentralizedAverager(tensors, dht, prefix="peers", start=True, **options), dht


def hivemind_partner(n: int, addresses: list[str], pipe: Connection) -> None:
    """The other peer, which averages whenever it is asked to."""
    multiprocessing.set_start_method("fork", force=True)  # it hands on what cannot be sent
    peer, dht = averager(n, addresses)
    pipe.send(True)
    while pipe.recv():
        peer.step(timeout=120)
    peer.shutdown()
    dht.shutdown()


@contextmanager
def hivemind_averager(n: int) -> Iterator[dict[str, Callable[[], float]]]:
    try:
        from hivemind.averaging.control import AveragingStage
    except ImportError:
        print("hivemind is not installed: its row is left out")
        yield {}
        return
    peer, dht = averager(n, [])
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    addresses = list(map(str, dht.get_visible_maddrs()))
    partner = context.Process(target=hivemind_partner, args=(n, addresses, theirs))
    partner.start()
    theirs.close()  # recv() raises if the partner ends
    mine.recv()

    def turn() -> float:
        mine.send(True)
        step = peer.step(timeout=120, wait=False, require_trigger=True)
        while step.stage is not AveragingStage.AWAITING_TRIGGER:
            if step.done():
                raise TimeoutError("hivemind found no group")
            time.sleep(0.01)

        def average() -> None:
            step.allow_allreduce()
            if step.result() is None:
                raise TimeoutError("hivemind found no group")

        return seconds_of(average)

    try:
        yield {"hivemind's averager": turn}
    finally:
        mine.send(False)
        partner.join(30)
        partner.kill()
        peer.shutdown()
        dht.shutdown()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    n = options.parameters
    source, copy = np.ones(n, np.float32), np.zeros(n, np.float32)

    def memcpy_twice() -> float:
        return seconds_of(lambda: (np.copyto(copy, source), np.copyto(source, copy)))

    with ExitStack() as opened:
        turns: dict[str, Callable[[], float]] = {"memcpy, twice": memcpy_twice}
        for way in (ours, gloo, torch_rpc, ray_actor, hivemind_averager):
            turns |= opened.enter_context(way(n))
        times: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(options.rounds + 2):
            for name, turn in turns.items():
                seconds = turn()
                if number >= 2:
                    times[name].append(seconds)
    medians = {name: statistics.median(t) for name, t in times.items()}
    best = medians["pyps push + pull"]
    rows = [["push + pull of the same parameters", "ms (range)", "x pyps push + pull"]]
    rows += [[name, milliseconds(times[name]), f"{medians[name] / best:.2f}"] for name in times]
    text = f"{machine()}; {n:,} fp32 parameters.\n\n{table(rows)}"
    print(text)
    if options.save:
        save_table("peers", text)


if __name__ == "__main__":
    main()
