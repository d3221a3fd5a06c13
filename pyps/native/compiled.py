"""The compiled core, `ffi` and `lib`; where this installation has none, each use of them raises CoreMissing.

So a worker of a store behind a server needs no core: what it calls of pyps.native is Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from pyps.errors import CoreMissing

F = TypeVar("F", bound=Callable[..., Any])


class _Missing:
    """Stand in for the core where there is none."""

    def def_extern(self, **_options: object) -> Callable[[F], F]:
        """Return what leaves a function as it is: nothing calls it from C."""
        return lambda function: function

    def __getattr__(self, name: str) -> NoReturn:
        raise CoreMissing()


try:
    from pyps._native import ffi as ffi
    from pyps._native import lib as lib

    HAS_CORE = True
except ModuleNotFoundError:
    ffi = lib = cast(Any, _Missing())
    HAS_CORE = False
