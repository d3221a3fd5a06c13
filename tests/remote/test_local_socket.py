"""A server without keys listens on a unix socket that processes of its own user reach, and no others."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from remote_tools import process

from pyps.errors import InputError, SegmentNotFound
from pyps.remote import open_store
from pyps.remote.address import parse_address
from pyps.remote.local import socket_folder
from pyps.remote.server import Server
from pyps.store import Store

NOBODY = 65534
SERVER = """
import sys
from pyps.remote.server import Server
with Server("model") as server:
    print(server.address, flush=True)
    sys.stdin.readline()
"""
STRANGER = """
import socket, sys
end = socket.socket(socket.AF_UNIX)
end.settimeout(30)
try:
    end.connect(sys.argv[1])
    print("heard", len(end.recv(64)))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:
    with Store.create("model", {"w": np.zeros(10)}, batches=[4], policy="asp") as one:
        yield one


@pytest.mark.promise("sockets lie in a folder of mode 0700")
def test_lies_in_a_private_folder_and_goes_with_its_server(store: Store) -> None:
    with Server("model") as server:
        path = Path(server.address.removeprefix("ipc://"))
        assert path == socket_folder() / "model"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_ISSOCK(path.stat().st_mode)
        with open_store(f"{server.address}?pull=int8") as far:
            assert far.status().version == 0
        with pytest.raises(InputError, match=r"in use at ipc://.*; expected a store that no other server"):
            Server("model")
        with Server("other") as other, pytest.raises(SegmentNotFound):
            open_store(other.address)
    assert not path.parent.exists()


def test_a_killed_servers_socket_is_no_obstacle(store: Store) -> None:
    with process(SERVER) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert Path(address.removeprefix("ipc://")).exists()
        with Server("model") as server:
            assert server.address == address
            open_store(address).close()


@pytest.mark.promise("the kernel says whose process connects")
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_is_not_let_in(store: Store) -> None:
    def stranger(path: str) -> str:
        command = [sys.executable, "-c", STRANGER, path]
        if not os.access(sys.executable, os.X_OK, effective_ids=True):
            pytest.skip("another user cannot run this Python")
        command[0] = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
        done = subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", stdout=-1, text=True
        )
        return done.stdout.strip()

    with Server("model") as server:
        path = server.address.removeprefix("ipc://")
        assert stranger(path) == "PermissionError"
        # Also where the files' modes would let it: the kernel says whose process it is.
        store_folder = Path(path).parent.parent
        modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (store_folder, Path(path).parent, Path(path))}
        for one in modes:
            one.chmod(0o777)
        assert stranger(path) in ("heard 0", "ConnectionResetError")
        with pytest.raises(InputError, match="0o777, owner 0; expected a folder of user 0, mode 0o700"):
            open_store(server.address)
        for one, mode in modes.items():
            one.chmod(mode)
        open_store(server.address).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_a_folder_of_another_user_is_refused(store: Store) -> None:
    socket_folder().mkdir(mode=0o700)
    os.chown(socket_folder(), NOBODY, NOBODY)
    with pytest.raises(InputError, match=f"owner {NOBODY}"):
        Server("model")
    with pytest.raises(InputError, match=f"owner {NOBODY}"):
        open_store(f"ipc://{socket_folder()}/model")
    socket_folder().rmdir()


def test_a_path_that_no_socket_can_have_is_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="at most 107 bytes"):
        Server("m" * 120)
    with pytest.raises(InputError):
        Server(".")
    assert not list(shm.iterdir())


@pytest.mark.parametrize("name", ["", "a/b", "a b", "m" * 201, "\n", "ä"])
def test_a_name_that_no_segment_can_have_is_refused(shm: Path, name: str) -> None:
    """By the rule and with the words of the segments."""
    with pytest.raises(InputError, match=r"1 to 200 letters, digits, '\.', '_' or '-'"):
        Server(name)
    assert not list(shm.iterdir())


@pytest.mark.parametrize(
    "text", ["ipc://model", "ipc:///", "ipc:///tmp/", "ipc://host/tmp/m", "ipc:///tmp/m?x=1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="address"):
        parse_address(text)
