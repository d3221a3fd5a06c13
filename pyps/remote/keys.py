"""Key files: who a server is, and who may come (CurveZMQ, Curve25519).

A folder of keys holds `server.key`, which stays with the server and lists the clients that it admits, and
`client.key`, to be copied to the workers' hosts. Both are secret: mode 0600, and refused if others may read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import zmq

from pyps.errors import InputError

KEY_LENGTH = 40  # Z85 text of 32 bytes
OTHERS = stat.S_IRWXG | stat.S_IRWXO


class ServerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """server.key; `clients` are the public keys that are let in."""

    public: str
    secret: str
    clients: tuple[str, ...]
    schema: Literal["pyps.server-key/1"] = "pyps.server-key/1"


class ClientKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """client.key; `server` is the public key that the server has to have."""

    server: str
    public: str
    secret: str
    schema: Literal["pyps.client-key/1"] = "pyps.client-key/1"


Keys = TypeVar("Keys", ServerKeys, ClientKeys)


def make_keys(folder: str | os.PathLike[str]) -> ServerKeys:
    """The server's keys in `folder`, made there together with client.key if there are none yet.

    Raises InputError if the folder cannot be written to or a file is not what it should be.
    """
    path = Path(folder)
    if (path / "server.key").exists():
        return read_server_keys(path / "server.key")
    server, client = _pair(), _pair()
    keys = ServerKeys(server[0], server[1], (client[0],))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path / "client.key", ClientKeys(server[0], *client))
        _write(path / "server.key", keys)
    except OSError as error:
        raise InputError("keys", os.fspath(folder), str(error.strerror), "a folder to write to") from None
    return keys


def read_server_keys(path: str | os.PathLike[str]) -> ServerKeys:
    """Raises InputError, also where others than the owner may read the file."""
    keys = _read(path, ServerKeys)
    _check(path, keys.public, keys.secret, *keys.clients)
    return keys


def read_client_keys(path: str | os.PathLike[str]) -> ClientKeys:
    """Raises InputError, also where others than the owner may read the file."""
    keys = _read(path, ClientKeys)
    _check(path, keys.server, keys.public, keys.secret)
    return keys


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _write(path: Path, keys: ServerKeys | ClientKeys) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")


def _read(path: str | os.PathLike[str], kind: type[Keys]) -> Keys:
    where, expected = os.fspath(path), "a key file that `pyps serve --keys` made"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(1 << 20)
    except OSError as error:
        raise InputError(where, "", str(error.strerror), expected) from None
    if mode & OTHERS:
        raise InputError(where, "mode", oct(stat.S_IMODE(mode)), "0o600: it is secret (chmod 600)")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise InputError(where, "", str(error), expected) from None


def _check(path: str | os.PathLike[str], *keys: str) -> None:
    for key in keys:
        if len(key) != KEY_LENGTH or not key.isascii() or not key.isprintable():
            raise InputError(os.fspath(path), "key", f"{len(key)} characters", f"{KEY_LENGTH} of Z85 text")
