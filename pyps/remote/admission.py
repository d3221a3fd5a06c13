"""Let keys in: libzmq asks here about each handshake, as ZAP says (ZeroMQ RFC 27).

libzmq accepts connections and reads their messages in threads of its own, faster than a loop that gets little
of a core counts them. So only so many of one key are let in between two counts; the others are sent away
without a reason, and their clients come again by themselves.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import zmq
from zmq.utils import z85

from pyps.remote.keys import KeyFolder

ENDPOINT = "inproc://zeromq.zap.01"
CURVE_FRAMES = 7  # version, request, domain, address, identity, mechanism, key
ADMITTED, COME_AGAIN, REFUSED = b"200", b"300", b"400"


class Admission:
    """Answers libzmq's questions. For the thread that serves.

    at_once: how many connections of one key are let in until the next `count_anew`.
    """

    def __init__(self, context: zmq.Context[Any], folder: KeyFolder, at_once: int) -> None:
        self._folder, self._at_once = folder, at_once
        self._let_in = Counter[str]()
        self.questions: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.questions.bind(ENDPOINT)

    def answer(self) -> None:
        """Answer what libzmq has asked."""
        with contextlib.suppress(zmq.Again):
            while True:
                version, request, *asked = self.questions.recv_multipart(zmq.NOBLOCK)
                key = z85.encode(asked[-1]) if len(asked) + 2 == CURVE_FRAMES else b""
                status = self._decide(key)
                user = key if status == ADMITTED else b""
                self.questions.send_multipart([version, request, status, b"", user, b""])

    def count_anew(self) -> None:
        """Note that the connections so far are counted."""
        self._let_in.clear()

    def close(self) -> None:
        self.questions.close(linger=0)

    def _decide(self, key: bytes) -> bytes:
        name = self._folder.name_of(key.decode())
        if name is None:
            return REFUSED
        self._let_in[name] += 1
        return ADMITTED if self._let_in[name] <= self._at_once else COME_AGAIN
