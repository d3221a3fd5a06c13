"""An admitted client that wants harm: what it takes of a server is bounded, and the others are served."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_tools import RawClient, RawConnection, eventually, pushing
from sampled import sampled

from pyps.errors import Busy, Fenced, LinkRefused
from pyps.native import unlink
from pyps.native.status import MemberState
from pyps.native.values import Codec, Encoding, Hyper, Role
from pyps.remote import bounds, connections, create_store, incoming, open_store
from pyps.remote import server as server_module
from pyps.remote.address import parse_address
from pyps.remote.framing import FRAME_BYTES
from pyps.remote.keys import KeyFolder
from pyps.remote.server import Server
from pyps.remote.session import SessionThread
from pyps.remote.wire import PROTOCOL, Answer, Bye, Call, Failure, Ping, PushHeader, encode, encode_raw
from pyps.store import Store

SIZE = 3000
LONG = 3600.0  # seconds
TCP = "tcp://127.0.0.1:*"
SECOND = 1.0  # an innocent worker's calls stay under it


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:
    with Store.create("model", {"w": np.zeros(SIZE)}, batches=[4, 4], policy="asp:scaling=none") as one:
        yield one


@pytest.fixture
def server(store: Store) -> Iterator[Server]:
    with Server("model", TCP, insecure=True) as one:
        yield one


def hello(client: RawClient) -> Any:
    return client.ask("hello", PROTOCOL, "model")


def own_bytes() -> int:
    """Memory of this process that no other shares."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def answers(server: Server, source: str = "") -> bool:
    """Return whether a client that means well, of another session or another host, is served."""
    with RawClient(server.address.replace("0.0.0.0", "127.0.0.1"), source) as client:
        return isinstance(hello(client), Answer) and isinstance(client.ask("status"), Answer)


