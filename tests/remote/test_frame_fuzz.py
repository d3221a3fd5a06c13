"""Mutated messages of every verb in the tables: a server answers, or drops them, and serves the others on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hostile import CASES, VERBS, Known, mutated
from remote_tools import RawClient
from shard_tools import CHUNK, make, only_value, push, serving

from pyps.remote import create_store
from pyps.remote.server import Server
from pyps.remote.wire import Bye, Call, decode_request, encode
from pyps.store import Store

SEED = 29
BLOCKED_SECONDS = 0.5  # a mutated timeout may be an hour


@contextmanager
def trained(count: int) -> Iterator[tuple[list[Server], Store]]:
    """A store on so many servers, of one worker."""
    if count > 1:
        with serving(count) as (address, servers), make(address) as store:
            store.join(0)
            yield servers, store
        return
    tensors = {"w": np.zeros(4 * CHUNK)}
    with (
        Server("model", "tcp://127.0.0.1:*", insecure=True) as server,
        create_store(
            server.address, tensors, batches=[1], policy="asp:scaling=none", chunk_params=CHUNK
        ) as store,
    ):
        store.join(0)
        yield [server], store


def fuzz(server: Server, rounds: int, draw: random.Random) -> int:
    """Send mutated calls of one session after another; how many were answered."""
    known, names, answered = Known(CHUNK, (bytes(16),)), list(VERBS), 0
    client = RawClient(server.address)
    for k in range(rounds):
        name = names[k % len(names)]
        sent = client.message(name, *CASES[name](known, draw))
        sent = mutated(draw, sent) if draw.random() < 0.8 else sent
        found = decode_request(sent)
        ours = isinstance(found, Call) and (found.session, found.seq) == (client.session, client.seq)
        client.send(sent)
        if not ours:
            client.seq -= 1
        elif found.follow == 0 and client.reply(BLOCKED_SECONDS) is not None:
            answered += 1
        else:
            client.send(encode(Bye(client.session)))
            client.__exit__()
            client = RawClient(server.address)
    client.__exit__()
    return answered


def hold(count: int, rounds: int) -> None:
    draw = random.Random(SEED)
    with trained(count) as (servers, store):
        for step, server in enumerate(servers, 1):
            assert fuzz(server, rounds, draw) > rounds // 10
            push(store)
            assert only_value(store) == (step, step)
            assert server.counters.faults == 0


@pytest.mark.parametrize("count", [1, 2])
def test_others_are_served_on(shm: Path, count: int) -> None:
    hold(count, 3 * len(VERBS))


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2])
def test_others_are_served_on_through_5000_messages(shm: Path, count: int) -> None:
    hold(count, 5000)
