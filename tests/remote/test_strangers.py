"""Who may come, and what strangers can do: nothing. Keys, loopback, random bytes, wrong and huge frames."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import zmq
from hostile import VERBS, mutated
from remote_tools import RawClient, eventually, make_keys, pushing

from pyps.errors import InputError, LinkLost, LinkRefused, SegmentNotFound
from pyps.native.values import Codec, Encoding, Hyper, Role
from pyps.remote import open_store
from pyps.remote.address import is_loopback, parse_address
from pyps.remote.keys import read_client_keys, read_server_keys
from pyps.remote.server import Server
from pyps.remote.wire import MAX_HEADER_BYTES, PROTOCOL, Answer, Failure, PushHeader
from pyps.store import Store

HYPER = Hyper(lr=0.5)
F32, INT8, INT4 = Encoding(Codec.F32), Encoding(Codec.INT8), Encoding(Codec.INT4)
SIZE = 3000
SEED = 20
ROUNDS = 400
PATIENCE = 1.0
LOOPBACK = "tcp://127.0.0.1:*"


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:
    with Store.create("model", {"w": np.zeros(SIZE)}, batches=[4], policy="asp") as one:
        yield one


@pytest.fixture
def server(store: Store) -> Iterator[Server]:
    with Server("model", LOOPBACK, insecure=True) as one:
        yield one


@pytest.mark.promise("run code or open files on the server")
def test_no_call_takes_what_a_server_could_open_or_run(server: Server) -> None:
    """The only text of any call is a store's name, and no other than the server's is opened."""
    for verb in VERBS.values():
        hints = get_type_hints(verb.function, include_extras=False)
        texts = {name for name, kind in hints.items() if "str" in str(kind) and name != "return"}
        assert texts <= {"name"}, verb.name
    for name in ("../model", "/etc/passwd", "other"):
        with RawClient(server.address) as one:
            found = one.ask("hello", PROTOCOL, name)
            assert isinstance(found, Failure)
            assert found.code == SegmentNotFound.code


@contextmanager
def recorded(address: str) -> Iterator[tuple[str, bytearray]]:
    """The address of a relay to a server, and all that passes it."""
    target, seen = parse_address(address), bytearray()

    def carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                seen.extend(data)
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = listener.accept()[0], socket.create_connection((target.host, target.port))
                opened.extend(ends)
                for pair in (ends, ends[::-1]):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}/{target.store}", seen
        listener.shutdown(socket.SHUT_RDWR)
    for end in opened:
        end.close()


def works(address: str) -> bool:
    """Return whether an honest client can train there."""
    with open_store(address) as far:
        far.join()
        claim = far.start()
        staging = far.stage()
        staging.flat[:] = 0.0
        version = far.push(staging, claim.count, HYPER).version
        assert np.all(far.pull()[0] == 0.0)
        return version > 0


class TestKeys:
    def test_are_made_once_and_secret(self, tmp_path: Path) -> None:
        keys = make_keys(tmp_path / "keys")
        assert make_keys(tmp_path / "keys") == keys
        for name in ("server.key", "client.key"):
            assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
        client = read_client_keys(tmp_path / "keys" / "client.key")
        assert (client.server, {"client": client.public}) == (keys.public, keys.clients)

    def test_others_must_not_read_them(self, tmp_path: Path) -> None:
        make_keys(tmp_path)
        os.chmod(tmp_path / "client.key", 0o640)
        with pytest.raises(InputError, match="0o640"):
            read_client_keys(tmp_path / "client.key")

    @pytest.mark.parametrize("text", ["", "{}", "[", '{"schema": "pyps.server-key/2"}'])
    def test_what_is_no_key_file_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "server.key"
        path.touch(mode=0o600)
        path.write_text(text)
        for read in (read_server_keys, read_client_keys, lambda p: make_keys(p.parent)):
            with pytest.raises(InputError):
                read(path)
        with pytest.raises(InputError, match="no such file"):
            read_client_keys(tmp_path / "none")

    def test_open_the_door(self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with Server("model", "tcp://0.0.0.0:*", keys=tmp_path) as server:
            here = server.address.replace("0.0.0.0", "127.0.0.1")
            assert works(f"{here}?keys={tmp_path / 'client.key'}")
            monkeypatch.setenv("PYPS_KEYS", str(tmp_path / "client.key"))
            assert works(here)

    def test_seal_frames_that_are_just_as_large_as_the_store(self, shm: Path, tmp_path: Path) -> None:
        tensors = {"w": np.zeros(MAX_HEADER_BYTES // 4 + 1)}
        with (
            Store.create("model", tensors, batches=[4], policy="asp"),
            Server("model", keys=tmp_path) as server,
        ):
            assert works(f"{server.address}?keys={tmp_path / 'client.key'}")

    @pytest.mark.promise("Connections with keys: CurveZMQ")
    @pytest.mark.parametrize("keyed", [True, False])
    def test_hide_what_travels(self, shm: Path, tmp_path: Path, keyed: bool) -> None:
        """The name of a tensor goes to the client, and values come back; the pattern is seen without keys."""
        secret = np.full(2000, 1.2345678, np.float32)
        more: dict[str, Any] = {"keys": tmp_path} if keyed else {"bind": LOOPBACK, "insecure": True}
        tensors, options = {"private-tensor": secret}, "insecure=1"
        if keyed:
            options = f"keys={tmp_path / 'client.key'}"
        with (
            Store.create("model", tensors, batches=[4], policy="asp"),
            Server("model", **more) as server,
            recorded(f"{server.address.partition('?')[0]}?{options}") as (address, seen),
            open_store(f"{address}?{options}") as far,
        ):
            far.join()
            assert far.tensors[0].name == "private-tensor"
            assert far.pull()[0][0] == secret[0]
        assert len(seen) > secret.nbytes
        for text in (b"private-tensor", secret[:4].tobytes()):
            assert (text in seen) != keyed

    @pytest.mark.promise("without an admitted key")
    def test_other_ones_do_not(self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pyps.remote.client.CONNECT_SECONDS", PATIENCE)
        ours, others = make_keys(tmp_path / "a"), make_keys(tmp_path / "b")
        mixed = read_client_keys(tmp_path / "b" / "client.key")
        text = (tmp_path / "b" / "client.key").read_text().replace(mixed.server, ours.public)
        (tmp_path / "b" / "stranger.key").touch(mode=0o600)
        (tmp_path / "b" / "stranger.key").write_text(text)
        assert others != ours
        with Server("model", keys=tmp_path / "a") as server:
            with pytest.raises(LinkRefused, match="does not admit"):
                open_store(f"{server.address}?keys={tmp_path / 'b' / 'stranger.key'}")
            with pytest.raises((LinkLost, LinkRefused)):  # another server's: it cannot even say hello
                open_store(f"{server.address}?keys={tmp_path / 'b' / 'client.key'}")
            with pytest.raises((LinkLost, LinkRefused)):
                open_store(f"{server.address}?insecure=1")
            assert server.counters.calls == 0
            assert works(f"{server.address}?keys={tmp_path / 'a' / 'client.key'}")

    def test_a_key_does_not_open_a_door_without_lock(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pyps.remote.client.CONNECT_SECONDS", PATIENCE)
        make_keys(tmp_path)
        with pytest.raises((LinkLost, LinkRefused)):
            open_store(server.address.replace("insecure=1", f"keys={tmp_path / 'client.key'}"))


class TestAddresses:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost"])
    def test_of_this_machine(self, host: str) -> None:
        assert is_loopback(host)

    @pytest.mark.parametrize(
        "bind", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:*", "tcp://10.0.0.1:5555", "tcp://127.0.0.1:*"]
    )
    @pytest.mark.promise("Without keys, `pyps serve` listens on a unix socket")
    def test_nothing_goes_over_tcp_in_the_clear(self, bind: str) -> None:
        with pytest.raises(InputError, match="without keys"):
            Server("model", bind)
        with pytest.raises(InputError, match="none, for 10"):
            parse_address("tcp://10.0.0.1:5555/model")

    def test_unless_it_is_said(self, store: Store) -> None:
        with Server("model", "tcp://0.0.0.0:*", insecure=True) as server:
            assert works(server.address.replace("0.0.0.0", "127.0.0.1"))
        assert parse_address("tcp://10.0.0.1:5555/model?insecure=1").insecure

    def test_of_version_6(self, store: Store) -> None:
        try:
            server = Server("model", "tcp://[::1]:*", insecure=True)
        except InputError:
            pytest.skip("no IPv6 here")
        with server:
            assert works(server.address)

    @pytest.mark.parametrize(
        "text",
        [
            "tcp://", "tcp://h", "tcp://h:1", "tcp://h:1/", "tcp://h:1/a/b", "tcp://h:x/a", "tcp://h:99999/a",
            "tcp://127.0.0.1:1/a?colour=red", "tcp://127.0.0.1:1/a?pull", "tcp://127.0.0.1:1/a?pull=int7",
            "tcp://127.0.0.1:1/a#b", "udp://127.0.0.1:1/a", "tcp://:1/a", "tcp://127.0.0.1:0/a",
        ],
    )  # fmt: skip
    def test_that_are_none_are_refused(self, text: str) -> None:
        with pytest.raises(InputError):
            parse_address(text)

    def test_a_taken_one(self, server: Server) -> None:
        with pytest.raises(InputError, match="in use"):
            Server("model", server.address.rpartition("/")[0], insecure=True)

    def test_another_store_is_not_there(self, server: Server) -> None:
        with pytest.raises(SegmentNotFound):
            open_store(server.address.replace("/model", "/other"))


def test_random_bytes_are_nothing(server: Server) -> None:
    """On bare TCP, before and after a right greeting."""
    rng = random.Random(SEED)
    address = parse_address(server.address)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for k in range(40):
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.sendall((greeting if k % 2 else b"") + rng.randbytes(rng.randrange(1, 3000)))
    assert works(server.address)


def test_messages_that_are_none_are_counted_and_dropped(server: Server) -> None:
    """Mutations of right ones (of every verb: test_frame_fuzz); an honest client can go on."""
    rng = random.Random(SEED)
    with RawClient(server.address) as client:
        right = [client.message("wait", 5, 0.0), client.message("create", PROTOCOL, "model", 7)]
        for _ in range(ROUNDS):
            client.send(mutated(rng, rng.choice(right)))
        client.send(b"")
        client.send(b"x" * (MAX_HEADER_BYTES - 1))
        eventually(lambda: server.counters.refused > ROUNDS // 2)
    assert works(server.address)


RIGHT = {"samples": 1, "hyper": [{"lr": 1.0}], "scale": 1.0, "timeout": 0.0, "encoding": {"codec": 0}}
WRONG = {
    "an unknown verb": ("close", ()),
    "a private one": ("_return", ()),
    "too few arguments": ("start", ()),
    "too many": ("pull", (Codec.F32, None, 1)),
    "not a number": ("start", (float("nan"),)),
    "for ever": ("start", (float("inf"),)),
    "a rank below any": ("join", (Role.WORKER, -2)),
    "a rank above any": ("join", (Role.WORKER, 2**40)),
    "an unknown role": ("join", (9, 0)),
    "an unknown codec": ("pull", (9, None)),
    "negative samples": ("transfer", (pushing({**RIGHT, "samples": -1}),)),
    "a step size below 0": ("transfer", (pushing({**RIGHT, "hyper": [{"lr": -1.0}]}),)),
    "an unknown codec of a push": ("transfer", (pushing({**RIGHT, "encoding": {"codec": 9}}),)),
    "a negative version": ("transfer", (pushing({**RIGHT, "base_version": -1}),)),
    "compute seconds below 0": ("transfer", (pushing({**RIGHT, "compute_seconds": -1.0}),)),
    "compute seconds without end": ("transfer", (pushing({**RIGHT, "compute_seconds": float("inf")}),)),
    "no group": ("transfer", (pushing(PushHeader(1, (), 1.0, 0.0, F32)),)),
    "many groups": ("transfer", (pushing(PushHeader(1, (HYPER,) * 9, 1.0, 0.0, F32)),)),
    "no gradient": ("transfer", (pushing(PushHeader(1, (HYPER,), 1.0, 0.0, F32)),)),
    "no codes": ("transfer", (pushing(PushHeader(1, (HYPER,), 1.0, 0.0, INT4)),)),
    "no batches": ("replan", ((),)),
    "batches that are huge": ("replan", ((2**40,),)),
    "a second hello": ("hello", (PROTOCOL, "model")),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_a_typed_error(store: Store, server: Server, case: str) -> None:
    verb, arguments = WRONG[case]
    with RawClient(server.address) as client:
        assert isinstance(client.ask("hello", PROTOCOL, "model"), Answer)
        assert isinstance(client.ask("join", Role.WORKER, 0), Answer)
        assert isinstance(client.ask("start", 0.0), Answer)
        reply = client.ask(verb, *arguments)
        assert isinstance(reply, Failure), reply
        assert reply.code == "PYPS_EINVAL", reply
        assert store.status().version == 0
        assert isinstance(client.ask("leave"), Answer)


def push(client: RawClient, encoding: Encoding, numbers: np.ndarray[Any, Any]) -> None:
    header = PushHeader(4, (HYPER,), 1.0, 0.0, encoding)
    client.send(client.message("transfer", pushing(header), follow=numbers.nbytes), numbers)


def test_numbers_of_the_wrong_size_are_refused(store: Store, server: Server) -> None:
    with RawClient(server.address) as client:
        client.ask("hello", PROTOCOL, "model")
        client.ask("join", Role.WORKER, 0)
        client.ask("start", 0.0)
        size = store.layout.parameters * 4
        for wrong in (0, 1, size - 4, size - 1):
            push(client, F32, np.zeros(wrong, np.uint8))
            assert isinstance(reply := client.reply(), Failure)
            assert reply.code == "PYPS_EINVAL"
        codes = np.full(size, 255, np.uint8)  # scales that are NaN
        few = codes[: SIZE + 4 * -(-SIZE // 256)]  # codes of the values alone, and their blocks' scales
        push(client, INT8, few)
        assert isinstance(reply := client.reply(), Failure)
        assert reply.code == "PYPS_ENONFINITE"
        right = np.zeros(store.layout.parameters, np.float32)
        push(client, F32, right)
        assert isinstance(client.reply(), Answer)
    assert store.status().version == 1


def test_a_frame_larger_than_any_gradient_ends_the_connection(server: Server) -> None:
    """Before it is read: the server's memory does not grow."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with RawClient(server.address) as client:
        assert isinstance(client.ask("hello", PROTOCOL, "model"), Answer)
        monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        huge = np.empty(1 << 28, np.uint8)  # never written: no memory of ours either
        client.socket.send_multipart([client.message("pull", Codec.F32, None), huge], copy=False)
        assert monitor.poll(20_000), "the server hung up"
        monitor.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # in KiB
    assert works(server.address)
