"""A pyps.Store that is elsewhere: the same object, its calls made over a link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self, TypeVar, cast

from pyps import native
from pyps.errors import InvalidArgument, StoreError
from pyps.native.state import StoreState
from pyps.native.values import Config, Flat
from pyps.remote.address import is_sharded
from pyps.remote.backend import RemoteBackend
from pyps.remote.client import Traffic
from pyps.remote.sharded import ShardedBackend
from pyps.store.store import Store
from pyps.store.transfer import Finish, TransferRequest

T = TypeVar("T")


def _backend(name: str) -> type[RemoteBackend]:
    return ShardedBackend if is_sharded(name) else RemoteBackend


class RemoteStore(Store):
    """Made by `open` or `create` with an address (pyps.remote.address) in place of a name.

    Also raises LinkLost: the server is gone; whether it took a push under way is then not known. Fenced also
    means that the server had not heard of this worker for so long that it gave its samples to others.
    """

    @classmethod
    def open(cls, name: str) -> Self:
        return cls(name, native.Pointer(_backend(name)(name)), unlinks=False)

    @classmethod
    def _make(cls, name: str, config: Config, state: StoreState | None, *, keep: bool) -> Self:
        return cls(name, native.Pointer(_backend(name)(name, config, state)), unlinks=False)

    @property
    def undone(self) -> int:
        calls = self._calls
        return calls.undone if isinstance(calls, ShardedBackend) else 0

    @property
    def traffic(self) -> Traffic:
        """What went over the link so far."""
        return self._calls.traffic

    def begin_transfer(self, request: TransferRequest) -> Finish:
        """Send a step's transfer; what is returned waits for its reply (pyps.store.transfer). One thread may
        begin transfers while another finishes them, in order. Raises NotFinite, having sent nothing.
        """
        return self._call(RemoteBackend.begin_transfer, replace(request, push=self._checked(request.push)))

    def keep_residual(self, start: Flat | None, keep: Callable[[int, Flat], None]) -> None:
        """What the codes of a push do not carry is this process's alone.

        start: float32, to begin with; None: nothing. keep: gets the staging buffer of each push, and that,
        before it is sent. Raises InvalidArgument for a residual of another size.
        """
        self._call(RemoteBackend.keep_residual, start, keep)

    def journal(self, path: str | os.PathLike[str] | None) -> None:
        """Raises InvalidArgument: the decisions are taken where the server is."""
        raise InvalidArgument("journal", f"{path}: the store is elsewhere, and so is its journal")

    @property
    def _calls(self) -> RemoteBackend:
        return cast(RemoteBackend, self._pointer)

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return cast(T, getattr(self._calls, function.__name__)(*arguments))

    def _observe(self, function: Callable[..., T], *arguments: Any) -> T:
        return self._call(function, *arguments)  # one call at a time has the link

    def _release(self, pointer: native.Pointer, joined: bool) -> None:
        calls = cast(RemoteBackend, pointer)
        with contextlib.suppress(StoreError):
            if joined:
                calls.leave()
        calls.close()
