"""The calls of the link: one table, from which the client calls, the server answers, and tests compare both.

A verb is made from a function's signature: of pyps.store.backend.Backend where nothing but plain values
travels, else of `Calls`. A type checker compares what the client gives and what the server answers with it;
what comes from the other side is decoded as its types say. `by`: which sessions may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import update_wrapper
from inspect import signature
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, get_type_hints

import msgspec
from numpy.typing import NDArray

from pyps.errors import InvalidArgument
from pyps.native.state import StateHeader
from pyps.native.transfer import Transferred, TransferRequest
from pyps.native.values import Codec
from pyps.remote.framing import Frames
from pyps.remote.wire import OpenReply, PushHeader, RequestBytes
from pyps.store.backend import Backend, Count, Timeout

P = ParamSpec("P")
R = TypeVar("R")
Arrays = Sequence[NDArray[Any]]
Plain = Callable[Concatenate[Any, P], R]  # a session's answer to a call
WithNumbers = Callable[Concatenate[Any, Frames, P], tuple[R, Arrays]]


class Caller(Flag):
    """Hold what a session is: a server looks here, and nowhere else, at who may call what.

    STRANGER: has opened nothing. OBSERVER: has opened the store, and has not joined it as a worker. WORKER:
    has joined as one. CREATOR: makes a store over several servers, of which some are not there yet. SERVER:
    follows this one, which is the first of several. PLANNER, REMOVER: Site.may_plan, Site.may_remove.
    """

    STRANGER = auto()
    OBSERVER = auto()
    WORKER = auto()
    CREATOR = auto()
    SERVER = auto()
    PLANNER = auto()
    REMOVER = auto()

    def __str__(self) -> str:
        return " or ".join(str(one.name).lower() for one in self)


OPENED = Caller.OBSERVER | Caller.WORKER
ANY = OPENED | Caller.STRANGER


class Bulk(Enum):
    """Hold what numbers follow a call, or its answer: at most a gradient's, a whole store's, a state's."""

    NONE = auto()
    GRADIENT = auto()
    STORE = auto()
    STATE = auto()


@dataclass(frozen=True, slots=True)
class Asked(Generic[R]):
    """A verb with its arguments: a call that can be sent."""

    verb: LinkVerb[Any, R]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class LinkVerb(Generic[P, R]):
    """function: the signature. arguments, value: decoders. bulk: what numbers come; back: what go back.
    needs_store: the server opens the store for a session that was silent.
    """

    function: Callable[..., Any]
    arguments: msgspec.msgpack.Decoder[Any]
    value: msgspec.msgpack.Decoder[R]
    by: Caller
    bulk: Bulk
    back: Bulk
    needs_store: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> Asked[R]:
        """The call with these arguments, all by position."""
        if named:
            raise TypeError(f"{self.name}: found arguments by name; expected all by position")
        return Asked(self, arguments)

    def check_caller(self, caller: Caller) -> None:
        """Raise InvalidArgument unless the session may call this."""
        if not self.by & caller:
            raise InvalidArgument(self.name, f"session: found that of a {caller}; expected {self.by}")


def verb(
    function: Callable[Concatenate[Any, P], R],
    by: Caller,
    bulk: Bulk = Bulk.NONE,
    back: Bulk = Bulk.NONE,
    needs_store: bool = True,
) -> LinkVerb[P, R]:
    """The verb of a function's name, arguments and result."""
    hints = get_type_hints(function, include_extras=True)
    types = tuple(hints[name] for name in list(signature(function).parameters)[1:])
    arguments = msgspec.msgpack.Decoder(tuple[types] if types else tuple[()])  # type: ignore[valid-type]
    value = msgspec.msgpack.Decoder(hints["return"])
    return LinkVerb(function, arguments, value, by, bulk, back, needs_store)


