"""One hostile key against a server with four honest workers, whose links have a delay: what becomes of them.

    python tests/helpers/hostile_key.py [--minutes 10] [--delay-ms 1 40 100]

The key, which is bound to ranks beyond the plan, opens connections with a ping each, as many as it can,
sessions, and new workers, which stage. Prints a line for each delay: the four's steps, seconds until a fifth
worker has joined, the key's connections, and the size of the store's segment by what it may have at most.
Exit code 1 where a worker fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from pyps.errors import PypsError
from pyps.native.values import Hyper
from pyps.remote import create_store, open_store
from pyps.remote.address import parse_address
from pyps.remote.keys import KeyFolder, read_client_keys
from pyps.remote.server import Server
from pyps.remote.wire import Ping, encode
from pyps.store import Store

WORKERS, PARAMETERS, JOIN_SECONDS = 4, 200_000, 2.0


class SlowRelay:
    """A TCP relay whose bytes arrive `delay` seconds later, each way."""

    def __init__(self, target: tuple[str, int], delay: float) -> None:
        self._target, self._delay = target, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        held: list[tuple[float, bytes]] = []
        one.settimeout(0.0005)
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(TimeoutError):
                    data = one.recv(1 << 16)
                    if not data:
                        break
                    held.append((time.monotonic() + self._delay, data))
                while held and held[0][0] <= time.monotonic():
                    other.sendall(held.pop(0)[1])
        for end in (one, other):
            end.close()

    def close(self) -> None:
        self._listener.close()


def attack(address: str, until: threading.Event) -> None:
    """All that one key can open, again and again."""
    own, endpoint = read_client_keys(parse_address(address).keys or ""), parse_address(address).endpoint
    with ExitStack() as stack, zmq.Context() as context:
        context.max_sockets = 4096
        held: list[Any] = []
        while not until.is_set():
            with contextlib.suppress(zmq.ZMQError):
                one = context.socket(zmq.DEALER)
                one.linger, one.reconnect_ivl, one.curve_serverkey = 0, -1, own.server.encode()
                one.curve_publickey, one.curve_secretkey = own.public.encode(), own.secret.encode()
                one.connect(endpoint)
                one.send(encode(Ping(secrets.token_bytes(16))), zmq.NOBLOCK)
                held.append(one)
            if len(held) % 20 == 10 and len(held) < 1000:
                with contextlib.suppress(PypsError):
                    store = stack.enter_context(open_store(address))
                    store.join(WORKERS + 1 + len(held) // 20 % 26, "new_worker")
                    store.start(timeout=0.01)
                    store.push(store.stage(), 1, Hyper(lr=0.0), timeout=0.01)
            if len(held) >= 600:
                for old in held[:300]:
                    old.close()
                del held[:300]
            until.wait(0.002)
        for one in held:
            one.close()


def train(store: Store, until: threading.Event, steps: list[int], errors: list[str]) -> None:
    gradient = np.full(store.layout.flat_elements, 1e-3, np.float32)
    try:
        while not until.is_set():
            claim, staging = store.start(), store.stage()
            staging.flat[:] = gradient
            store.push(staging, claim.count, Hyper(lr=0.01))
            store.pull()
            steps[0] += 1
    except PypsError as error:
        errors.append(repr(error))


def trial(delay: float, seconds: float) -> bool:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, ExitStack() as stack:
        os.environ["PYPS_SHM_DIR"] = shm
        keys = Path(shm) / "keys"
        KeyFolder.open(keys).add("honest")
        KeyFolder.open(keys).add("hostile", range(WORKERS + 1, 32))
        server = stack.enter_context(Server("model", keys=keys))
        found = parse_address(f"{server.address}?keys={keys / 'honest.key'}")
        relay = stack.enter_context(contextlib.closing(SlowRelay((found.host, found.port), delay)))
        honest = f"tcp://127.0.0.1:{relay.port}/model?keys={keys / 'honest.key'}"
        options: dict[str, Any] = {"batches": [4] * WORKERS, "policy": "asp", "max_participants": 64}
        stores = [create_store(honest, {"w": np.zeros(PARAMETERS, np.float32)}, **options)]
        stores += [open_store(honest) for _ in range(WORKERS - 1)]
        until, errors, steps = threading.Event(), list[str](), [[0] for _ in stores]
        for rank, store in enumerate(stores):
            stack.enter_context(store).join(rank)
        planned = Path(shm, "pyps-model").stat().st_blocks * 512
        threads = [
            threading.Thread(target=train, args=(store, until, steps[k], errors))
            for k, store in enumerate(stores)
        ]
        hostile = f"{server.address}?keys={keys / 'hostile.key'}"
        threads.append(threading.Thread(target=attack, args=(hostile, until)))
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        began = time.monotonic()
        fifth = stack.enter_context(open_store(honest))
        fifth.join(WORKERS, "new_worker")
        took = time.monotonic() - began
        theirs = sum(one.peer == "key 'hostile'" for one in list(server._connections._open.values()))
        segment = Path(shm, "pyps-model").stat().st_blocks * 512
        most = planned + 4 * fifth.layout.flat_elements * fifth.layout.staging_buffers * (WORKERS + 1 + 32)
        until.set()
        for thread in threads:
            thread.join()
        counted = " ".join(str(one[0]) for one in steps)
        print(
            f"{1000 * delay:g} ms: steps {counted}; a fifth joined in {took:.2f} s; {theirs} connections of "
            f"the key; segment {segment / most:.2f} of its bound; {errors or 'no error'}",
            flush=True,
        )
        return not errors and all(one[0] for one in steps) and took < JOIN_SECONDS + 8 * delay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each delay")
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[1.0, 40.0, 100.0])
    options = parser.parse_args()
    passed = [trial(delay / 1000, 60 * options.minutes) for delay in options.delay_ms]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