def creation(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = dict.fromkeys(("samples", "chunk_params", "snapshot_spares", "policy"), 0)
    fields |= {"optimizer": 0, "groups": 1, "batches": [1], "max_participants": 4, "staging_buffers": 1}
    fields |= {"round_timeout_seconds": 1.0, "policy_params": {}, "agreement": {}}
    return fields | {"tensors": [{"name": "w", "shape": [1]}]} | changes


def ask_create(client: RawClient, request: dict[str, Any], numbers: bytes = b"") -> Any:
    encoded = bytes(encode_raw(request))
    message = client.message("create", PROTOCOL, "model", len(encoded), follow=len(encoded) + len(numbers))
    client.send(message, encoded + numbers)
    return client.reply()


class TestThreads:
    def test_one_that_cannot_start_is_one_refused_call(
        self, store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with RawClient(server.address) as client:
            with monkeypatch.context() as patch:
                patch.setattr(SessionThread, "start", fails)
                refused = hello(client)
                assert isinstance(refused, Failure)
                assert (refused.code, "could not start a thread" in refused.message) == (Busy.code, True)
            client.seq = 0
            assert isinstance(hello(client), Answer)
        assert answers(server)
        assert store.status().version == 0

    def test_end_with_their_session_also_while_it_waits(self, server: Server) -> None:
        """Twice as many as one peer may have: each has said goodbye in the middle of a long wait."""
        for _ in range(2 * bounds.SESSIONS_PER_PEER):
            with RawClient(server.address) as client:

                def opens(one: RawClient = client) -> bool:
                    one.seq = 0
                    return isinstance(hello(one), Answer)

                eventually(opens)
                client.send(client.message("wait", 1 << 40, LONG))
                client.send(encode(Bye(client.session)))
        eventually(lambda: not server._clients.threads)

    def test_end_with_a_silent_client_also_while_it_waits(self, store: Store) -> None:
        with Server("model", client_timeout_seconds=0.3) as server, RawClient(server.address) as client:
            hello(client)
            client.ask("join", Role.WORKER, 0)
            calls = [client.message("start", LONG), client.message("status")]
            for one in calls:  # rank 1 never comes
                client.send(one)
            eventually(lambda: server.counters.timed_out == 1)
            eventually(lambda: [m.state for m in store.members() if m.rank == 0] == [MemberState.LEFT])
            eventually(lambda: not server._clients.threads)
            found = [client.reply() for _ in calls]
            assert [one.code for one in found] == [Fenced.code] * 2, found
            client.send(calls[-1])
            assert client.reply() == found[-1]
            assert isinstance(client.ask("rejoin"), Answer)


def test_a_server_that_faults_keeps_the_store(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("model")
    far = create_store(server.address, {"w": np.ones(3)}, batches=[1])

    def fails() -> bool:
        raise AssertionError("a fault of the loop")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(server, "_receive_some", fails)
    server.wait()
    server.close()
    far.close()
    with Store.open("model") as there, Server("model") as again, open_store(again.address) as back:
        assert back.status().version == there.status().version == 0
    unlink("model", force=True)


def test_a_fault_of_one_message_ends_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("a fault of a message")

    with RawClient(server.address) as client, monkeypatch.context() as patch:
        patch.setattr(server, "_take", fails)
        client.send(encode(Ping(client.session)))
        eventually(lambda: server.counters.faults == 1)
    assert answers(server)


class TestSizes:
    @pytest.mark.parametrize(
        "shape", [[(1 << 62) + 1] * 250_000, [1] * 9, [1 << 63], [(1 << 64) - 1], [-1], [1 << 40, 1 << 40]]
    )
    def test_dimensions_are_looked_at_before_they_are_multiplied(
        self, server: Server, shape: list[int]
    ) -> None:
        with RawClient(server.address) as client:
            refused = ask_create(client, creation(tensors=[{"name": "w", "shape": shape}]))
        assert isinstance(refused, Failure)
        assert refused.code == "PYPS_EINVAL"
        assert len(refused.message) < 3000
        assert answers(server)

    @pytest.mark.parametrize(
        "request_bytes",
        [
            encode_raw(creation(batches=[1] * 100_000)),
            b"",
            b"\xc1",
            encode_raw({"tensors": 3}),
            b"\x91" * 5000,
        ],
    )
    def test_a_wrong_creation_is_an_error(self, server: Server, request_bytes: bytes) -> None:
        data = bytes(request_bytes)
        with RawClient(server.address) as client:
            message = client.message("create", PROTOCOL, "model", len(data), follow=len(data))
            client.send(message, data)
            assert isinstance(client.reply(), Failure)
        assert answers(server)

    def test_numbers_that_no_call_has_are_refused_and_dropped(self, store: Store, server: Server) -> None:
        push = PushHeader(4, (Hyper(lr=1.0),), 1.0, 0.0, Encoding(Codec.F32))
        with RawClient(server.address) as client:
            hello(client)
            for verb, arguments, follow in (
                ("status", (), 8),
                ("transfer", (pushing(push),), 4 * SIZE * 1000),
            ):
                client.send(client.message(verb, *arguments, follow=follow), bytes(follow))
                refused = client.reply()
                assert isinstance(refused, Failure)
                assert f"numbers: found {follow} bytes" in refused.message
                assert isinstance(client.ask("status"), Answer)

    def test_crumbs_are_not_collected(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """A frame of one byte takes a hundred times its size in memory."""
        monkeypatch.setattr(incoming, "MAX_ARRAYS", 10)
        with RawClient(server.address) as client:
            hello(client)
            client.send(client.message("transfer", {}, follow=1000))
            for _ in range(100):
                client.socket.send(b"x")
            eventually(lambda: server.counters.cut_off == 1)
        assert answers(server)

    def test_a_second_try_replaces_the_first(self, store: Store, server: Server) -> None:
        """A connection broke within a gradient: what came of it is not mixed with what comes again."""
        push = PushHeader(4, (Hyper(lr=1.0),), 1.0, 0.0, Encoding(Codec.F32))
        ones = np.ones(store.layout.parameters, np.float32)
        with RawClient(server.address) as first:
            hello(first)
            first.ask("join", Role.WORKER, 0)
            store.join(1)
            first.ask("start", 5.0)
            message = first.message("transfer", pushing(push), follow=ones.nbytes)
            first.send(message, -ones[:100])
            eventually(lambda: server._clients.sessions[first.session].incoming)
            with RawClient(server.address) as second:  # replies go to the connection that is accepted last
                second.send(message, ones)
                assert isinstance(second.reply(), Answer)
                first.socket.send(-ones[100:])
                first.session = second.session
        assert answers(server)
        assert store.status().version == 1
        assert set(store.snapshot().tensors["w"].tolist()) == {-1.0}

    def test_what_comes_late_of_a_broken_connection_disturbs_nothing(
        self, store: Store, server: Server
    ) -> None:
        push = PushHeader(4, (Hyper(lr=1.0),), 1.0, 0.0, Encoding(Codec.F32))
        ones = np.ones(store.layout.parameters, np.float32)
        with RawClient(server.address) as old:
            hello(old)
            old.ask("join", Role.WORKER, 0)
            store.join(1)
            old.ask("start", 5.0)
            with RawClient(server.address) as new:
                hello(new)
                new.session, message = old.session, old.message("transfer", pushing(push), follow=ones.nbytes)
                new.socket.send(message)
                record = server._clients.sessions[old.session]
                eventually(lambda: len(record.incoming) == 1)
                old.socket.send(message)
                eventually(lambda: len(record.incoming) == 2)
                new.socket.send(ones)
                assert isinstance(reply := new.reply(), Answer)
                assert reply.seq == old.seq
                old.socket.send(ones)
                new.seq = old.seq
                assert isinstance(new.ask("status"), Answer)
        assert store.status().version == 1

    def test_what_a_client_lets_lie_waits_for_room(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pyps.remote.bounds.cpu_free_bytes", lambda: 16 * store.layout.flat_elements * 4)
        with (
            Server("model", "tcp://0.0.0.0:*", insecure=True) as server,
            RawClient(server.address.replace("0.0.0.0", "127.0.0.1")) as client,
        ):
            hello(client)
            client.ask("join", Role.OBSERVER, -1)

            def ask(received: int) -> None:
                client.seq += 1
                call = Call(client.session, client.seq, "snapshot", encode_raw((0, LONG)), received)
                client.send(encode(call))

            for _ in range(5):  # of those that come none is said to have come
                ask(2)
            found = [client.reply() for _ in range(3)]
            assert [type(one) for one in found] == [Answer] * 3
            assert client.reply(0.3) is None
            assert answers(server, "127.0.0.2")
            ask(5)
            assert isinstance(client.reply(), Answer)

    def test_claims_of_a_transfer_are_few(self, store: Store, server: Server) -> None:
        push = PushHeader(0, (Hyper(lr=1.0),), 1.0, 0.0, Encoding(Codec.F32))
        with RawClient(server.address) as client:
            hello(client)
            header = {"push": push, "ask": {"claims": 1 << 31}}
            refused = client.ask("transfer", header)
            assert isinstance(refused, Failure)
            assert "claims" in refused.message


class TestShares:
    @pytest.mark.promise("connections, sessions, calls under way")
    def test_one_key_leaves_room_for_the_others(self, store: Store, tmp_path: Path) -> None:
        keys = KeyFolder.open(tmp_path / "keys")
        for name in ("greedy", "modest"):
            keys.add(name)
        with Server("model", keys=tmp_path / "keys", sessions_per_client=3) as server:
            addresses = {
                n: f"{server.address}?keys={tmp_path / 'keys' / n}.key" for n in ("greedy", "modest")
            }
            far = [open_store(addresses["greedy"]) for _ in range(3)]
            with pytest.raises(Busy, match="found 3 sessions of key 'greedy'; expected at most 3"):
                open_store(addresses["greedy"])
            far.append(open_store(addresses["modest"]))
            far.pop(0).close()
            eventually(lambda: len(server._clients.threads) == 3)
            far.append(open_store(addresses["greedy"]))
            for one in far:
                one.close()

    @pytest.mark.promise("without keys: by host or process")
    def test_one_host_leaves_room_for_the_others(self, store: Store) -> None:
        with Server("model", "tcp://0.0.0.0:*", insecure=True, sessions_per_client=2) as server:
            near = server.address.replace("0.0.0.0", "127.0.0.1")
            greedy = [RawClient(near) for _ in range(3)]
            assert [type(hello(one)) for one in greedy] == [Answer, Answer, Failure]
            with RawClient(near, "127.0.0.2") as other:
                assert isinstance(hello(other), Answer)
            for one in greedy:
                one.__exit__()

    def test_all_together_are_bounded(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        server._site.bounds.sessions.most = 2
        held = [RawClient(server.address) for _ in range(3)]
        assert [type(hello(one)) for one in held] == [Answer, Answer, Failure]
        for one in held:
            one.__exit__()

    def test_a_session_is_its_peers_alone(self, store: Store) -> None:
        with Server("model", "tcp://0.0.0.0:*", insecure=True) as server:
            near = server.address.replace("0.0.0.0", "127.0.0.1")
            with RawClient(near) as owner, RawClient(near, "127.0.0.2") as thief:
                hello(owner)
                thief.session, thief.seq = owner.session, owner.seq
                assert isinstance(thief.ask("status"), Failure)
                thief.send(encode(Bye(owner.session)))
                thief.seq = 0
                assert isinstance(hello(thief), Failure)
                assert isinstance(owner.ask("status"), Answer)


class TestParts:
    def test_unfinished_ones_are_cut_off(self, server: Server) -> None:
        with RawConnection(server.address) as wild:
            assert wild.send_until_cut(bytes(FRAME_BYTES), 1000)
        eventually(lambda: server.counters.cut_off == 1)
        assert answers(server)

    def test_many_connections_share_one_bound(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bounds, "ALL_HELD_BYTES", 4 << 20)
        wild = [RawConnection(server.address) for _ in range(8)]
        for one in wild:
            for _ in range(4):
                one.part(bytes(FRAME_BYTES))
        eventually(lambda: server.counters.cut_off >= 4)
        assert answers(server)
        for one in wild:
            one.__exit__()

    def test_whole_ones_wait_outside_while_the_loop_is_busy(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        busy, goes_on = threading.Event(), threading.Event()
        look = connections.Connections.look

        def stand(self: connections.Connections, drained: bool) -> None:
            busy.set()
            goes_on.wait()
            look(self, drained)

        wild = [RawConnection(server.address) for _ in range(16)]
        monkeypatch.setattr(connections.Connections, "look", stand)
        assert busy.wait(30)
        monkeypatch.setattr(server_module, "TRIM_SECONDS", 0.1)
        monkeypatch.setattr(server, "_trim_at", 0.0)
        before = own_bytes()
        for one in wild:
            one.end.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                for _ in range(100):
                    one.part(bytes(FRAME_BYTES), more=False)
        held = own_bytes() - before
        goes_on.set()
        assert held < len(wild) * bounds.HELD_BYTES
        assert answers(server)
        eventually(lambda: own_bytes() - before < held // 2)  # the allocator's free memory goes too
        for one in wild:
            one.__exit__()

    def test_finished_ones_are_refused(self, server: Server) -> None:
        with RawConnection(server.address) as wild:
            wild.part(encode(Ping(bytes(16))))
            for _ in range(100):
                wild.part(b"")
            wild.part(b"", more=False)
            assert wild.ends()
        eventually(lambda: server.counters.refused == 1)
        assert answers(server)

    @pytest.mark.promise("open connections, a bounded number")
    def test_silent_connections_make_room(self, server: Server) -> None:
        server._site.bounds.connections.most = 8
        target = parse_address(server.address)
        strangers = [socket.create_connection((target.host, target.port)) for _ in range(20)]
        eventually(lambda: server.counters.cut_off >= 12)
        assert answers(server)
        for one in strangers:
            one.close()


FRAMES = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda verb, arguments, follow: (verb, arguments, follow),
        st.sampled_from(
            [
                "hello",
                "create",
                "join",
                "start",
                "transfer",
                "snapshot",
                "replan",
                "pull",
                "set_schedule",
                "set_data_set",
                "wait",
                "leave",
                "rejoin",
                "state",
                "nothing",
            ]
        ),
        st.lists(
            st.one_of(
                st.integers(-(1 << 63), (1 << 64) - 1),
                st.floats(),
                st.text(max_size=5),
                st.none(),
                st.just("model"),
                st.just(PROTOCOL),
                st.lists(st.integers(-3, 1 << 40), max_size=4),
                st.dictionaries(st.sampled_from(["samples", "lr", "codec", "push"]), st.integers(-1, 9)),
            ),
            max_size=3,
        ),
        st.sampled_from([0, 0, 0, 1, 100, FRAME_BYTES, 1 << 40]),
    ),
)


def test_any_frames_of_an_admitted_client_leave_the_others_served(store: Store) -> None:
    store.join(1)
    with Server("model", client_timeout_seconds=1.0) as server:
        _attack_with_frames(server)
        assert answers(server)
        assert server.counters.faults == 0
        eventually(lambda: not server._clients.threads)
    assert all(np.isfinite(store.snapshot().tensors["w"]))


def _attack_with_frames(server: Server) -> None:

    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.lists(FRAMES, max_size=6))
    def attack(frames: list[Any]) -> None:
        with RawClient(server.address) as client:
            hello(client)
            for frame in frames:
                if isinstance(frame, bytes):
                    client.send(frame)
                else:
                    verb, arguments, follow = frame
                    client.send(client.message(verb, *arguments, follow=follow), bytes(min(follow, 1000)))
            client.send(encode(Bye(client.session)))
        assert server._thread.is_alive()

    attack()


def hold_the_dimensions(address: str) -> None:
    with RawClient(address) as client:
        for _ in range(3):
            client.seq = 0
            client.session = os.urandom(16)
            ask_create(client, creation(tensors=[{"name": "w", "shape": [(1 << 62) + 1] * 250_000}]))


def leave_parts_unfinished(address: str) -> None:
    for data in (bytes(FRAME_BYTES), b""):
        with RawConnection(address) as wild:
            if data:
                wild.send_until_cut(data, 1000)
            else:
                wild.end.sendall(b"\x01\x00" * 200_000)


def send_many_parts(address: str) -> None:
    with RawConnection(address) as wild:
        wild.end.sendall(b"\x01\x00" * 30_000 + b"\x00\x00")  # sealed, more would be cut off before the end
        wild.ends()


def leave_while_waiting(address: str) -> None:
    for _ in range(100):
        with RawClient(address) as client:
            hello(client)
            client.send(client.message("wait", 1 << 40, LONG))
            client.send(encode(Bye(client.session)))


def send_large_nonsense(address: str) -> None:
    with RawClient(address) as client:
        for _ in range(300):
            client.send(os.urandom(FRAME_BYTES))
            client.send(client.message("replan", [1] * 100_000, None))
        client.send(b"")
        client.seq = 0
        client.session = os.urandom(16)
        hello(client)


@pytest.mark.timed
@pytest.mark.parametrize(
    "attack",
    sampled(
        [
            hold_the_dimensions,
            leave_parts_unfinished,
            send_many_parts,
            leave_while_waiting,
            send_large_nonsense,
        ],
        -1,
    ),
)
def test_an_innocent_worker_waits_less_than_a_second(shm: Path, attack: Callable[[str], None]) -> None:
    """Against the command, in a process of its own."""
    command = [str(Path(sys.executable).parent / "pyps"), "serve", "model", "--bind", TCP, "--insecure"]
    with (
        Store.create("model", {"w": np.zeros(SIZE)}, batches=[4, 4], policy="asp", samples=0) as store,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child,
    ):
        try:
            assert child.stdout is not None
            address = child.stdout.readline().split()[-1]
            store.join(1)
            with open_store(address) as worker:
                worker.join(0)
                attacker = threading.Thread(target=attack, args=(address,), daemon=True)
                attacker.start()
                longest, steps = 0.0, 0
                while attacker.is_alive() or steps < 20:
                    began = time.monotonic()
                    claim = worker.start()
                    staging = worker.stage()
                    staging.flat[:] = 0.0
                    worker.push(staging, claim.count, Hyper(lr=0.1))
                    worker.pull()
                    longest, steps = max(longest, time.monotonic() - began), steps + 1
                print(f"{attack.__name__}: {steps} steps, the longest {longest:.3f} s")
                assert longest < SECOND
        finally:
            child.send_signal(signal.SIGINT)  # after a SIGTERM it would wait for workers to leave
            child.communicate()


def test_a_connection_that_is_cut_and_one_that_takes_its_place(server: Server) -> None:
    """The new one has the descriptor of the old, and is left alone."""
    old = connections.Accepted(0, b"another")
    with RawClient(server.address) as client:
        hello(client)
        eventually(lambda: len(server._connections._open) == 1)  # the monitor may be later than the reply
        (now,) = server._connections._open.values()
        old.descriptor = now.descriptor
        server._connections.cut(old)
        assert isinstance(client.ask("status"), Answer)


@pytest.mark.promise("`pyps keys revoke` ends its sessions at once")
def test_a_revoked_key_ends_its_sessions_at_once(store: Store, tmp_path: Path) -> None:
    keys = KeyFolder.open(tmp_path / "keys")
    for name in ("bad", "good"):
        keys.add(name)
    with Server("model", keys=tmp_path / "keys") as server:
        bad, good = (
            open_store(f"{server.address}?keys={tmp_path / 'keys' / name}.key") for name in ("bad", "good")
        )
        bad.join(0)
        good.join(1)
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                bad.wait(1 << 40, LONG)
            except BaseException as error:
                failures.append(error)

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        key = (tmp_path / "keys" / "bad.key").read_bytes()
        KeyFolder.open(tmp_path / "keys").revoke("bad")
        assert not (tmp_path / "keys" / "bad.key").exists()
        eventually(lambda: [m.state for m in store.members() if m.rank == 0] == [MemberState.LEFT])
        waiter.join(30)
        assert [type(error) for error in failures] == [LinkRefused]
        bad.close()
        (tmp_path / "bad.key").touch(mode=0o600)
        (tmp_path / "bad.key").write_bytes(key)
        with pytest.raises(LinkRefused, match="does not admit"):
            open_store(f"{server.address}?keys={tmp_path / 'bad.key'}")
        assert good.status().active == 1
        KeyFolder.open(tmp_path / "keys").add("new")
        late = f"{server.address}?keys={tmp_path / 'keys' / 'new.key'}"

        def admitted() -> bool:
            try:
                open_store(late).close()
            except LinkRefused:
                return False
            return True

        eventually(admitted)
        good.close()
