"""An attacker with an admitted key, which plays every verb of the link with another's identity.

CASES has what each verb is given: numbers, ranks, runs and copies of the victim's. A test compares it with
the tables of verbs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyps.errors import LinkLost, StoreError
from pyps.formats.plan import TurnSchedule
from pyps.native.transfer import Ask, TransferRequest
from pyps.native.values import Codec, CostModel, DataSet, Encoding, Hyper, Role
from pyps.remote import verbs as link
from pyps.remote.address import Address
from pyps.remote.client import Client
from pyps.remote.verbs import Asked, LinkVerb
from pyps.remote.wire import PROTOCOL, PushHeader
from pyps.shards import verbs as shards
from pyps.shards.verbs import CommitHeader, LogKind

VERBS: dict[str, LinkVerb[Any, Any]] = {**link.VERBS, **shards.VERBS}


@dataclass
class Known:
    """Hold what the attacker knows of the victim: more than it could."""

    elements: int  # of the store, or of a shard
    sessions: tuple[bytes, ...]  # at the first server, then at each shard
    rank: int = 0
    client: int = 0
    run: int = 0


def header(known: Known, draw: random.Random) -> PushHeader:
    """A ruinous push."""
    lr = draw.choice((1.0, 1e30, 1e300))
    codec = Encoding(draw.choice(list(Codec)))
    return PushHeader(draw.choice((0, 1, 4)), (Hyper(lr=lr),), 1e6, 0.0, codec, draw.choice((None, 0, 1)))


def commit(known: Known, draw: random.Random) -> CommitHeader:
    receipts = tuple(draw.randbytes(16) for _ in range(draw.randrange(3)))
    pushed = draw.choice((None, header(known, draw)))
    pin = draw.choice((None, LogKind.PIN, LogKind.PIN_ALL, LogKind.APPLY, LogKind.END))
    return CommitHeader(draw.randrange(1, 2000), pushed, receipts, pin, ask(draw))


def ask(draw: random.Random) -> Ask:
    bits = [draw.random() < 0.5 for _ in range(3)]
    return Ask(bits[0], draw.choice((0, 3)), *bits[1:], max_samples=draw.choice((None, 1)))


def tag(known: Known, draw: random.Random) -> tuple[int, int]:
    return known.client, draw.randrange(1, 2000)


Case = Callable[[Known, random.Random], tuple[Any, ...]]
CASES: dict[str, Case] = {
    "hello": lambda k, d: (PROTOCOL, "model"),
    "create": lambda k, d: (PROTOCOL, "model", 0),
    "join": lambda k, d: (Role.OBSERVER, -1) if d.random() < 0.9 else (Role.WORKER, k.rank),
    "leave": lambda k, d: (),
    "rejoin": lambda k, d: (),
    "reap": lambda k, d: (),
    "start": lambda k, d: (0.0,),
    "start_ahead": lambda k, d: (d.choice((None, d.randrange(99))),),
    "should_continue": lambda k, d: (d.randrange(5), 1),
    "await_turn": lambda k, d: (0.0,),
    "set_max_samples": lambda k, d: (1,),
    "set_data_set": lambda k, d: (DataSet(7, d.randrange(9), 1.0, 0.0),),
    "set_cost_model": lambda k, d: (CostModel(1.0, 1.0),),
    "pull": lambda k, d: (d.choice(list(Codec)), d.choice((None, 3))),
    "read": lambda k, d: (d.randrange(4), 0.0),
    "snapshot": lambda k, d: (d.randrange(3), 0.1),
    "state": lambda k, d: (0.1,),
    "transfer": lambda k, d: (TransferRequest(header(k, d), d.choice(list(Codec)), ask(d)),),
    "status": lambda k, d: (),
    "members": lambda k, d: (),
    "ranks": lambda k, d: (),
    "costs": lambda k, d: (),
    "hyper": lambda k, d: (),
    "wait": lambda k, d: (d.randrange(1 << 40), 0.0),
    "replan": lambda k, d: ((d.randrange(1, 99),), None),
    "set_schedule": lambda k, d: (TurnSchedule((k.rank,), (1.0,), 1.0),),
    "enter": lambda k, d: (),
    "commit": lambda k, d: (commit(k, d),),
    "drop": lambda k, d: (d.randrange(2000), d.random() < 0.5),
    "pin_state": lambda k, d: (d.randrange(2000), 0.1),
    "made": lambda k, d: (),
    "remove_head": lambda k, d: (PROTOCOL, "model", k.run),
    "follow": lambda k, d: (d.randbytes(16), d.randrange(3), 0),
    "entries": lambda k, d: (0, 0.0),
    "offer_shard": lambda k, d: (PROTOCOL, "model", d.randrange(3)),
    "create_shard": lambda k, d: (PROTOCOL, "model", d.randrange(3), 0),
    "open_shard": lambda k, d: (PROTOCOL, "model", k.run, d.randrange(3)),
    "stage": lambda k, d: (k.run, tag(k, d), header(k, d)),
    "pull_pinned": lambda k, d: (k.run, tag(k, d), Codec.F32, 0.0),
    "read_pinned": lambda k, d: (k.run, tag(k, d), 0, 0.0),
}


def mutated(draw: random.Random, message: bytes) -> bytes:
    """The message with some bytes changed, dropped or added."""
    data = bytearray(message)
    for _ in range(draw.randrange(1, 6)):
        match draw.randrange(3):
            case 0:
                data[draw.randrange(len(data))] = draw.randrange(256)
            case 1:
                del data[draw.randrange(len(data)) :]
                data = data or bytearray(b"\x93")
            case 2:
                at = draw.randrange(len(data))
                data[at:at] = draw.randbytes(draw.randrange(1, 9))
    return bytes(data)


class Attacker:
    """Sessions of one key at some servers: strangers, observers, and such with the victim's names."""

    def __init__(self, servers: tuple[Address, ...], known: Known, seed: int) -> None:
        self._servers, self._known, self._draw = servers, known, random.Random(seed)
        self._sessions: dict[tuple[int, str], Client] = {}
        self.answered = 0  # calls that were no error
        self.refused = 0

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._sessions.values():
            client.close()

    def play(self, name: str) -> None:
        """Call a verb in some session at some server, with the victim's identity."""
        index, kind = self._draw.randrange(len(self._servers)), self._draw.choice(("new", "joined", "theirs"))
        client = self._session(index, kind)
        asked = Asked(VERBS[name], CASES[name](self._known, self._draw))
        size = self._draw.choice((0, 0, self._known.elements))
        numbers = [np.full(size, -1e6, np.float32)] if size else []
        try:
            client.exchange(asked, numbers)
            self.answered += 1
        except LinkLost:
            self.refused += 1
            self._sessions.pop((index, kind)).close()
        except StoreError:
            self.refused += 1
        if kind == "new" and self._draw.random() < 0.1:
            self._sessions.pop((index, kind)).close()

    def _session(self, index: int, kind: str) -> Client:
        if (found := self._sessions.get((index, kind))) is not None:
            return found
        first, *others = self._known.sessions
        theirs = self._draw.choice(others[index : index + 1] + [first] * (index == 0))
        client = Client(self._servers[index], theirs if kind == "theirs" else None)
        self._sessions[index, kind] = client
        if kind == "joined":
            with contextlib.suppress(StoreError):
                client.call(link.HELLO(PROTOCOL, "model"))
                client.call(link.JOIN(Role.OBSERVER, -1))
        return client
