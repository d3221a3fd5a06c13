"""A model over several servers stays whole, or goes back to a checkpoint, whatever its clients do."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from remote_tools import eventually
from shard_tools import (
    ONE,
    SILENCE,
    backend,
    make,
    only_value,
    push,
    push_claimed,
    serving,
)

from pyps.errors import (
    Busy,
    Fenced,
    InvalidArgument,
    LinkLost,
    NotFinite,
    OutOfSpace,
    StoreError,
    TimedOut,
)
from pyps.native import STORE_TIMEOUT
from pyps.native.local import LocalBackend
from pyps.native.transfer import Ask, TransferRequest
from pyps.native.values import Codec, Encoding, PushRequest, Role
from pyps.remote import create_store, open_store
from pyps.remote.link import LinkBackend
from pyps.remote.server import Server
from pyps.shards.host import FarLog
from pyps.shards.shard import MAX_PINS, MAX_STAGED
from pyps.shards.verbs import COMMIT, CommitHeader, LogKind
from pyps.store import Store
from pyps.store.staging import push_request


def lose(server: Server) -> None:
    """Its host was started anew: no shard, no session."""
    server._shards.shard.close(remove=True)
    server._shards._shard = None
    for session in list(server._clients.sessions):
        server._clients.end(session)


def test_a_gradient_from_before_a_rollback_is_in_no_version_after_it(shm: Path) -> None:
    """The worker after the rollback has the same number, and its pushes the same tags."""
    with serving(2) as (address, (home, far)):
        zero, one = make(address, batches=[1, 1]), open_store(address)
        zero.join(0), one.join(1)
        state = zero.state()
        push(one)
        one.pull()
        claim, late = one.start(), one.stage()
        late.flat[:] = -1000.0
        lose(far)
        with pytest.warns(UserWarning, match="all go back to version 0"):
            again = create_store(address, state=state)
        with again, open_store(address) as new:
            again.join(0), new.join(1)
            assert backend(new)._client == backend(one)._client
            with pytest.raises(LinkLost):
                one.push(late, claim.count, ONE)
            assert home._shards.shard._staged.tags() == far._shards.shard._staged.tags() == []
            for step in range(1, 5):
                push(new)
                assert only_value(new) == (step, step)
        for store in (zero, one):
            with suppress(StoreError):
                store.close()


def test_a_push_to_the_head_alone_is_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the link, and from the first server's own host: no other server could apply it."""
    monkeypatch.setattr("pyps.remote.link.run_and_servers", lambda _: None)  # it takes the head for a store
    with serving(2) as (address, (home, _)), make(address, batches=[1, 1]) as store:
        store.join(0)
        raw = LinkBackend(home.address)
        raw.join(Role.WORKER, 1)
        claim, staging = raw.start(5.0), raw.stage(5.0)
        raw.staging(staging)
        request = PushRequest(staging, claim.count, (ONE,))
        with pytest.raises(InvalidArgument, match="found a model over several servers"):
            raw.begin_transfer(TransferRequest(request))(store.stage().flat)
        raw.close()
        with Store.open("model") as here:
            with pytest.raises(InvalidArgument, match="with the addresses of its 2 servers"):
                here.join(1)
            here.join(role="observer")
        push(store)
        assert only_value(store) == (1.0, 1)


def test_a_shard_that_cannot_go_on_is_replaced_by_a_state(shm: Path) -> None:
    """The head has a version of which no shard has a gradient."""
    with serving(2) as (address, _), make(address, batches=[1, 1]) as store:
        store.join(0)
        head = LocalBackend.open("model")
        head.join(Role.WORKER, 1)
        push(store)
        state = store.state()
        push(store)
        claim, staging = head.start(STORE_TIMEOUT), head.stage(STORE_TIMEOUT)
        head.push(PushRequest(staging, claim.count, (ONE,)))
        head.close()
        with pytest.raises(StoreError, match="its gradient is not here"):
            store.pull()
        with pytest.raises(StoreError, match="found a shard that cannot go on"):
            open_store(address)
        with pytest.warns(UserWarning, match="all go back to version 1, and 2 pushes are undone"):
            again = create_store(address, state=state)
        with again, open_store(address) as other:
            again.join(0), other.join(1)
            push(again)
            assert only_value(again) == (2.0, 2)


def test_a_part_that_the_shard_could_not_apply_is_refused_before_the_decision(shm: Path) -> None:
    with serving(2) as (address, _), make(address) as store:
        store.join(0)
        calls, claim, staging = backend(store), store.start(), store.stage()
        staging.flat[:] = -1.0
        request = push_request(staging, claim.count, ONE, groups=1, encoding="bf16")
        header, parts, _ = calls._sent(request)
        wrong = msgspec.structs.replace(header, encoding=Encoding(Codec.BF16, error_feedback=True))
        seq = next(calls._numbers)
        with pytest.raises(InvalidArgument, match="error_feedback=True"):
            calls._stage(seq, wrong, calls._post_parts(seq, wrong, parts))
        assert push_claimed(store, claim, -1.0).version == 1
        assert only_value(store) == (1.0, 1)


