"""How fast a worker's values travel: to the store in shared memory, or to a peer of its process group.

A message of n bytes takes latency + n / bytes_per_second one way; the line is fitted as a profile's is.
Through the store, one way is half of a push and the pull after it, both with all that they do: the SGD step,
the version. In a process group it is half of a message and its echo, by torch's gloo over TCP.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pyps.errors import InputError
from pyps.formats import Link
from pyps.native.values import Hyper
from pyps.profiler.fit import link_model
from pyps.store.store import Store

SIZES_BYTES = tuple(1 << k for k in range(12, 26))  # 4 KiB to 32 MiB
REPEATS = 15
TIMEOUT_SECONDS = 60.0

T = TypeVar("T")


def probe_store(sizes: Sequence[int] = SIZES_BYTES, repeats: int = REPEATS) -> Link:
    """The way to a store on this machine. sizes in bytes. Raises StoreError, as OutOfSpace."""
    seconds = {size: _store_seconds(size, repeats) for size in sizes}
    return link_model("store", seconds)


def _store_seconds(size: int, repeats: int) -> list[float]:
    """Half of a push and a pull of a store of `size` bytes, a few times."""
    found = []
    values, hyper = {"w": np.zeros(size // 4)}, Hyper(lr=0.1)
    with Store.create(f"link-{os.getpid()}", values, batches=[1], policy="asp", max_participants=1) as store:
        store.join()
        flat, _ = store.pull()
        for _ in range(repeats + 1):
            store.start()
            staging = store.stage()
            staging.flat.fill(1.0)
            began = time.perf_counter()
            store.push(staging, 1, hyper)
            store.pull(flat)
            found.append((time.perf_counter() - began) / 2)
    return found[1:]


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
        raise InputError(
            "link", address, found, "a peer there: pyps-profile link --answer HOST:PORT"
        ) from None
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
