"""Let keys in: libzmq asks here about each handshake, as ZAP says (ZeroMQ RFC 27).

libzmq accepts connections and reads their messages in threads of its own, faster than a loop that gets little
of a core counts them. So only so many of one key are let in between two counts; the others wait for the next.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from typing import Any

import zmq
from zmq.utils import z85

from pyps.remote.bounds import Bound
from pyps.remote.keys import KeyFolder

ENDPOINT = "inproc://zeromq.zap.01"
CURVE_FRAMES = 9  # who asks, nothing, version, request, domain, address, identity, mechanism, key
ADMITTED, COME_AGAIN, REFUSED = b"200", b"300", b"400"
LET_IN_PART = 8  # of one key's connections so many are let in between two counts


class Admission:
    """Answers libzmq's questions. For the thread that serves. connections: the bound of a server's."""

    def __init__(self, context: zmq.Context[Any], folder: KeyFolder, connections: Bound) -> None:
        self._folder, self._share = folder, connections.share
        self._let_in = Counter[str]()  # of each key since the last count
        self._waiting: dict[str, deque[list[bytes]]] = {}  # questions of each key
        self.questions: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.questions.bind(ENDPOINT)

    def answer(self) -> None:
        """Answer what libzmq has asked, or let it wait."""
        with contextlib.suppress(zmq.Again):
            while True:
                asked = self.questions.recv_multipart(zmq.NOBLOCK)
                name = self._name_of(asked)
                if name is None:
                    self._reply(asked, REFUSED)
                elif self._let_in[name] < self._share // LET_IN_PART:
                    self._let_in[name] += 1
                    self._reply(asked, ADMITTED)
                elif len(waiting := self._waiting.setdefault(name, deque())) < self._share:
                    waiting.append(asked)
                else:
                    self._reply(asked, COME_AGAIN)

    def count_anew(self) -> None:
        """The connections so far are counted: let in those that wait, the first ones first."""
        self._let_in.clear()
        waiting, self._waiting = self._waiting, {}
        for name, questions in waiting.items():
            while questions and self._let_in[name] < self._share // LET_IN_PART:
                self._let_in[name] += 1
                asked = questions.popleft()
                self._reply(asked, REFUSED if self._name_of(asked) is None else ADMITTED)
            if questions:
                self._waiting[name] = questions

    def close(self) -> None:
        self.questions.close(linger=0)

    def _name_of(self, asked: list[bytes]) -> str | None:
        """The client that asks; None: its key is not admitted, or is none."""
        return self._folder.name_of(_key_of(asked)) if len(asked) == CURVE_FRAMES else None

    def _reply(self, asked: list[bytes], status: bytes) -> None:
        user = _key_of(asked).encode() if status == ADMITTED else b""
        self.questions.send_multipart([*asked[:4], status, b"", user, b""])


def _key_of(asked: list[bytes]) -> str:
    return z85.encode(asked[-1]).decode()