def test_a_shard_tries_again_where_a_server_has_no_place_or_its_host_no_memory(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(2) as (address, (_, far)), make(address) as store:
        store.join(0)
        shard, failures = far._shards.shard, [Busy("follow", "too many sessions"), OutOfSpace("push", "full")]
        apply, real = shard._apply, shard._applier.push

        def fails(entry: Any) -> None:
            if len(failures) == 2:
                raise failures.pop(0)
            apply(entry)

        def full(request: PushRequest) -> Any:
            if failures:
                raise failures.pop()
            return real(request)

        monkeypatch.setattr(shard, "_apply", fails)
        monkeypatch.setattr(shard._applier, "push", full)
        for step in range(1, 4):
            push(store)
            assert only_value(store) == (step, step)
        assert not failures


def test_a_transfer_behind_one_that_a_server_did_not_take_fails_too(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second gradient would count for the first one's samples."""
    with serving(2) as (address, (_, far)), make(address, samples=1000, staging_buffers=2) as store:
        store.join(0)
        calls, stage, failures = backend(store), far._shards.shard.stage, [OutOfSpace("stage", "no room")]

        def refuses(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return stage(*arguments)

        monkeypatch.setattr(far._shards.shard, "stage", refuses)
        claims = store.start(), calls.start_ahead(None)
        finishes = []
        for claim in claims:
            staging = store.stage()
            staging.flat[:] = -1.0
            request = push_request(staging, claim.count, ONE, groups=1)
            finishes.append(calls.begin_transfer(TransferRequest(request, ask=Ask(exchanges=True))))
        out = np.empty(store.layout.flat_elements, np.float32)
        for finish, error in zip(finishes, ("no room", "an earlier transfer failed"), strict=True):
            with pytest.raises(StoreError, match=error):
                finish(out)
        assert store.status().version == 0
        store.rejoin()
        push(store)
        assert only_value(store) == (1.0, 1)


def test_an_exchange_that_is_fenced_after_its_push_says_so_at_once(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fenced(*_: object) -> int:
        raise Fenced("pull", "the worker missed a deadline")

    with serving(2) as (address, (home, _)), make(address) as store:
        store.join(0)
        claim, staging = store.start(), store.stage()
        staging.flat[:] = -1.0
        with monkeypatch.context() as patch:
            patch.setattr(home._shards.log, "pin", fenced)
            with pytest.raises(Fenced):
                store.exchange(staging, claim.count, ONE, np.empty_like(staging.flat))
        assert store.status().version == 1
        store.rejoin()
        assert only_value(store) == (1.0, 1)


@pytest.mark.parametrize("error", [Fenced, NotFinite])
def test_a_worker_that_cannot_fetch_what_its_push_brings_has_pushed(
    shm: Path, monkeypatch: pytest.MonkeyPatch, error: type[StoreError]
) -> None:
    """The first server took its push; the second one knows it no more, or cannot encode its parameters."""

    def left(*_: object) -> Any:
        raise error("pull", "this client has left the first server")

    with serving(2) as (address, (_, far)), make(address, samples=1000) as store:
        store.join(0)
        out = np.empty(store.layout.flat_elements, np.float32)
        for version in (1, 2):
            claim, staging = store.start(), store.stage()
            staging.flat[:] = -1.0
            request = push_request(staging, claim.count, ONE, groups=1)
            with monkeypatch.context() as patch:
                patch.setattr(far._shards.shard, "pinned", left)
                if version == 1:
                    result, pulled = store.send_and_pull(request, out)
                else:
                    transfer = TransferRequest(request, ask=Ask(exchanges=True))
                    done = backend(store).begin_transfer(transfer)(out)
                    assert done.result is not None
                    result, pulled = done.result, done.version
            assert (result.version, result.rank_pushes, pulled) == (version, version, None)
        assert only_value(store) == (2.0, 2)


def test_parts_that_found_no_room_do_not_count_as_held(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may try again as often as it likes: it holds nothing."""

    def full() -> Any:
        raise OutOfSpace("stage", "no room")

    with serving(2) as (address, (_, far)), make(address) as store:
        store.join(0)
        claim, staging = store.start(), store.stage()
        staging.flat[:] = -1.0
        with monkeypatch.context() as patch:
            patch.setattr(far._shards.shard._staged, "free", full)
            for _ in range(MAX_STAGED):
                with pytest.raises(OutOfSpace):
                    store.push(staging, claim.count, ONE)
        monkeypatch.setattr("pyps.shards.shard.WAIT_SECONDS", 2.0)
        assert store.push(staging, claim.count, ONE).version == 1


def test_one_that_is_silent_again_while_it_rejoins_rejoins_anew(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rejoin takes two calls, between which a stopped process may be found silent."""
    with serving(2) as (address, (home, _)), make(address) as store:
        store.join(0)
        entered, silent = home._shards.log.enter, [True]

        def enter(session: bytes) -> int:
            if silent and silent.pop():
                raise Fenced("enter", "nothing was heard of this client for 1 s")
            return entered(session)

        monkeypatch.setattr(home._shards.log, "enter", enter)
        store.rejoin()
        assert not silent
        push(store)
        assert only_value(store) == (1.0, 1)


def pin(store: Store) -> None:
    """A pull whose second half, to fetch what was pinned, does not come."""
    calls = backend(store)
    calls.client.call(COMMIT(CommitHeader(next(calls._numbers), pin=LogKind.PIN)))


def reconnect(server: Server) -> None:
    """Its link to the first server breaks; wait until it follows the log again."""
    shard = server._shards.shard
    assert isinstance(shard._source, FarLog)
    before = shard._source._client
    assert before is not None
    before.give_up("a test ends it")
    eventually(lambda: shard._source._client not in (None, before))


def test_pins_are_made_once_and_bounded_and_end_with_their_client(shm: Path) -> None:
    with serving(2) as (address, (_, far)), make(address) as store:
        store.join(0)
        shard = far._shards.shard
        for _ in range(5):
            store.pull()
        pin(store)
        eventually(lambda: len(shard._pins) == 1)
        reconnect(far)
        push(store)
        assert only_value(store) == (1.0, 1)  # all before it was read again
        assert len(shard._pins) == 1
        with open_store(address) as other:
            other.join(role="observer")
            for _ in range(MAX_PINS + 5):
                pin(other)
            push(store)
            assert only_value(store) == (2.0, 2)
            assert len(shard._pins) == 1 + MAX_PINS
            assert len({id(kept) for kept in shard._pins.values()}) == 2  # one copy of each version
        eventually(lambda: len(shard._pins) == 1)


def test_a_part_that_comes_after_its_client_has_left_is_not_kept(shm: Path) -> None:
    """Nothing would end it. Nor is one kept under a number that the first server has given to no client."""
    with serving(2) as (address, servers), make(address, batches=[1, 1]) as store:
        store.join(0)
        with open_store(address) as other:
            other.join(1)
            shard = servers[1]._shards.shard
            late, claim, staging = backend(other), other.start(), other.stage()
            staging.flat[:] = -1.0
            header, parts, _ = late._sent(push_request(staging, claim.count, ONE, groups=1))
            client = late._client
            other.rejoin()
            eventually(lambda: client not in shard._live and late._client in shard._live)
            late._client, late_client = client, late._client
            for held in range(2):  # it comes after the end; the end comes while it is written
                if held:
                    shard._live[client] = shard._live[late_client]
                    shard._check_finite = lambda *_: shard._end(client)  # type: ignore[method-assign]
                with pytest.raises(Fenced, match="this client has left"):
                    late._stage(100, header, late._post_parts(100, header, parts))
            late._client = late_client
        with pytest.raises(TimedOut):
            shard._wait("push", time.monotonic(), lambda: shard._may_stage(bytes(16), 1 << 60))
        for server in servers:
            assert server._shards.shard._staged.tags() == []


def test_a_creation_that_failed_leaves_room_for_the_next(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is there first; it ends with the session of the client that should have made the shards."""

    def full(*_: object) -> None:
        raise OutOfSpace("create", "no room")

    with serving(2) as (address, (_, far)):
        with monkeypatch.context() as patch:
            patch.setattr(far._shards, "create", full)
            with pytest.raises(OutOfSpace):
                make(address)
        eventually(lambda: not (shm / "pyps-model").exists())
        with make(address) as store:
            store.join(0)
            push(store)
            assert only_value(store) == (1.0, 1)


def test_each_server_of_one_machine_goes_on_with_its_own_shard(shm: Path) -> None:
    """A second first server is refused: it would decide as well."""
    with serving(2) as (address, (home, far)), make(address):
        options: dict[str, Any] = {"insecure": True, "client_timeout_seconds": SILENCE}
        with pytest.raises(Busy):
            Server("model", "tcp://127.0.0.1:*", **options)
        far._shards.shard.close(remove=False)
        with Server("model", "tcp://127.0.0.1:*", home=home.address, **options) as again:
            assert again._shards.shard.name == "model.shard-1-of-2"
            again._shards.shard.close(remove=True)


def test_an_observer_may_be_silent_over_several_servers(shm: Path) -> None:
    """It left the first server, and enters again by what it reads next."""
    with serving(2) as (address, servers), make(address) as store, open_store(address) as reader:
        store.join(0)
        reader.join(role="observer")
        push(store)
        assert only_value(reader) == (1.0, 1)
        for client in (reader.backend.client, *reader.backend._shards):
            client._heartbeat.stop()  # its pings stop, as a stopped process's do
            client._heartbeat.stop = lambda: None
        eventually(lambda: all(server.counters.timed_out for server in servers))
        push(store)
        assert only_value(reader) == (2.0, 2)
        assert reader.snapshot().version == reader.state().header.version == 2
