"""Key files: who a server is, and who may come (CurveZMQ, Curve25519).

A folder of keys holds `server.key`, which stays with the server and lists the clients that it admits, and for
each of them NAME.key, to be moved to that client's host. All are secret: files and folder must belong to this
user, modes 0600 and 0700. `pyps keys` adds and revokes clients, also while a server runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from pyps.errors import InputError, reason_of, shown
from pyps.formats.files import learnt

KEY_LENGTH = 40  # Z85 text of 32 bytes
MAX_FILE_BYTES = 1 << 20
# A link or a pipe in place of a file is not followed. Windows has one, for bytes as they are.
PLAIN = sum(getattr(os, f"O_{flag}", 0) for flag in ("NOFOLLOW", "NONBLOCK", "CLOEXEC", "BINARY"))
OTHERS = stat.S_IRWXG | stat.S_IRWXO
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SERVER = "server"  # no client's name: its file would be the server's
FIRST_CLIENT = "client"  # made together with the server's keys
HINT = "make new keys with `pyps keys add NAME`"


class ServerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """server.key; `clients`: the public keys that are let in, by name. ranks: those that a client may join
    as, by the names of the clients that are bound to some.
    """

    public: str
    secret: str
    clients: dict[str, str]
    ranks: dict[str, tuple[Annotated[int, msgspec.Meta(ge=0)], ...]] = {}
    schema: Literal["pyps.server-key/1"] = "pyps.server-key/1"


class ClientKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """NAME.key; `server` is the public key that the server has to have."""

    server: str
    public: str
    secret: str
    schema: Literal["pyps.client-key/1"] = "pyps.client-key/1"


Keys = TypeVar("Keys", ServerKeys, ClientKeys)


class KeyFolder:
    """A folder of keys, as it was at the last look. `keys`: the server's. Threads may share it."""

    def __init__(self, path: Path, keys: ServerKeys, new: bool) -> None:
        self.path = path
        self._new = new  # not written yet
        self._stamp = None if new else _stamp(path / "server.key")
        self._set(keys)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """The keys in `folder`, or new ones, which `save` or `add` will put there. Raises InputError."""
        path = Path(folder)
        if _exists(path):
            _check_folder(path)
        if _exists(path / "server.key"):
            return cls(path, read_server_keys(path / "server.key"), new=False)
        return cls(path, ServerKeys(*_pair(), {}), new=True)

    def save(self) -> None:
        """Write new keys and those of a first client; nothing if there were keys. Raises InputError."""
        if self._new:
            self.add(FIRST_CLIENT)

    @property
    def names(self) -> list[str]:
        """The admitted clients."""
        return sorted(self.keys.clients)

    def name_of(self, public: str) -> str | None:
        """The client that has this public key; None: it is not admitted."""
        return self._names.get(public)

    def ranks_of(self, name: str) -> tuple[int, ...] | None:
        """The ranks that a client is bound to; None: it may join as any."""
        return self.keys.ranks.get(name)

    def reload(self) -> bool:
        """Look whether server.key has changed, and take the clients that it lists now. What cannot be read is
        reported and leaves the last clients.
        """
        stamp = _stamp(self.path / "server.key")
        if stamp is None or stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            keys = read_server_keys(self.path / "server.key")
        except InputError as error:
            print(shown(f"pyps serve: {error}; the clients admitted before stay"), file=sys.stderr)
            return False
        self._set(keys)
        return True

    def add(self, name: str, ranks: Iterable[int] | None = None) -> Path:
        """Admit a new client: the file of its keys. ranks: those that it may join as; None: any. Raises
        InputError.
        """
        check_client_name(name)
        path = self.path / f"{name}.key"
        with _changing(self.path):
            keys = self._latest()
            if name in keys.clients:
                raise InputError(
                    "keys", "name", f"{name!r}, which is admitted", "another, or revoke it first"
                )
            if _exists(path):
                raise InputError(
                    "keys", "name", f"{path}, which is there", "a name without a file, or move it"
                )
            public, secret = _pair()
            _write(path, ClientKeys(keys.public, public, secret))
            try:
                bound = keys.ranks if ranks is None else {**keys.ranks, name: tuple(sorted(set(ranks)))}
                clients = {**keys.clients, name: public}
                self._write_server(msgspec.structs.replace(keys, clients=clients, ranks=bound))
            except BaseException:
                path.unlink()
                raise
        return path

    def revoke(self, name: str) -> None:
        """Admit a client no more, and remove its file if it is here. Raises InputError."""
        with _changing(self.path):
            keys = self._latest()
            if name not in keys.clients:
                known = ", ".join(sorted(keys.clients)) or "none"
                raise InputError("keys", "name", repr(name), f"one of the clients: {known}")
            clients = {k: v for k, v in keys.clients.items() if k != name}
            bound = {k: v for k, v in keys.ranks.items() if k != name}
            self._write_server(msgspec.structs.replace(keys, clients=clients, ranks=bound))
            (self.path / f"{name}.key").unlink(missing_ok=True)

    def _latest(self) -> ServerKeys:
        """The keys that are in the folder now, which other processes change too."""
        there = _exists(self.path / "server.key")
        if there and self._new:
            raise InputError(str(self.path), "server.key", "one made meanwhile", "none: start again")
        return read_server_keys(self.path / "server.key") if there else self.keys

    def _write_server(self, keys: ServerKeys) -> None:
        _write(self.path / "server.key", keys)
        self._set(keys)
        self._new, self._stamp = False, _stamp(self.path / "server.key")

    def _set(self, keys: ServerKeys) -> None:
        self.keys = keys
        self._names = {public: name for name, public in keys.clients.items()}


