"""Each push once and nothing for ever: lost replies, repeated calls, workers and servers that die or stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from remote_tools import (
    HYPER,
    SIZE,
    RawClient,
    Relay,
    eventually,
    open_remote,
    process,
    push_ones,
    pushing,
    value,
)

from pyps.errors import (
    Busy,
    Ended,
    Fenced,
    Forked,
    InvalidArgument,
    LinkLost,
    NotFinite,
    StoreClosed,
)
from pyps.native.local import LocalBackend
from pyps.native.status import MemberState
from pyps.native.transfer import Ask, TransferRequest
from pyps.native.values import Codec, Encoding, Hyper, PushResult, Role
from pyps.remote import open_store
from pyps.remote.server import Server
from pyps.remote.wire import PROTOCOL, Answer, Call, Failure, PushHeader, encode, encode_raw
from pyps.store import Store, codec
from pyps.store.staging import push_request
from pyps.worker.step.client import StoreClient

PYPS = str(Path(sys.executable).parent / "pyps")
SILENCE = 0.8


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:
    """Two ranks, asynchronous: a push is a step of its own."""
    with Store.create(
        "model", {"w": np.zeros(SIZE)}, batches=[4, 2], policy="asp:scaling=none", samples=200
    ) as one:
        yield one


@pytest.fixture
def server(store: Store) -> Iterator[Server]:
    with Server("model", "tcp://127.0.0.1:*", insecure=True, client_timeout_seconds=SILENCE) as one:
        yield one


@pytest.mark.parametrize("lost", ["_add", "_begin", "_reply"])
def test_what_gets_lost_while_the_connection_lives_comes_again(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The numbers of a push, the whole call, or its reply."""
    dropped: list[object] = []
    act = getattr(Server, lost)

    def drop_one(self: Server, *arguments: Any) -> None:
        if dropped:
            act(self, *arguments)
            return
        dropped.append(arguments)
        if lost == "_add":
            arguments[0].incoming = None
        elif lost == "_begin":
            arguments[1].forget_incoming()

    with open_remote(server.address) as far:
        store.join(1)
        far.join(0)
        claim = far.start()
        monkeypatch.setattr(Server, lost, drop_one)
        staging = far.stage()
        staging["w"][:] = 1.0
        assert far.push(staging, claim.count, HYPER).version == 1
        assert dropped
        assert far.traffic.resent == 1
        assert store.status().version == 1


@pytest.mark.parametrize("exchange", [False, True])
def test_a_lost_reply_does_not_push_twice(store: Store, server: Server, exchange: bool) -> None:
    with (
        Relay(server.address) as relay,
        open_remote(relay.address) as far,
        open_remote(server.address) as near,
    ):
        far.join(0)
        near.join(1)
        claim = far.start()
        staging = far.stage()
        staging["w"][:] = 1.0
        out = np.zeros(far.layout.flat_elements, np.float32)
        results: list[PushResult] = []

        def push() -> None:
            if exchange:
                results.append(far.exchange(staging, claim.count, HYPER, out)[0])
            else:
                results.append(far.push(staging, claim.count, HYPER))

        relay.deaf.set()
        pusher = threading.Thread(target=push)
        pusher.start()
        eventually(lambda: store.status().version == 1)
        eventually(lambda: relay.swallowed > 0)
        near.start()
        push_ones(near, 2)  # another worker's push comes in between
        relay.deaf.clear()
        relay.cut()
        pusher.join(20)
        assert results == [replace(results[0], version=1, sources=1, samples=4)]
        assert far.traffic.resent >= 1
        assert server.counters.repeated >= 1
        assert store.status().version == 2
        assert value(store) == -1.0
        assert [r.pushes for r in store.ranks()] == [1, 1]
        assert not exchange or set(far.views(out)["w"].tolist()) == {-0.5}


