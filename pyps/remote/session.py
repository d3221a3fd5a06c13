"""A remote worker's deputy: a thread beside the store that is the participant there and does as told.

Calls come one at a time; each gives one reply. A deputy whose worker has been silent for too long leaves:
samples claimed and not pushed go back, as a dead process's do.
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


class Deputy(threading.Thread):
    """Takes calls from `work` (None: leave and end), sends [session, header, numbers ...] to `outlet`."""

    def __init__(
        self, context: zmq.Context[Any], outlet: str, session: bytes, site: Site, before: Deputy | None
    ) -> None:
        super().__init__(name=f"pyps-deputy-{session[:4].hex()}", daemon=True)
        self.work: queue.SimpleQueue[tuple[Call, Frames] | None] = queue.SimpleQueue()
        self.place: Place | None = None  # what it was, once it has left
        self._context, self._outlet, self._session = context, outlet, session
        self._site, self._before = site, before

    def run(self) -> None:
        past = None
        if self._before is not None:
            self._before.join()  # its rank is free only when it has left; each of its calls has a deadline
            past, self._before = self._before.place, None
        acts = Handlers(self._site, past)
        with self._context.socket(zmq.PUSH) as outlet:
            outlet.connect(self._outlet)
            try:
                while (item := self.work.get()) is not None:
                    outlet.send_multipart([self._session, *_reply(acts, *item)], copy=False)
            finally:
                self.place = acts.place
                acts.close()


def _reply(acts: Handlers, call: Call, numbers: Frames) -> list[Any]:
    try:
        value, frames = acts.do(call.verb, call.arguments, numbers)
        return [encode(Answer(call.seq, encode_raw(value))), *to_frames(frames)]
    except StoreError as error:
        return [failure(call.seq, error)]
    except (PypsError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return [encode(Failure(call.seq, InvalidArgument.code, call.verb[:40], str(error)))]
    except Exception as error:  # one worker's trouble must not be the others'
        text = f"{type(error).__name__}: {error}"
        return [encode(Failure(call.seq, StoreError.code, call.verb[:40], text))]