def check_client_name(name: str) -> None:
    """Raise InputError for a name that a client cannot have."""
    if not NAME.fullmatch(name) or name == SERVER:
        expected = "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit, and not 'server'"
        raise InputError("keys", "name", repr(name[:80]), expected)


def read_server_keys(path: str | os.PathLike[str]) -> ServerKeys:
    """Raises InputError, also where others than this user may read the file or own it."""
    keys = _read(path, ServerKeys)
    _check_pair(path, keys.public, keys.secret)
    for name, public in keys.clients.items():
        check_client_name(name)
        _check_key(path, f"clients.{name}", public)
    return keys


def read_client_keys(path: str | os.PathLike[str]) -> ClientKeys:
    """Raises InputError, also where others than this user may read the file or own it."""
    keys = _read(path, ClientKeys)
    _check_key(path, "server", keys.server)
    _check_pair(path, keys.public, keys.secret)
    return keys


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Make the folder if need be, and keep other processes from changing it. Raises InputError."""
    import fcntl  # Windows has none, and admits no clients

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(folder)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
            os.fsync(lock)
        finally:
            os.close(lock)
    except OSError as error:
        raise InputError("keys", os.fspath(folder), reason_of(error), "a folder to write to") from None


def _write(path: Path, keys: ServerKeys | ClientKeys) -> None:
    """The whole file or none: a full disk leaves what was there before. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _exists(path: Path) -> bool:
    """Return whether something is there. Raises InputError where that cannot be seen."""
    try:
        return bool(path.lstat())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InputError("keys", os.fspath(path), reason_of(error), "a folder of keys") from None


def _check_folder(path: Path) -> None:
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise InputError("keys", str(path), "something else", "a folder")
    if found.st_uid != os.geteuid():
        raise InputError(str(path), "owner", f"user {found.st_uid}", f"user {os.geteuid()}, who serves")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = oct(stat.S_IMODE(found.st_mode))
        raise InputError(str(path), "mode", mode, "0o700: others could put keys there (chmod 700)")


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return what changes with a file; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: str | os.PathLike[str], kind: type[Keys]) -> Keys:
    where, expected = os.fspath(path), f"a {kind.__struct_defaults__[-1]} file ({HINT})"
    try:
        fd = os.open(path, os.O_RDONLY | PLAIN)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise InputError(where, "", "something that is not a plain file", expected)
            data = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise InputError(where, "", reason_of(error), expected) from None
    if not hasattr(os, "geteuid"):  # the lists of rights of Windows are not looked at
        return _decoded(where, data, kind, expected)
    if found.st_uid != os.geteuid():
        raise InputError(where, "owner", f"user {found.st_uid}", f"user {os.geteuid()}: chown it")
    if found.st_mode & OTHERS:
        mode = oct(stat.S_IMODE(found.st_mode))
        raise InputError(where, "mode", mode, "0o600: it is secret (chmod 600)")
    return _decoded(where, data, kind, expected)


def _decoded(where: str, data: bytes, kind: type[Keys], expected: str) -> Keys:
    if not data:
        raise InputError(where, "", "an empty file", expected)
    try:
        return msgspec.json.decode(data, type=learnt(kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(where, "", str(error), expected) from None


def _check_key(path: str | os.PathLike[str], field: str, key: str) -> None:
    try:
        right = (
            len(key) == KEY_LENGTH and key.isascii() and z85.encode(z85.decode(key.encode())) == key.encode()
        )
    except (KeyError, ValueError, struct.error):  # no character of Z85, or five of them above 32 bits
        right = False
    if not right:
        found = f"{len(key)} characters that are no key"
        raise InputError(os.fspath(path), field, found, f"{KEY_LENGTH} characters of Z85 text ({HINT})")


def _check_pair(path: str | os.PathLike[str], public: str, secret: str) -> None:
    _check_key(path, "public", public)
    _check_key(path, "secret", secret)
    if zmq.curve_public(secret.encode()) != public.encode():
        raise InputError(os.fspath(path), "public", "a key that is not the secret's", f"its own ({HINT})")
