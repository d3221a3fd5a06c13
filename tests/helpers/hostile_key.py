"""One hostile key against a server with four honest workers, whose links have a delay: what becomes of them.

    python tests/helpers/hostile_key.py [--minutes 10] [--delay-ms 1 40 100]

The key, which is bound to ranks beyond the plan, opens connections with a ping each, as many as it can,
sessions, new workers, which stage, and calls of which the last byte never comes. The server is a process of
its own. Prints a line for each delay: the four's steps, seconds until a fifth worker has joined, the key's
connections, and the most that the server's memory and the store's segment had, by what they may have at most.
Exit code 1 where a worker fails, the fifth comes late, or a bound is passed by a fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zmq

from pyps.errors import PypsError
from pyps.native.values import Hyper
from pyps.remote import create_store, open_store
from pyps.remote.address import parse_address
from pyps.remote.keys import ClientKeys, KeyFolder, read_client_keys
from pyps.remote.wire import Call, Ping, encode, encode_raw
from pyps.store import Store

WORKERS, PARAMETERS, JOIN_SECONDS = 4, 200_000, 2.0
FREE_BYTES = 128 << 20  # of memory, as the server has it: a quarter of it is for calls, as much for answers
PACE_SECONDS = 0.02  # that a step computes
OVER = 1.2  # what is measured may be so much of its bound
SERVER = """
import json, sys
from pyps.remote import bounds
from pyps.remote.server import Server
bounds.cpu_free_bytes = lambda: int(sys.argv[2])
with Server("model", keys=sys.argv[1]) as server:
    print(server.address, flush=True)
    for _ in sys.stdin:
        found = server._site.bounds
        theirs = sum(one.peer == "key 'hostile'" for one in list(server._connections._open.values()))
        share = found.calls.share + found.answers.share + bounds.ALL_HELD_BYTES
        print(json.dumps([theirs, found.connections.share, share]), flush=True)
