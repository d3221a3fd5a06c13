"""Waits in the C core let handlers of signals run, and end with what they raise, or on an event."""

from __future__ import annotations

import threading

from pyps.errors import WaitInterrupted
from pyps.native.compiled import HAS_CORE, ffi, lib


class _Interrupt(threading.local):
    """error: what ended this thread's last wait in the C core. ended: ends all of them once it is set."""

    error: BaseException | None = None
    ended: threading.Event | None = None


_interrupt = _Interrupt()


def _keep(_: object, error: BaseException | None, __: object) -> None:
    _interrupt.error = error


@ffi.def_extern(error=1, onerror=_keep)
def pyps_python_interrupted() -> int:
    """Called by waits in C: on entry the interpreter runs the handlers of signals that have come."""
    if _interrupt.ended is not None and _interrupt.ended.is_set():
        raise WaitInterrupted("wait", "the session has ended")
    return 0


def end_waits_on(event: threading.Event) -> None:
    """From now on every wait of this thread in the C core ends with WaitInterrupted once the event is set."""
    _interrupt.ended = event


def check_waits() -> None:
    """For a wait of this thread that is not in the C core: raise WaitInterrupted once the event is set."""
    if _interrupt.ended is not None and _interrupt.ended.is_set():
        raise WaitInterrupted("wait", "the session has ended")


def reason() -> BaseException | None:
    """Return what ended this thread's last wait; None: nothing that was raised here. It is forgotten."""
    error, _interrupt.error = _interrupt.error, None
    return error


if HAS_CORE:
    lib.pyps_set_interrupt(lib.pyps_python_interrupted)
