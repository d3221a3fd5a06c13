"""How fast a worker's values travel: to the store in shared memory, or to a peer of its process group.

A message of n bytes takes latency + n / bytes_per_second one way; the line is fitted as a profile's is.
Through the store, one way is half of what a worker's step takes more than the same step in torch: push, pull
and SGD step, hooks, copies to and from the device, and the worker's own Python. In a process group it is half
of a message and its echo, by torch's gloo over TCP.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from pyps.errors import InputError
from pyps.formats import Link
from pyps.profiler.fit import link_model

SIZES_BYTES = tuple(1 << k for k in range(12, 26))  # 4 KiB to 32 MiB
REPEATS, WARM_UP = 15, 8
LEAST_SHARE = 0.01  # of a step: a smaller difference is lost in its noise
TIMEOUT_SECONDS = 60.0

T = TypeVar("T")


def probe_store(sizes: Sequence[int] = SIZES_BYTES, repeats: int = REPEATS, device: str = "cpu") -> Link:
    """The way of a worker on this device to a store on this machine. sizes in bytes. Raises StoreError, as
    OutOfSpace.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a push has by default
    try:
        seconds = {size: _store_seconds(size, repeats, device) for size in sizes}
    finally:
        torch.set_num_threads(threads)
    return link_model("store", seconds)


def _store_seconds(size: int, repeats: int, device: str) -> list[float]:
    """Half of what a step of `size` bytes of parameters takes more by a worker, a few times."""
    plain = _step_seconds(size, repeats, device, _alone)
    worked = _step_seconds(size, repeats, device, _worked)
    least = statistics.median(plain)
    return [max(LEAST_SHARE * seconds, seconds - least) / 2 for seconds in worked]


def _step_seconds(
    size: int, repeats: int, device: str, run: Callable[[Any, int, Callable[[], None]], None]
) -> list[float]:
    """Seconds of each step, warm. run: takes steps, and calls after each."""
    import torch

    model = torch.nn.Linear(1, size // 8, device=device)  # as many weights as biases
    ends: list[float] = []

    def ended() -> None:
        if model.weight.is_cuda:
            torch.cuda.synchronize(device)
        ends.append(time.perf_counter())

    run(model, repeats + WARM_UP, ended)
    return [after - before for before, after in pairwise(ends[WARM_UP - 1 :])]


def _alone(model: Any, steps: int, ended: Callable[[], None]) -> None:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1, 1, device=model.weight.device)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        ended()


def _worked(model: Any, steps: int, ended: Callable[[], None]) -> None:
    import torch

    from pyps.worker.step.loop import join

    x = torch.ones(1, 1, device=model.weight.device)
    with join(f"link-{os.getpid()}", 0, batches=[1], samples=steps + 1, policy="asp") as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        for k, _ in enumerate(worker.batches((x.expand(8, 1),))):
            if k:
                ended()
            model(x).sum().backward()
            worker.step()


def probe_group(
    address: str | None = None, sizes: Sequence[int] = SIZES_BYTES, repeats: int = REPEATS
) -> Link:
    """The way to the peer that answers at "host:port" (see `answer`); None: to one started here, over
    loopback. Raises InputError if no peer answers within a minute.
    """
    if address is not None:
        return link_model("gloo", _in_group(address, 1, lambda: _ask(sizes, repeats)))
    here = f"127.0.0.1:{_free_port()}"
    peer = multiprocessing.get_context("spawn").Process(target=answer, args=(here,), daemon=True)
    peer.start()
    try:
        return link_model("gloo", _in_group(here, 1, lambda: _ask(sizes, repeats)))
    finally:
        peer.join(TIMEOUT_SECONDS)
        peer.kill()


def answer(address: str) -> None:
    """Listen at "host:port" and echo one probe_group's messages. Raises InputError after a minute."""
    _in_group(address, 0, _echo)


def _in_group(address: str, rank: int, body: Callable[[], T]) -> T:
    import torch.distributed as dist

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError("link", "address", repr(address), "host:port")
    try:
        limit = datetime.timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", f"tcp://{address}", limit, world_size=2, rank=rank)
    except (RuntimeError, ValueError) as error:
        found = str(error).splitlines()[0]
        expected = "a peer there: pyps-profile link --answer HOST:PORT"
        raise InputError("link", address, found, expected) from None
    try:
        return body()
    finally:
        dist.destroy_process_group()


def _ask(sizes: Sequence[int], repeats: int) -> dict[int, list[float]]:
    import torch
    import torch.distributed as dist

    seconds: dict[int, list[float]] = {}
    for size in sizes:
        dist.send(torch.tensor([size, repeats]), dst=0)
        message = torch.zeros(size, dtype=torch.uint8)
        seconds[size] = []
        for _ in range(repeats):
            began = time.perf_counter()
            dist.send(message, dst=0)
            dist.recv(message, src=0)
            seconds[size].append((time.perf_counter() - began) / 2)
    dist.send(torch.tensor([0, 0]), dst=0)
    return seconds


def _echo() -> None:
    import torch
    import torch.distributed as dist

    wanted = torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(wanted, src=1)
        size, repeats = (int(x) for x in wanted)
        if not 0 < size <= max(SIZES_BYTES):
            return
        message = torch.zeros(size, dtype=torch.uint8)
        for _ in range(repeats):
            dist.recv(message, src=1)
            dist.send(message, dst=1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