def test_a_call_that_its_socket_does_not_take_is_sent_again(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is so where libzmq has given up the connection: a blocking send would never return."""
    send, refused = zmq.Socket.send, []

    def refuses(socket: zmq.Socket[bytes], frame: Any, flags: int = 0, **options: Any) -> Any:
        if socket.type == zmq.DEALER and len(refused) < 2:
            assert flags & zmq.NOBLOCK
            refused.append(True)
            raise zmq.Again
        return send(socket, frame, flags, **options)

    with open_remote(server.address) as far, monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "send", refuses)
        assert far.status().version == 0
        assert len(refused) == 2


def test_connections_that_break_all_the_time_lose_nothing(store: Store, server: Server) -> None:
    store.join(1)
    with Relay(server.address, breaks_every=12) as relay, open_remote(relay.address) as far:
        far.join(0)
        for pushes in range(1, 51):
            assert push_ones(far, far.start().count).version == pushes
        with pytest.raises(Ended):
            far.start()
        assert value(store) == -25.0
        assert store.ranks()[0].samples == 200
        assert far.traffic.resent > 2


def test_the_same_message_twice_is_one_push(store: Store, server: Server) -> None:
    store.join(1)
    with RawClient(server.address) as client:
        client.ask("hello", PROTOCOL, "model")
        client.ask("join", Role.WORKER, 0)
        client.ask("start", -1.0)
        gradient = PushHeader(4, (HYPER,), 1.0, None, Encoding(Codec.F32))
        numbers = np.ones(store.layout.parameters, np.float32)
        message = client.message("transfer", pushing(gradient), follow=numbers.nbytes)
        client.send(message, numbers)
        assert isinstance(first := client.reply(), Answer)
        for _ in range(3):
            client.send(message, numbers)
        assert [client.reply() for _ in range(3)] == [first] * 3
        assert store.status().version == 1
        client.seq -= 2  # an older name is refused
        old = client.ask("transfer", pushing(gradient))
        assert isinstance(old, Failure)
        assert old.code == InvalidArgument.code
        client.seq += 5  # a later one is all right: calls between were given up
        assert isinstance(client.ask("status"), Answer)


@pytest.mark.promise("connections, sessions, calls under way")
def test_a_repeated_call_is_answered_when_its_first_one_is(store: Store, server: Server) -> None:
    with RawClient(server.address) as client:
        client.ask("hello", PROTOCOL, "model")
        client.ask("join", Role.WORKER, 0)
        message = client.message("start", 20.0)  # waits for rank 1
        client.send(message)
        client.send(message)
        assert client.reply(0.2) is None
        client.send(client.message("status"))  # done after the one before
        client.send(encode(Call(client.session, 99, "status", encode_raw(()), 2)))
        early = client.reply()
        assert isinstance(early, Failure)
        assert (early.seq, early.code) == (99, Busy.code), "too many calls under way"
        store.join(1)
        assert [r.seq for r in (client.reply(), client.reply()) if isinstance(r, Answer)] == [3, 4]
        assert store.status().samples_assigned == 4


WORKER = """
import sys
from pyps.errors import Fenced
from pyps.remote import open_store
from pyps.native.values import Hyper

def push():
    area = store.stage()
    area["w"][:] = 1.0
    return store.push(area, claim.count, Hyper(lr=0.5))

with open_store(sys.argv[1]) as store:
    store.join(0)
    claim = store.start()
    print(claim.first, claim.count, flush=True)
    sys.stdin.readline()
    try:
        push()
    except Fenced as late:
        print("fenced", flush=True)
        store.rejoin()
        claim = store.start()
        print(push().version, flush=True)
"""


def test_a_killed_worker_gives_its_samples_back(store: Store, server: Server) -> None:
    store.join(1)
    with process(WORKER, server.address) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "0 4\n"
        child.kill()
        eventually(lambda: store.ranks()[0].returned == 4)
    assert store.start().first == 0, "what the dead one had comes first"
    assert server.counters.timed_out == 1
    (member,) = [m for m in store.members() if m.rank == 0]
    assert member.state is MemberState.LEFT
    with open_remote(server.address) as successor:
        assert successor.join() == 0


def test_a_stopped_worker_is_fenced_and_comes_back(store: Store, server: Server) -> None:
    store.join(1)
    with process(WORKER, server.address) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        eventually(lambda: store.ranks()[0].returned == 4)
        child.send_signal(signal.SIGCONT)
        out, _ = child.communicate("go on\n", timeout=20)
        assert out == "fenced\n1\n"
        assert child.returncode == 0
    assert value(store) == -0.5
    assert store.status().samples_dropped == 0


def test_a_silent_worker_learns_what_became_of_its_push(store: Store, server: Server) -> None:
    """Its push was taken, the reply was lost, and it was given up meanwhile: still no second push."""
    store.join(1)
    with RawClient(server.address) as client:
        client.ask("hello", PROTOCOL, "model")
        client.ask("join", Role.WORKER, 0)
        client.ask("start", -1.0)
        gradient = PushHeader(4, (HYPER,), 1.0, None, Encoding(Codec.F32))
        numbers = np.ones(store.layout.parameters, np.float32)
        message = client.message("transfer", pushing(gradient), follow=numbers.nbytes)
        client.send(message, numbers)
        assert isinstance(first := client.reply(), Answer)
        eventually(lambda: server.counters.timed_out == 1)
        client.send(message, numbers)
        assert client.reply() == first
        late = client.ask("start", -1.0)
        assert isinstance(late, Failure)
        assert late.code == Fenced.code
        assert isinstance(client.ask("rejoin"), Answer)
        assert isinstance(client.ask("start", -1.0), Answer)
        assert store.status().version == 1


def test_an_observer_may_be_silent(store: Store, server: Server) -> None:
    with RawClient(server.address) as client:
        client.ask("hello", PROTOCOL, "model")
        client.ask("join", Role.OBSERVER, -1)
        eventually(lambda: server.counters.timed_out == 1)
        assert isinstance(client.ask("status"), Answer)
        assert isinstance(client.ask("pull", Codec.F32, None), Answer)


def test_a_rank_that_another_worker_took_is_busy(store: Store, server: Server) -> None:
    store.join(1)
    with RawClient(server.address) as client:
        client.ask("hello", PROTOCOL, "model")
        client.ask("join", Role.WORKER, 0)
        eventually(lambda: server.counters.timed_out == 1)
        with Store.open("model") as other:
            eventually(lambda: all(m.state is MemberState.LEFT for m in store.members() if m.rank == 0))
            other.join(0)
            late = client.ask("rejoin")
            assert isinstance(late, Failure)
            assert late.code == Busy.code
            assert isinstance(again := client.ask("pull", Codec.F32, None), Failure)
            assert again.code == Fenced.code
        assert isinstance(client.ask("rejoin"), Answer)


def test_an_exchange_that_was_fenced_after_its_push_has_its_result(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fenced(*_: object) -> int:
        raise Fenced("pull", "the worker missed a deadline")

    store.join(1)
    with open_remote(f"{server.address}&pull=int8") as far:
        far.join(0)
        out = np.zeros(far.layout.flat_elements, np.float32)
        for pushes in (1, 2):
            claim, staging = far.start(), far.stage()
            staging.flat[:] = 1.0
            request = push_request(staging, claim.count, HYPER, groups=1)
            with monkeypatch.context() as patch:
                patch.setattr(LocalBackend, "pull_encoded", fenced)
                if pushes == 1:
                    result, version = far.send_and_pull(request, out)
                    assert (result.rank_pushes, version) == (1, None)
                else:
                    with pytest.raises(Fenced, match="after its push, which counts"):
                        far.exchange(staging, claim.count, HYPER, out)
            assert store.status().version == pushes


@pytest.mark.parametrize("way", ["exchange", "worker", "transfer"])
def test_a_push_counts_though_its_parameters_cannot_be_encoded(shm: Path, way: str) -> None:
    """A value that is not finite is not the gradient: no later claim is skipped in its place."""
    with (
        Store.create("model", {"w": np.full(SIZE, 3e38)}, batches=[4], policy="asp:scaling=none") as store,
        Server("model") as server,
        open_remote(f"{server.address}?pull=int8") as far,
    ):
        far.join(0)
        far.start()
        staging, following = far.stage(), far.start_ahead()
        staging.flat[:] = -3e38
        request = push_request(staging, 4, Hyper(lr=1.0), groups=1)
        out = np.zeros_like(staging.flat)
        if way == "exchange":
            with pytest.raises(NotFinite, match="pull"):
                far.exchange(staging, 4, Hyper(lr=1.0), out)
        elif way == "worker":
            client = StoreClient(far, Codec.F32, budget=None)
            came, _ = client.begin_transfer(TransferRequest(request, ask=Ask(exchanges=True)))(out, None)
            assert (came.result is not None, came.version) == (True, None)
        else:
            done = far.begin_transfer(TransferRequest(request))(out)
            assert (done.result is not None, done.version) == (True, None)
        assert len({far.stage().index for _ in range(far.layout.staging_buffers)}) == 2
        assert (store.ranks()[0].pushes, store.ranks()[0].skipped) == (1, 0)
        assert following is not None
        assert far.start().first == following.first
        with pytest.raises(NotFinite):
            far.pull()


def test_values_that_cannot_be_encoded_are_not_sent(store: Store, server: Server) -> None:
    store.join(1)
    with open_remote(server.address) as far:
        far.join(0)
        claim = far.start()
        staging = far.stage()
        staging["w"][:] = np.nan
        with pytest.raises(NotFinite):
            far.push(staging, claim.count, HYPER, encoding="int8")
        assert far.push(staging, 0, HYPER).version == 0
        assert store.ranks()[0].skipped == claim.count
        far.start()
        staging = far.stage()
        staging["w"][:] = 1.0
        staging["w"][5] = np.inf
        result = far.push(staging, 4, HYPER, encoding=Encoding(Codec.INT8, nonfinite="zero"))
        assert result.nonfinite == 1


def test_to_encode_is_no_computing(store: Store, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is so on this machine, where the core encodes after it has looked at the clock."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    def slow(*arguments: Any, **options: Any) -> Any:
        clock.now += 100.0
        return codec.encode(*arguments, **options)

    clock = Clock()
    monkeypatch.setattr("pyps.remote.away.time", clock)
    monkeypatch.setattr("pyps.remote.away.encode", slow)
    store.join(1)
    with open_remote(server.address) as far:
        far.join(0)
        claim, staging = far.start(), far.stage()
        staging["w"][:] = 1.0
        far.push(staging, claim.count, HYPER, encoding="int8")
        assert clock.now == 100.0
        assert far.costs()[0].sample_seconds < 1.0


SERVER = """
import sys
from pyps.remote.server import Server
with Server("model", sys.argv[1], insecure=True, client_timeout_seconds=float(sys.argv[2])) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.timed
def test_a_killed_server_is_an_error_and_a_new_one_is_recognized(store: Store) -> None:
    store.join(1)
    with process(SERVER, "tcp://127.0.0.1:*", str(SILENCE)) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        far, other = open_remote(address), open_remote(address)
        far.join(0)
        claim = far.start()
        staging = far.stage()
        child.kill()
        child.wait()
        began = time.monotonic()
        with pytest.raises(LinkLost, match="nothing more was heard") as lost:
            far.push(staging, claim.count, HYPER)
        assert time.monotonic() - began < 10 * SILENCE
        assert lost.value.code == "lost"
        far.close()
        with pytest.raises(StoreClosed):
            far.status()
    assert store.reap() == 1
    assert store.ranks()[0].returned == claim.count
    with process(SERVER, address.rpartition("/")[0], str(SILENCE)) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == address
        with pytest.raises(LinkLost):
            other.status()
        other.close()
        with open_remote(address) as again:
            assert again.join() == 0


def test_no_server_is_an_error(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyps.remote.client.CONNECT_SECONDS", 0.3)
    with pytest.raises(LinkLost, match="nothing was heard of a server"):
        open_store("tcp://127.0.0.1:9/model?insecure=1")


def test_closing_a_server_ends_what_waits_there(store: Store) -> None:
    server = Server("model", client_timeout_seconds=SILENCE)
    with open_remote(server.address) as far:
        far.join(0)
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                far.start(timeout=1.0)
            except BaseException as error:
                failures.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.2)
        server.close()
        waiter.join(20)
        assert isinstance(failures[0], LinkLost)
    assert store.status().active == 0


def test_the_command_serves_and_ends_in_order(store: Store) -> None:
    command = [PYPS, "serve", "model", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = json.loads(child.stdout.readline())["address"]
        with open_remote(address) as far:
            assert far.status().version == 0
        child.terminate()
        assert child.wait(20) == 128 + signal.SIGTERM


def test_a_dead_workers_successor_waits_for_its_rank(store: Store, server: Server) -> None:
    with RawClient(server.address) as dead, open_remote(server.address) as far:
        dead.ask("hello", PROTOCOL, "model")
        dead.ask("join", Role.WORKER, 0)
        assert far.join(0) == 0
        assert server.counters.timed_out == 1
        with open_remote(server.address) as third, pytest.raises(Busy):
            third.join(0)


def test_a_forked_child_may_not_use_the_link_and_does_no_harm(store: Store, server: Server) -> None:
    with open_remote(server.address) as far:
        far.join(0)
        child = os.fork()
        if child == 0:
            try:
                far.status()
            except Forked:
                far.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert far.status().active == 1


def test_a_server_is_closed_once(store: Store) -> None:
    server = Server("model")
    server.close()
    server.close()


def test_the_command_says_what_is_wrong(store: Store, tmp_path: Path) -> None:
    def serve(*options: str) -> str:
        done = subprocess.run([PYPS, "serve", "model", *options], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stdout == ""
        return done.stderr

    assert "without keys" in serve("--bind", "tcp://*:*")
    assert "tcp://host:port" in serve("--bind", "10.0.0.1:5555")
    assert "client_timeout" in serve("--client-timeout", "0")
    (tmp_path / "file").touch()
    assert "folder" in serve("--keys", str(tmp_path / "file"))


def test_a_round_does_not_wait_for_the_silent(shm: Path) -> None:
    """Synchronous: who said nothing more is left out, and what he had is handed out again."""
    with (
        Store.create("model", {"w": np.zeros(SIZE)}, batches=[4, 2], samples=12),
        Server("model", client_timeout_seconds=SILENCE) as server,
        open_remote(server.address) as far,
        RawClient(server.address) as dead,
    ):
        dead.ask("hello", PROTOCOL, "model")
        dead.ask("join", Role.WORKER, 0)
        far.join(1)
        dead.ask("start", -1.0)
        claim = far.start()
        assert (claim.first, claim.count) == (4, 2)
        result = push_ones(far, 2)
        assert (result.sources, result.samples) == (1, 2)
        assert far.start().first == 0
        assert value(far) == -0.5
