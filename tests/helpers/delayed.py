"""A relay that makes a TCP link of a given bandwidth and latency: what arrives leaves `latency` seconds after
it would have crossed a wire of that bandwidth, each way for itself. Latency does not reduce throughput.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from types import TracebackType
from typing import Self

PIECE_BYTES = 1 << 16
PAUSE_SECONDS = 0.2  # how often a thread looks whether the link is closed


class DelayedLink:
    """Relays connections to `port` of this machine; `port` of its own. A context manager.

    latency: seconds, one way. bandwidth: bytes per second of each connection, each way.
    """

    def __init__(self, target: int, latency: float, bandwidth: float) -> None:
        self._target, self._latency, self._bandwidth = target, latency, bandwidth
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PAUSE_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._closed.set()
        self._threads[0].join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._sockets):
            one.close()

    def _start(self, body: object, *arguments: object) -> None:
        thread = threading.Thread(target=body, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for one in (client, server):
                    one.settimeout(None)
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += (client, server)
                for begin, end in ((client, server), (server, client)):
                    way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    self._start(self._take, begin, way)
                    self._start(self._give, end, way)

    def _take(self, begin: socket.socket, way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        """Receive, and note when each piece arrives at the other end."""
        free, data = 0.0, b"?"  # when the wire has carried all that came
        while data:
            try:
                data = begin.recv(PIECE_BYTES)
            except OSError:
                data = b""
            free = max(free, time.monotonic()) + len(data) / self._bandwidth
            way.put((free + self._latency, data))

    def _give(self, end: socket.socket, way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        """Send each piece when it is due; the end of the stream too."""
        while not self._closed.is_set():
            try:
                due, data = way.get(timeout=PAUSE_SECONDS)
            except queue.Empty:
                continue
            time.sleep(max(0.0, due - time.monotonic()))
            with contextlib.suppress(OSError):
                if not data:
                    end.shutdown(socket.SHUT_WR)
                    return
                end.sendall(data)
