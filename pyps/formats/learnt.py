"""Types that msgspec has learnt: threads of one process may read the same kind of file at the same time.

msgspec learns the fields of a type when it first reads one, and the process dies where two threads make it
learn the same type at once (msgspec 0.22). What is learnt is kept with the type.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_learning = threading.Lock()


def learnt(kind: type[T]) -> type[T]:
    """The type itself, of which a value can be read in any thread from now on."""
    with _learning:
        msgspec.json.Decoder(kind)
    return kind