"""


class ServerProcess:
    """A server of `model` in a process of its own."""

    def __init__(self, keys: Path) -> None:
        command = [sys.executable, "-c", SERVER, str(keys), str(FREE_BYTES)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.address = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self) -> tuple[int, int, int]:
        """Connections of the hostile key, how many it may have, and what it may take of the memory."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        theirs, most, share = json.loads(self._line())
        return theirs, most, share

    def own_bytes(self) -> int:
        """Memory that no other process shares."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
        return int(line.split()[1]) << 10

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


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
        with contextlib.suppress(OSError, ValueError):
            while True:
                due = max(0.0, held[0][0] - time.monotonic()) if held else None
                if select.select([one], [], [], due)[0]:
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


def connection(context: zmq.Context[Any], own: ClientKeys, endpoint: str) -> zmq.Socket[bytes]:
    """A connection of a key, which does not come again once it is cut."""
    one: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    one.linger, one.reconnect_ivl, one.curve_serverkey = 0, -1, own.server.encode()
    one.curve_publickey, one.curve_secretkey = own.public.encode(), own.secret.encode()
    one.connect(endpoint)
    return one


def ping() -> list[bytes]:
    return [encode(Ping(secrets.token_bytes(16)))]


def unfinished() -> list[bytes]:
    """A call whose numbers lack their last byte."""
    numbers = 4 * PARAMETERS
    call = Call(secrets.token_bytes(16), 1, "create", encode_raw((0,)), follow=numbers)
    return [encode(call), *(bytes(min(1 << 18, numbers - 1 - at)) for at in range(0, numbers - 1, 1 << 18))]


def unknown() -> list[bytes]:
    """A call of no session, and as many of its numbers as the server queues for a connection, and more."""
    call = Call(secrets.token_bytes(16), 2, "push", encode_raw((0,)), follow=1 << 30)
    return [encode(call), *[bytes(1 << 18)] * 40]


def attack(address: str) -> None:
    """All that one key can open, again and again, until standard input ends."""
    own, endpoint = read_client_keys(parse_address(address).keys or ""), parse_address(address).endpoint
    with ExitStack() as stack, zmq.Context() as context:
        context.max_sockets = 4096
        held: list[zmq.Socket[bytes]] = []
        for count in range(1 << 60):
            if select.select([sys.stdin], [], [], 0.002)[0]:
                break
            with contextlib.suppress(zmq.ZMQError):
                held.append(connection(context, own, endpoint))
                kinds = {5: unfinished, 15: unknown}
                for part in kinds.get(count % 20, ping)():
                    held[-1].send(part, zmq.NOBLOCK)
            if count % 20 == 10 and count < 1000:
                with contextlib.suppress(PypsError):
                    store = stack.enter_context(open_store(address))
                    store.join(WORKERS + 1 + count // 20 % 26, "new_worker")
                    store.start(timeout=0.01)
                    store.push(store.stage(), 1, Hyper(lr=0.0), timeout=0.01)
            if len(held) >= 600:
                for old in held[:300]:
                    old.close()
                del held[:300]
        for one in held:
            one.close()


@contextmanager
def attacked(address: str) -> Iterator[None]:
    """With an attack from another process, as from another machine."""
    with subprocess.Popen([sys.executable, __file__, "--attack", address], stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.communicate()


def train(store: Store, until: threading.Event, steps: list[int], errors: list[str]) -> None:
    gradient = np.full(store.layout.flat_elements, 1e-3, np.float32)
    try:
        while not until.wait(PACE_SECONDS):
            claim, staging = store.start(), store.stage()
            staging.flat[:] = gradient
            store.push(staging, claim.count, Hyper(lr=0.01))
            store.pull()
            steps[0] += 1
    except PypsError as error:
        errors.append(repr(error))


@contextmanager
def running(threads: list[threading.Thread], until: threading.Event) -> Iterator[None]:
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        until.set()
        for thread in threads:
            thread.join()


def trial(delay: float, seconds: float) -> bool:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"PYPS_SHM_DIR": shm}))
        keys, segment = Path(shm) / "keys", Path(shm, "pyps-model")
        KeyFolder.open(keys).add("honest")
        KeyFolder.open(keys).add("hostile", range(WORKERS + 1, 32))
        server = stack.enter_context(closing(ServerProcess(keys)))
        found = parse_address(f"{server.address}?keys={keys / 'honest.key'}")
        relay = stack.enter_context(closing(SlowRelay((found.host, found.port), delay)))
        honest = f"tcp://127.0.0.1:{relay.port}/model?keys={keys / 'honest.key'}"
        options: dict[str, Any] = {"batches": [4] * WORKERS, "policy": "asp", "max_participants": 64}
        stores = [create_store(honest, {"w": np.zeros(PARAMETERS, np.float32)}, **options)]
        stores += [open_store(honest) for _ in range(WORKERS - 1)]
        for rank, store in enumerate(stores):
            stack.enter_context(store).join(rank)
        quiet, until, errors, steps = threading.Event(), threading.Event(), list[str](), [[0] for _ in stores]
        with running([train_thread(s, quiet, [0], errors) for s in stores], quiet):
            time.sleep(1.0 + 10 * delay)  # what honest work takes of the server's memory
        planned, base = segment.stat().st_blocks * 512, server.own_bytes()
        threads = [train_thread(store, until, steps[k], errors) for k, store in enumerate(stores)]
        hostile = f"{server.address}?keys={keys / 'hostile.key'}"
        with running(threads, until), attacked(hostile):
            took, theirs, memory = watch(server, honest, seconds)
            counted = [one[0] for one in steps]
        flat = 4 * stores[0].layout.flat_elements * stores[0].layout.staging_buffers
        used = segment.stat().st_blocks * 512 / (planned + flat * (WORKERS + 1 + 32))
        most, share = server.ask()[1:]
        in_bounds = theirs <= OVER * most and memory <= OVER * (base + share) and used <= OVER
        passed = not errors and all(counted) and took < JOIN_SECONDS and in_bounds
        print(
            f"{1000 * delay:g} ms: {'passed' if passed else 'FAILED'}: steps {' '.join(map(str, counted))}; "
            f"a fifth joined in {took:.2f} s (below {JOIN_SECONDS:g}); of their bounds (at most {OVER}): "
            f"memory {memory / (base + share):.2f} ({memory >> 20} MiB, before {base >> 20}), "
            f"segment {used:.2f}, {theirs} of {most} connections of the key; {errors or 'no error'}",
            flush=True,
        )
        return passed


def train_thread(
    store: Store, until: threading.Event, steps: list[int], errors: list[str]
) -> threading.Thread:
    return threading.Thread(target=train, args=(store, until, steps, errors))


def watch(server: ServerProcess, honest: str, seconds: float) -> tuple[float, int, int]:
    """Seconds that a fifth worker's join takes in the end; the key's most connections, the most memory."""
    end, theirs, memory = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        time.sleep(min(0.5, seconds / 4))
        theirs, memory = max(theirs, server.ask()[0]), max(memory, server.own_bytes())
    began = time.monotonic()
    try:
        with open_store(honest) as fifth:
            fifth.join(WORKERS, "new_worker")
            return time.monotonic() - began, theirs, memory
    except PypsError as error:
        print(f"a fifth did not join: {error}")
        return float("inf"), theirs, memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each delay")
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[1.0, 40.0, 100.0])
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack is not None:
        attack(options.attack)
        return 0
    passed = [trial(delay / 1000, 60 * options.minutes) for delay in options.delay_ms]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
