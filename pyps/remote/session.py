"""The thread of one remote client: on the store's machine it is the client's participant and runs its calls.

Calls are done one at a time, in order; each gives one reply. When the client has timed out, the thread leaves
the store: samples claimed and not pushed go back, as those of a dead process do.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import msgspec
import zmq

from pyps.errors import InvalidArgument, PypsError, StoreError
from pyps.remote.framing import Frames, to_frames
from pyps.remote.handlers import Handlers, Place, Site
from pyps.remote.wire import Answer, Call, Failure, encode, encode_raw, failure


class SessionThread(threading.Thread):
    """Takes calls from `work` (None: leave); sends [session, seq, header, numbers ...] to `outlet`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        outlet: str,
        session: bytes,
        site: Site,
        previous: SessionThread | None,
    ) -> None:
        super().__init__(name=f"pyps-session-{session[:4].hex()}", daemon=True)
        self.work: queue.SimpleQueue[tuple[Call, Frames] | None] = queue.SimpleQueue()
        self.place: Place | None = None  # the client's place, once the thread has left
        self._context, self._outlet, self._session = context, outlet, session
        self._site, self._previous = site, previous

    def run(self) -> None:
        past = None
        if self._previous is not None:
            self._previous.join()  # until then its rank is taken; each of its calls has a deadline
            past, self._previous = self._previous.place, None
        handlers = Handlers(self._site, past)
        with self._context.socket(zmq.PUSH) as outlet:
            outlet.connect(self._outlet)
            try:
                while (item := self.work.get()) is not None:
                    seq = item[0].seq.to_bytes(8, "little")
                    outlet.send_multipart([self._session, seq, *_reply(handlers, *item)], copy=False)
            finally:
                self.place = handlers.place
                handlers.close()


def _reply(handlers: Handlers, call: Call, numbers: Frames) -> list[Any]:
    try:
        handlers.replies.begin(call.seq, call.received)
        value, frames = handlers.do(call.verb, call.arguments, numbers)
        return [encode(Answer(call.seq, encode_raw(value))), *to_frames(frames)]
    except StoreError as error:
        return [failure(call.seq, error)]
    except (PypsError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return [encode(Failure(call.seq, InvalidArgument.code, call.verb[:40], str(error)))]
    except Exception as error:  # an error of one client must not reach the others
        text = f"{type(error).__name__}: {error}"
        return [encode(Failure(call.seq, StoreError.code, call.verb[:40], text))]
