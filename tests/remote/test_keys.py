"""`pyps keys` and its files: written whole or not at all, refused if others may read or have made them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from remote_tools import eventually, make_keys
from typer.testing import CliRunner

from pyps.cli.keys import app
from pyps.errors import InputError, LinkRefused
from pyps.remote import open_store
from pyps.remote.keys import KeyFolder, read_client_keys, read_server_keys
from pyps.remote.server import Server
from pyps.store import Store

PYPS = str(Path(sys.executable).parent / "pyps")
NOBODY = 65534


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:
    with Store.create("model", {"w": np.zeros(10)}, batches=[4], policy="asp") as one:
        yield one


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match="no space left"):
            make_keys(tmp_path / "keys")
        assert not list((tmp_path / "keys").iterdir())
    keys = make_keys(tmp_path / "keys")
    written = 0

    def full_at_the_second(descriptor: int) -> None:
        nonlocal written
        if (written := written + 1) == 2:
            full(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_at_the_second)
        with pytest.raises(InputError, match="no space left"):
            KeyFolder.open(tmp_path / "keys").add("one")
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["client.key", "server.key"]
    assert make_keys(tmp_path / "keys") == keys


def test_a_wrong_address_leaves_no_keys(shm: Path, tmp_path: Path) -> None:
    for bind in ("tcp://203.0.113.7:5555", "tcp://nowhere", "udp://127.0.0.1:1"):
        with pytest.raises(InputError, match="bind"):
            Server("model", bind, keys=tmp_path / "keys")
    assert not (tmp_path / "keys").exists()


KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # of ZeroMQ's own example
WRONG = {
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "half a file": b'{"public": "',
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "short keys": {"public": "a", "secret": "b", "clients": {}},
    "no characters of Z85": {"public": "~" * 40, "secret": KEY, "clients": {}},
    "too large for 32 bytes": {"public": "#" * 40, "secret": KEY, "clients": {}},
    "not ASCII": {"public": "ä" * 40, "secret": KEY, "clients": {}},
    "no pair": {"public": KEY, "secret": KEY, "clients": {}},
    "a list of clients": {"public": KEY, "secret": KEY, "clients": [KEY]},
    "a wrong client": {"clients": {"one": "x"}},
    "a client without a name": {"clients": {"../x": KEY}},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_key_is_one_message(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "keys"
    keys = make_keys(folder)
    content = WRONG[case]
    if isinstance(content, dict):
        content = msgspec.json.encode({**msgspec.to_builtins(keys), **content})
    (folder / "server.key").write_bytes(content)
    with pytest.raises(InputError, match=r"(server\.key|keys: name): .*expected"):
        read_server_keys(folder / "server.key")
    (folder / "client.key").write_bytes(content)
    with pytest.raises(InputError, match=r"client\.key: .*expected"):
        read_client_keys(folder / "client.key")


def test_no_plain_file_is_read(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "link").symlink_to(tmp_path / "keys" / "client.key")
    for name in ("pipe", "link", "keys"):
        with pytest.raises(InputError):
            read_client_keys(tmp_path / name)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    (tmp_path / "keys").chmod(0o770)
    with pytest.raises(InputError, match="0o770"):
        make_keys(tmp_path / "keys")


@pytest.mark.promise("Key files must be yours")
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_what_another_user_owns_is_refused(tmp_path: Path) -> None:
    """Also by root: its owner can change it."""
    folder = tmp_path / "keys"
    make_keys(folder)
    for path in (folder / "server.key", folder / "client.key", folder):
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(InputError, match=f"owner: found user {NOBODY}; expected user 0"):
            read_client_keys(path) if path.name == "client.key" else make_keys(folder)
        os.chown(path, 0, 0)
    make_keys(folder)


def test_names_that_no_client_can_have(tmp_path: Path) -> None:
    keys = KeyFolder.open(tmp_path / "keys")
    for name in ("", "server", "../x", "a/b", ".hidden", "x" * 65, "a\n"):
        with pytest.raises(InputError, match="name"):
            keys.add(name)
    keys.add("one")
    with pytest.raises(InputError, match="admitted"):
        keys.add("one")
    with pytest.raises(InputError, match="one of the clients: one"):
        keys.revoke("two")
    assert keys.names == ["one"], "the first to be added is the first client"


def test_a_damaged_list_leaves_the_clients_that_there_were(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server("model", keys=tmp_path / "keys") as server:
        (tmp_path / "keys" / "server.key").write_text("{")
        said: list[str] = []
        eventually(lambda: bool(said.append(capsys.readouterr().err) or "stay" in "".join(said)))
        open_store(f"{server.address}?keys={tmp_path / 'keys' / 'client.key'}").close()


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_the_commands(store: Store, tmp_path: Path) -> None:
    """A client is added and revoked while the server runs."""
    folder = tmp_path / "keys"
    with pytest.raises(InputError, match=r"server\.key: found none"):
        run("ls", "--keys", folder)
    assert not folder.exists()
    run("add", "host-a", "--keys", folder)
    serve = [PYPS, "serve", "model", "--keys", str(folder)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            address = child.stdout.readline().split()[-1]
            assert f"{folder}/host-b.key" in run("add", "host-b", "--keys", folder)
            assert sorted(json.loads(run("ls", "--keys", folder, "--json"))["clients"]) == [
                "host-a",
                "host-b",
            ]
            keys = f"{address}?keys={folder / 'host-b.key'}"

            def opens() -> bool:
                try:
                    open_store(keys).close()
                except LinkRefused:
                    return False
                return True

            eventually(opens)
            with open_store(keys) as far:
                assert far.status().version == 0
                assert run("revoke", "host-b", "--keys", folder) == "revoked host-b\n"
                assert run("ls", "--keys", folder).split()[0] == "host-a"
                with pytest.raises(LinkRefused):
                    far.wait(1 << 40, 60.0)
            with open_store(f"{address}?keys={folder / 'host-a.key'}") as far:
                assert far.status().version == 0
        finally:
            child.terminate()


@pytest.mark.promise("all who reach it can read and change the store")
def test_an_insecure_server_says_so(store: Store) -> None:
    command = [PYPS, "serve", "model", "--bind", "tcp://127.0.0.1:*", "--insecure"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = child.stdout.readline().split()[-1]
        open_store(address).close()
        child.terminate()
        _, said = child.communicate(timeout=60)  # of a client whose goodbye has not come it speaks too
    assert said.startswith("pyps serve: insecure: every user of this machine can read and change the store\n")
