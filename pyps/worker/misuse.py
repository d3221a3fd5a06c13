"""Shows an error of misuse by the script's own frames: those of pyps and torch do not show the cause."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

import torch

from pyps.errors import Diverged, InputError, InvalidArgument

SHOWN_SHORT = (InputError, InvalidArgument, Diverged)
INSIDE = (f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/")

_previous = sys.excepthook


def shorten_tracebacks() -> None:
    """From now on an error that ends this process is shown so. Idempotent."""
    global _previous
    if sys.excepthook is not _show:
        _previous, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, SHOWN_SHORT):
        _previous(kind, error, trace)
        return
    shown = traceback.TracebackException(kind, error, trace)
    own = [frame for frame in shown.stack if not frame.filename.startswith(INSIDE)]
    shown.stack = traceback.StackSummary.from_list(own or list(shown.stack))
    sys.stderr.write("".join(shown.format()))
