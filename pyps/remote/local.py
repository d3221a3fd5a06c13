"""Where a server's unix socket lies: a folder that only this user may enter, among the segments.

A server holds a lock file next to its socket as long as it lives: libzmq would take over a bound path.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import zmq

from pyps.errors import InputError, reason_of
from pyps.store.segments import folder as segment_folder

MAX_PATH_BYTES = 107  # of a unix socket, <sys/un.h>
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def socket_folder() -> Path:
    """The folder of this user's sockets, which may not be there yet."""
    return segment_folder() / f"sockets-{os.geteuid()}"


def check_private(where: str, path: Path) -> None:
    """Raise InputError unless it is a folder of this user that no other may enter. Raises OSError."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & OTHERS:
        what = f"mode {stat.S_IMODE(found.st_mode):#o}, owner {found.st_uid}"
        raise InputError(where, str(path), what, f"a folder of user {os.geteuid()}, mode 0o700")


def check_socket(path: str) -> None:
    """Raise InputError if another user could have put a socket there; it may not be there yet."""
    with contextlib.suppress(FileNotFoundError):
        try:
            check_private("address", Path(path).parent)
        except (PermissionError, NotADirectoryError) as error:
            raise InputError("address", path, reason_of(error), "a socket of this user") from None


class SocketFolder:
    """A place for the socket of one store, held until close(). Raises InputError if another server has it."""

    def __init__(self, store: str) -> None:
        folder = socket_folder()
        self.path = folder / store
        if store in (".", ".."):
            raise InputError("serve", "store", repr(store), "a name, or --bind tcp://host:port")
        if len(os.fsencode(self.path)) > MAX_PATH_BYTES:
            expected = f"at most {MAX_PATH_BYTES} bytes: a shorter name, or --bind tcp://host:port"
            raise InputError("serve", "store", f"a socket at {self.path}", expected)
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            check_private("serve", folder)
            self._lock = os.open(
                self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            expected = "a folder to write to"
            raise InputError("serve", str(folder), reason_of(error), expected) from None
        import fcntl  # Windows has none, and serves nothing

        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._lock), self._lock_path.stat()):
                raise BlockingIOError  # its server ended meanwhile and removed it
        except OSError:
            os.close(self._lock)
            expected = "a store that no other server of this user serves here"
            raise InputError("serve", "store", f"{store!r}, in use at ipc://{self.path}", expected) from None

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}~")  # no store has this name

    def bind(self, router: zmq.Socket[Any]) -> None:
        """Listen there, to processes of this user only; the kernel says whose they are."""
        router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        try:
            router.bind(f"ipc://{self.path}")
        except zmq.ZMQError as error:
            raise InputError(
                "serve", "store", f"ipc://{self.path}: {error}", "a socket to listen on"
            ) from None

    def close(self) -> None:
        """Remove the socket, the lock and, after the last one, the folder."""
        for path in (self.path, self._lock_path):
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(self._lock)
        with contextlib.suppress(OSError):  # another server's socket is in it
            self.path.parent.rmdir()
