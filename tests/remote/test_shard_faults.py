"""A model over several servers stays whole, or goes back to a checkpoint, whatever its clients do."""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import pytest
from shard_tools import (
    ONE,
    backend,
    make,
    only_value,
    push,
    push_claimed,
    serving,
)

from pyps import native
from pyps.errors import Busy, InvalidArgument, LinkLost, OutOfSpace, StoreError
from pyps.native.values import Codec, Encoding, PushRequest, Role
from pyps.remote import create_store, open_store
from pyps.remote.backend import RemoteBackend
from pyps.remote.server import Server
from pyps.remote.wire import PROTOCOL, OpenReply
from pyps.store import Store
from pyps.store.request import push_request


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


class HeadOnly(RemoteBackend):
    """A client of the head alone, as if it were a store."""

    def _open(self) -> OpenReply:
        reply: OpenReply = self.client.call("hello", PROTOCOL, "model")[0]
        return reply


def test_a_push_to_the_head_alone_is_refused(shm: Path) -> None:
    """Over the link, and from the first server's own host: no other server could apply it."""
    with serving(2) as (address, (home, _)), make(address, batches=[1, 1]) as store:
        store.join(0)
        raw = HeadOnly(home.address)
        raw.join(Role.WORKER, 1)
        claim, staging = raw.start(5.0), raw.stage(5.0)
        raw.staging(staging, raw.get_layout().flat_elements)
        request = PushRequest(staging, claim.count, (ONE,))
        for call in (raw.push, lambda request: raw.exchange(request, store.stage().flat)):
            with pytest.raises(InvalidArgument, match="found a model over several servers"):
                call(request)
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
        pointer = native.open_segment("model")
        native.join(pointer, Role.WORKER, 1)
        push(store)
        state = store.state()
        push(store)
        claim = native.start(pointer, native.STORE_TIMEOUT)
        staging = native.stage(pointer, native.STORE_TIMEOUT)
        native.push(pointer, PushRequest(staging, claim.count, (ONE,)))
        native.close(pointer)
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
        with pytest.raises(InvalidArgument, match="error_feedback=True"):
            calls._stage(100, wrong, calls._post_parts(100, wrong, parts))
        assert push_claimed(store, claim, -1.0).version == 1
        assert only_value(store) == (1.0, 1)


def test_a_shard_tries_again_where_a_server_has_no_place_or_its_host_no_memory(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(2) as (address, (_, far)), make(address) as store:
        store.join(0)
        shard, failures = far._shards.shard, [Busy("follow", "too many sessions"), OutOfSpace("push", "full")]
        apply, real = shard._apply, native.push

        def fails(entry: Any) -> None:
            if len(failures) == 2:
                raise failures.pop(0)
            apply(entry)

        @wraps(real)
        def full(pointer: Any, request: PushRequest) -> Any:
            if pointer is shard._pointer and failures:
                raise failures.pop()
            return real(pointer, request)

        monkeypatch.setattr(shard, "_apply", fails)
        monkeypatch.setattr(native, "push", full)
        for step in range(1, 4):
            push(store)
            assert only_value(store) == (step, step)
        assert not failures