class Calls(Protocol):
    """Calls that a Backend's verbs become where arrays travel, as `numbers` behind them."""

    def hello(self, protocol: int, name: str) -> OpenReply:
        """Open the store."""

    def create(self, protocol: int, name: str, request_bytes: RequestBytes) -> OpenReply:
        """Make the store and open it. Numbers: pyps.remote.creation."""

    def pull(self, codec: Codec, ranges: Count | None) -> int:
        """Numbers: the ranges; None: all parameters. Back: their values in the codec, after the version."""

    def read(self, ranges: Count, timeout: Timeout) -> int:
        """Pull one version."""

    def snapshot(self, states: Count, timeout: Timeout) -> int:
        """Back: parameters, `states` optimizer vectors and steps."""

    def state(self, timeout: Timeout) -> tuple[StateHeader, tuple[Count, ...]]:
        """The header, and the ranks that have a residual. Back: parameters, vectors, residuals."""

    def transfer(self, request: TransferRequest[PushHeader]) -> Transferred:
        """Backend.begin_transfer, sent and done. Numbers: the gradient. Back: parameters in the codec."""


HELLO = verb(Calls.hello, Caller.STRANGER, needs_store=False)
CREATE = verb(Calls.create, Caller.STRANGER, Bulk.STORE, needs_store=False)
JOIN = verb(Backend.join, OPENED)
LEAVE = verb(Backend.leave, ANY, needs_store=False)
REJOIN = verb(Backend.rejoin, OPENED, needs_store=False)
REAP = verb(Backend.reap, OPENED)
START = verb(Backend.start, Caller.WORKER)
START_AHEAD = verb(Backend.start_ahead, Caller.WORKER)
SHOULD_CONTINUE = verb(Backend.should_continue, Caller.WORKER)
AWAIT_TURN = verb(Backend.await_turn, Caller.WORKER)
SET_MAX_SAMPLES = verb(Backend.set_max_samples, Caller.WORKER)
SET_DATA_SET = verb(Backend.set_data_set, Caller.WORKER)
SET_COST_MODEL = verb(Backend.set_cost_model, Caller.WORKER)
PULL = verb(Calls.pull, OPENED, Bulk.GRADIENT, Bulk.GRADIENT)
READ = verb(Calls.read, OPENED, Bulk.GRADIENT, Bulk.GRADIENT)
SNAPSHOT = verb(Calls.snapshot, OPENED, back=Bulk.STORE)
STATE = verb(Calls.state, OPENED, back=Bulk.STATE)
TRANSFER = verb(Calls.transfer, Caller.WORKER, Bulk.GRADIENT, Bulk.GRADIENT)
STATUS = verb(Backend.status, OPENED)
MEMBERS = verb(Backend.members, OPENED)
RANKS = verb(Backend.ranks, OPENED)
COSTS = verb(Backend.costs, OPENED)
HYPER = verb(Backend.hyper, OPENED)
WAIT = verb(Backend.wait, OPENED)
REPLAN = verb(Backend.replan, Caller.PLANNER)
SET_SCHEDULE = verb(Backend.set_schedule, Caller.PLANNER)

VERBS: dict[str, LinkVerb[Any, Any]] = {v.name: v for v in list(vars().values()) if isinstance(v, LinkVerb)}


@dataclass(frozen=True, slots=True)
class Handler:
    """How a verb is answered: answer(session, numbers, *arguments) gives a value, and numbers to go back."""

    verb: LinkVerb[Any, Any]
    answer: Callable[..., tuple[Any, Arrays]]


class Handlers(dict[str, Handler]):
    """Hold what a server does for each verb, by its name."""

    def plain(self, asked: LinkVerb[P, R]) -> Callable[[Plain[P, R]], Plain[P, R]]:
        """The decorated function's result is the verb's value: function(session, *arguments)."""

        def register(function: Plain[P, R]) -> Plain[P, R]:
            def answer(session: Any, numbers: Frames, *given: P.args, **none: P.kwargs) -> tuple[R, Arrays]:
                return function(session, *given, **none), ()

            self[asked.name] = Handler(asked, answer)
            return function

        return register

    def bulk(self, asked: LinkVerb[P, R]) -> Callable[[WithNumbers[P, R]], WithNumbers[P, R]]:
        """The decorated function also takes the numbers that came, and gives those that go back."""

        def register(function: WithNumbers[P, R]) -> WithNumbers[P, R]:
            self[asked.name] = Handler(asked, function)
            return function

        return register


def call(asked: LinkVerb[P, R]) -> Callable[Concatenate[Any, P], R]:
    """A method that makes this call, of an object with a `client`."""

    def method(self: Any, /, *arguments: P.args, **named: P.kwargs) -> R:
        value: R = self.client.call(asked(*arguments, **named))
        return value

    return update_wrapper(method, asked.function)
