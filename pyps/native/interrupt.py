"""Waits in the C core let handlers of signals run, and end with what they raise."""

from __future__ import annotations

import threading

from pyps._native import ffi, lib


class _Interrupt(threading.local):
    """What a signal's handler raised in this thread, during a wait in the C core."""

    error: BaseException | None = None


_interrupt = _Interrupt()


def _keep(_: object, error: BaseException | None, __: object) -> None:
    _interrupt.error = error


@ffi.def_extern(error=1, onerror=_keep)
def pyps_python_interrupted() -> int:
    """Called by waits in C: on entry the interpreter runs the handlers of signals that have come."""
    return 0


def reason() -> BaseException | None:
    """What ended this thread's last wait; None: nothing that was raised here. It is forgotten."""
    error, _interrupt.error = _interrupt.error, None
    return error


lib.pyps_set_interrupt(lib.pyps_python_interrupted)
