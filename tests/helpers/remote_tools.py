"""Define what the tests of the link share: a relay that can hold back and cut, and clients made by hand."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from pyps.native.transfer import Ask, TransferRequest
from pyps.native.values import Hyper, PushResult
from pyps.remote import open_store
from pyps.remote.address import parse_address
from pyps.remote.framing import FRAME_BYTES
from pyps.remote.keys import KeyFolder, ServerKeys
from pyps.remote.wire import Answer, Call, Failure, Pong, decode_reply, encode, encode_raw
from pyps.store import Store

PATIENCE_SECONDS = 20.0
HYPER = Hyper(lr=0.5)
SIZE = 3000  # of the parameters `w`


def eventually(what: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until it is so; fail if it never is."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def make_keys(folder: Path) -> ServerKeys:
    """The server's keys, and with new ones those of a first client."""
    found = KeyFolder.open(folder)
    found.save()
    return found.keys


class Relay:
    """A TCP relay. While `deaf`, what the server says is swallowed; `cut` ends all connections.

    breaks_every: of the server's pieces one in so many is swallowed, and all connections end; 0: never.
    """

    def __init__(self, address: str, breaks_every: int = 0) -> None:
        target = parse_address(address)
        self._target = (target.host, target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}/{target.store}?insecure=1"
        self.deaf = threading.Event()
        self.swallowed = 0
        self._breaks_every, self._pieces = breaks_every, 0
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._upstream: set[socket.socket] = set()
        self._cut = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._drop_all()
        self._listener.close()

    def cut(self) -> None:
        """End every connection that there is; new ones are relayed."""
        self._cut.set()
        eventually(lambda: not self._cut.is_set())

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._cut.is_set():
                self._drop_all()
                self._cut.clear()
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                for one in self._pairs:
                    selector.register(one, selectors.EVENT_READ)
                for key, _ in selector.select(0.01):
                    self._serve(key.fileobj)

    def _serve(self, one: Any) -> None:
        if one is self._listener:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            self._pairs[client], self._pairs[server] = server, client
            self._upstream.add(server)
            return
        if one not in self._pairs:
            return
        try:
            data = one.recv(1 << 20)
            self._pieces += one in self._upstream
            if one in self._upstream and self.deaf.is_set():
                self.swallowed += len(data)
            elif one in self._upstream and self._breaks_every and self._pieces % self._breaks_every == 0:
                self._cut.set()
            elif data:
                self._pairs[one].sendall(data)
        except OSError:
            data = b""
        if not data:
            other = self._pairs.pop(one)
            self._pairs.pop(other, None)
            one.close()
            other.close()

    def _drop_all(self) -> None:
        for one in list(self._pairs):
            one.close()
        self._pairs.clear()
        self._upstream.clear()


def pushing(header: Any) -> TransferRequest[Any]:
    """The argument of a transfer that is this push alone."""
    return TransferRequest(header, ask=Ask(pulls=False, alone=True))


class RawClient:
    """A client made by hand, that may say anything. source: the address here that it comes from."""

    def __init__(self, address: str, source: str = "") -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        endpoint = parse_address(address).endpoint
        self.socket.connect(endpoint.replace("//", f"//{source}:0;") if source else endpoint)
        self.session, self.seq = secrets.token_bytes(16), 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def message(self, verb: str, *arguments: Any, follow: int = 0) -> bytes:
        self.seq += 1
        return encode(Call(self.session, self.seq, verb, encode_raw(arguments), self.seq - 1, follow))

    def send(self, message: bytes, numbers: Any = b"") -> None:
        """Send a message, and the numbers that follow it."""
        self.socket.send(message)
        data = memoryview(numbers).cast("B")
        for at in range(0, len(data), FRAME_BYTES):
            self.socket.send(data[at : at + FRAME_BYTES])

    def reply(self, seconds: float = PATIENCE_SECONDS) -> Answer | Failure | Pong | None:
        if not self.socket.poll(seconds * 1000):
            return None
        reply = decode_reply(self.socket.recv_multipart()[0])
        assert isinstance(reply, Answer | Failure | Pong), reply
        return reply

    def ask(self, verb: str, *arguments: Any) -> Answer | Failure | Pong | None:
        self.send(self.message(verb, *arguments))
        return self.reply()


class RawConnection:
    """A connection that speaks ZMTP 3.0 without libzmq, and so may leave a message unfinished."""

    def __init__(self, address: str) -> None:
        target = parse_address(address)
        self.end = socket.create_connection((target.host, target.port))
        self.end.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        self.end.sendall(b"\x04" + bytes([len(ready)]) + ready)
        self.end.settimeout(30)
        self._read(64)  # its greeting

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()

    def part(self, data: bytes, more: bool = True) -> None:
        self.end.sendall(struct.pack(">BQ", 2 + more, len(data)) + data)

    def receive(self) -> bytes:
        """The next part of a message."""
        while True:
            flags = self._read(1)[0]
            size = struct.unpack(">Q", self._read(8))[0] if flags & 2 else self._read(1)[0]
            data = self._read(size)
            if not flags & 4:  # a command
                return data

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.end.recv(size - len(data))
            if not piece:
                raise ConnectionError("the other side ended the connection")
            data += piece
        return data

    def send_until_cut(self, data: bytes, parts: int) -> bool:
        """Send parts without a last one; whether the other side ended the connection."""
        with contextlib.suppress(ConnectionError):
            for _ in range(parts):
                self.part(data)
        return self.ends()

    def ends(self) -> bool:
        """Return whether the other side ends the connection."""
        try:
            while self.end.recv(4096):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True


@contextmanager
def process(code: str, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `code`, gone at the end."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env},
    )  # fmt: skip
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def open_remote(address: str) -> Store:
    store = open_store(address)
    assert store.servers == 1
    return store


def push_ones(store: Store, samples: int) -> PushResult:
    staging = store.stage()
    staging["w"][:] = 1.0
    return store.push(staging, samples, HYPER)


def value(store: Store) -> float:
    """Return what every parameter is."""
    (only,) = set(store.snapshot().tensors["w"].tolist())
    return float(only)
