"""The thread of one remote client: on the store's machine it is the client's participant and runs its calls.

Calls are done one at a time, in order; each gives one reply. When the client has timed out or hung up, its
call stops waiting and the thread leaves the store: samples claimed and not pushed go back, as those of a dead
process do.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

import msgspec

from pyps.errors import InvalidArgument, PypsError, StoreError, WaitInterrupted
from pyps.formats.records import Span
from pyps.native import interrupt
from pyps.native.transfer import Transferred
from pyps.profiler.host_memory import trim_malloc
from pyps.remote.bounds import AnswerRoom
from pyps.remote.framing import Frames, to_frames
from pyps.remote.handlers import STRANGER, LinkSession
from pyps.remote.outbox import Outbox
from pyps.remote.site import Site, Whose
from pyps.remote.wire import (
    MAX_MESSAGE_CHARACTERS,
    Answer,
    Call,
    Failure,
    encode,
    encode_raw,
    failure,
)


@dataclass(frozen=True)
class SessionReply:
    """Hold what a session's call gave: a header, and numbers, and their room in the server's memory."""

    session: bytes
    seq: int
    frames: list[Any]
    room: AnswerRoom


class SessionThread(threading.Thread):
    """Does calls in order and puts a SessionReply for each into `outbox`, until `end`.

    peer: whose session it is. previous: the thread that the session had before, which is ending.
    """

    def __init__(
        self, session: bytes, peer: str, site: Site, outbox: Outbox, previous: SessionThread | None
    ) -> None:
        super().__init__(name=f"pyps-session-{session[:4].hex()}", daemon=True)
        self.peer = peer
        self.past = STRANGER  # what the session was, once the thread has left
        self._work: queue.SimpleQueue[tuple[Call, Frames] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._session, self._site, self._outbox, self._previous = session, site, outbox, previous

    def do(self, call: Call, numbers: Frames) -> None:
        """Do this call after those before it."""
        self._work.put((call, numbers))

    def end(self) -> None:
        """Let the call under way stop waiting, refuse those behind it, and leave. Does not wait for that."""
        self._ended.set()
        self._work.put(None)

    def run(self) -> None:
        past = STRANGER
        if self._previous is not None:
            self._previous.join()  # until then its rank is taken; nothing in it waits any more
            past, self._previous = self._previous.past, None
        interrupt.end_waits_on(self._ended)
        calls = LinkSession(self._site, Whose(self._session, self.peer), past)
        try:
            while (item := self._work.get()) is not None:
                call, numbers = item
                frames = self._frames(calls, call, numbers)
                room = calls.answered(sum(len(frame) for frame in frames))
                self._outbox.put(SessionReply(self._session, call.seq, frames, room))
                made = call.verb == "create"
                del item, call, numbers, frames, room  # a gradient is not kept until the next one
                if made:
                    trim_malloc()  # as much as a whole store, once
        finally:
            self.past = calls.past
            calls.close()

    def _frames(self, calls: LinkSession, call: Call, numbers: Frames) -> list[Any]:
        """Give what answers a call; those that the session's end interrupts or comes before were not done."""
        if self._ended.is_set():
            return [failure(call.seq, calls.late(call.verb))]
        try:
            return _done(calls, call, numbers)
        except WaitInterrupted as error:
            if error.staged is not None:
                waits: Span = ("wait", 0.0, error.staged.wait_seconds)
                reply = Transferred(error.staged, fenced=True, spans=(waits,))
                return [encode(Answer(call.seq, encode_raw(reply)))]
            return [failure(call.seq, calls.late(call.verb))]


def _done(calls: LinkSession, call: Call, numbers: Frames) -> list[Any]:
    try:
        value, frames = calls.do(call.verb, call.arguments, numbers)
        return [encode(Answer(call.seq, encode_raw(value))), *to_frames(frames)]
    except WaitInterrupted:
        raise
    except StoreError as error:
        return [failure(call.seq, error)]
    except (PypsError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return [failure(call.seq, InvalidArgument(call.verb[:40], str(error)))]
    except Exception as error:  # an error of one client must not reach the others
        text = f"{type(error).__name__}: {error}"
        return [encode(Failure(call.seq, StoreError.code, call.verb[:40], text[:MAX_MESSAGE_CHARACTERS]))]
