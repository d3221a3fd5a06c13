"""What goes over the link: which calls there are, and what each carries. One page is the whole protocol.

A header is msgpack, at most MAX_HEADER_BYTES; bare numbers are frames (pyps.remote.framing). The calls are
those of pyps.native, by name. Every call has a unique name, {session, seq}: a server does each one once, in
order, and answers a repeated one with the same bytes again. At most MAX_IN_FLIGHT calls of a session are
under way at once; `received` says up to which seq the client has all replies.

To the server each frame is a message of its own, and a call says how many bytes of numbers follow it: the
parts of one message would all wait in the server's memory, uncounted, until the last has come.

    client -> server    Call(session, seq, verb, arguments, received, follow), then numbers of `follow` bytes
                        Ping(session)       on a separate connection, which no bulk holds up
                        Bye(session)        nothing comes back
    server -> client    Answer(seq, value) [numbers ...]
                        Failure(seq, code, what, message)
                        Pong(server, ...)   another server than before: it was restarted; no progress for
                                            long: a call or its reply got lost, and the call is sent again

Numbers are little-endian fp32, a codec's bytes, or (steps of a snapshot, ranges) 64-bit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from pyps.errors import InvalidArgument, StoreError
from pyps.formats.turns import TurnSchedule
from pyps.native import ERRORS
from pyps.native.state import StateHeader
from pyps.native.status import Member, RankCounters, Status
from pyps.native.values import (
    Advice,
    Agreement,
    Claim,
    Codec,
    CostModel,
    DataSet,
    Encoding,
    Hyper,
    Layout,
    Optimizer,
    PolicyParams,
    PushRequest,
    PushResult,
    RankCost,
    Role,
    Tag,
    Tensor,
    Ticket,
)

PROTOCOL = 5
SESSION_BYTES = 16
MAX_HEADER_BYTES = 1 << 18
MAX_REQUEST_BYTES = 4 << 20  # of a CreateRequest, with tensors by name: some 20,000 of them
MAX_MESSAGE_CHARACTERS = 2000  # of an error: it may quote what was sent
MAX_CALL_SECONDS = 3600.0  # no call waits longer, whatever was asked
MAX_IN_FLIGHT = 16  # calls of a session: the transfers of the deepest pipeline, and some more
STORE_TIMEOUT = -1.0

CallSeconds = Annotated[float, Meta(ge=STORE_TIMEOUT, le=MAX_CALL_SECONDS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
Position = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Rank = Annotated[int, Meta(ge=-1, lt=1 << 31)]
RequestBytes = Annotated[int, Meta(ge=0, le=MAX_REQUEST_BYTES)]
Session = Annotated[bytes, Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class Call(_Message, frozen=True):
    session: Session
    seq: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    verb: str
    arguments: msgspec.Raw
    received: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    follow: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0


class Ping(_Message, frozen=True):
    session: Session


class Bye(_Message, frozen=True):
    session: Session


class Answer(_Message, frozen=True):
    seq: int
    value: msgspec.Raw


class Failure(_Message, frozen=True):
    seq: int
    code: str
    what: str
    message: str


class Pong(_Message, frozen=True):
    """How far the calls of the ping's session are.

    taken: those up to it have come whole. left: bytes that are still to come of the next one.
    answered: replies up to it were sent, and had no numbers; 0 while one with numbers may be on its way.
    """

    server: bytes
    taken: int = 0
    left: int = 0
    answered: int = 0


class CreateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """pyps.native.values.Config without the initial values. It goes ahead of the call's numbers.

    These are the initial values and, of a state, its vectors, then the residuals of the ranks in `residuals`.
    """

    tensors: tuple[Tensor, ...]
    batches: tuple[int, ...]
    groups: int
    optimizer: Optimizer
    policy: int
    round_timeout_seconds: float
    samples: int
    chunk_params: int
    max_participants: int
    snapshot_spares: int
    staging_buffers: int
    policy_params: PolicyParams
    agreement: Agreement
    master: Codec = Codec.F32
    state: StateHeader | None = None
    residuals: tuple[Count, ...] = ()


class OpenReply(msgspec.Struct, frozen=True):
    """What an opened store is like; a client not heard of for `client_timeout_seconds` is dead."""

    server: bytes
    client_timeout_seconds: float
    layout: Layout
    tensors: tuple[Tensor, ...]
    policy_params: PolicyParams


class PushHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """pyps.native.values.PushRequest without its arrays.

    The gradient is the call's numbers, encoded unless it is fp32; averaged tensors follow as fp32. There are
    none where samples is 0. The server keeps the base parameters itself, by their version. ranges: how many
    the gradient is of; None: it is whole. They go ahead of the numbers.
    """

    samples: Count
    hyper: tuple[Hyper, ...]
    scale: float
    timeout: Annotated[float, Meta(ge=0.0, le=MAX_CALL_SECONDS)] | None
    encoding: Encoding
    base_version: Position | None = None
    grad_norm_squared: float = 0.0
    compute_seconds: float = 0.0
    position: Position = 0
    cost_seconds: float = 0.0
    data_seconds: float = 0.0
    ranges: Count | None = None

    @classmethod
    def of(cls, request: PushRequest) -> PushHeader:
        fields = {name: getattr(request, name) for name in cls.__struct_fields__}
        return cls(**fields | {"ranges": None if request.ranges is None else len(request.ranges)})


class TransferHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step's way there and back: a push, claims of later steps, a pull (pyps.native.transfer)."""

    push: PushHeader
    codec: Codec
    exchange: bool
    claims: Annotated[int, Meta(ge=0, le=MAX_IN_FLIGHT)]
    max_samples: Count | None


class TransferReply(msgspec.Struct, frozen=True):
    """As pyps.native.transfer.Transferred. push_seconds: of the push, at the server."""

    result: PushResult | None
    claims: tuple[Claim, ...]
    version: int | None
    push_seconds: float


class LogKind(IntEnum):
    """Of an entry of the log by which the first of several servers tells the others what it has decided.

    APPLY: a push is the next version. DROP: a push that was sent is none. END: a client has no more pushes.
    PIN, PIN_ALL: keep a copy of the parameters, or of all state, for a client to fetch. ENTER: a client may
    send pushes.
    """

    APPLY = 0
    DROP = 1
    END = 2
    PIN = 3
    PIN_ALL = 4
    ENTER = 5


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """tag: of the push or the pin; its first number is the client's."""

    kind: LogKind
    tag: Tag
    ticket: Ticket | None = None


class Following(msgspec.Struct, frozen=True, array_like=True):
    """Where a shard reads the log: from `index` on. When it has come to `end`, pushes of all other clients
    than `live` that it still holds are not needed. log: another one for each start of the first server.
    newest: the last client's number; they rise.
    """

    index: int
    end: int
    live: list[int]
    log: int
    newest: int


class CommitHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the first of several servers decides at once: a push whose parts every server has been sent, the
    claims of later steps, and the version to pull.

    seq: the client's number of it. pin: PIN or PIN_ALL; None: nothing is pulled. transfer: it is one
    (pyps.step.transfer), in which a rejected push is no error. exchange, max_samples, claims: as in
    TransferHeader.
    """

    seq: Position
    push: PushHeader | None = None
    pin: LogKind | None = None
    transfer: bool = False
    exchange: bool = False
    claims: Annotated[int, Meta(ge=0, le=MAX_IN_FLIGHT)] = 0
    max_samples: Count | None = None


class Verb:
    """The types of a call's arguments and of its value."""

    def __init__(self, arguments: Any, value: Any) -> None:
        self.arguments = msgspec.msgpack.Decoder(arguments)
        self.value = msgspec.msgpack.Decoder(value)


VERBS: Mapping[str, Verb] = {
    "hello": Verb(tuple[int, str], OpenReply),
    "create": Verb(tuple[int, str, RequestBytes], OpenReply),
    "join": Verb(tuple[Role, Rank], int),
    "leave": Verb(tuple[()], None),
    "rejoin": Verb(tuple[()], None),
    "reap": Verb(tuple[()], int),
    "start": Verb(tuple[CallSeconds], Claim),
    "start_ahead": Verb(tuple[()], Claim),
    "pull": Verb(tuple[Count | None], int),
    "pull_encoded": Verb(tuple[Codec], int),
    "read": Verb(tuple[Count, CallSeconds], int),
    "push": Verb(tuple[PushHeader], PushResult),
    "exchange": Verb(tuple[PushHeader, Codec], tuple[PushResult, int]),
    "transfer": Verb(tuple[TransferHeader], TransferReply),
    "should_continue": Verb(tuple[Count, Count], Advice),
    "set_max_samples": Verb(tuple[Count], None),
    "set_data_set": Verb(tuple[DataSet], None),
    "snapshot": Verb(tuple[Count, CallSeconds], int),
    "state": Verb(tuple[CallSeconds], tuple[StateHeader, tuple[Count, ...]]),
    "status": Verb(tuple[()], Status),
    "members": Verb(tuple[()], list[Member]),
    "ranks": Verb(tuple[()], list[RankCounters]),
    "hyper": Verb(tuple[()], list[Hyper | None]),
    "costs": Verb(tuple[()], list[RankCost]),
    "set_cost_model": Verb(tuple[CostModel], None),
    "replan": Verb(tuple[tuple[Count, ...], Position | None], None),
    "set_schedule": Verb(tuple[TurnSchedule], None),
    "wait": Verb(tuple[Position, CallSeconds], None),
    # of a model over several servers, to the first one
    "enter": Verb(tuple[()], int),
    "commit": Verb(tuple[CommitHeader], TransferReply),
    "drop": Verb(tuple[Position, bool], None),
    "made": Verb(tuple[()], None),
    "pin_state": Verb(tuple[Position, CallSeconds], StateHeader),
    "follow": Verb(tuple[Position, Position], Following),
    "entries": Verb(tuple[Position, CallSeconds], list[LogEntry]),
    "remove_head": Verb(tuple[int, str, Position], None),
    # to each of them
    "offer_shard": Verb(tuple[int, str, Count], None),
    "create_shard": Verb(tuple[int, str, Count, RequestBytes], OpenReply),
    "open_shard": Verb(tuple[int, str, Position, Count], OpenReply),
    "stage": Verb(tuple[Position, Tag, PushHeader], None),
    "pull_pinned": Verb(tuple[Position, Tag, Codec, CallSeconds], None),
    "read_pinned": Verb(tuple[Position, Tag, Count, CallSeconds], None),
}

# calls that numbers follow
WITH_NUMBERS = (
    "push",
    "exchange",
    "transfer",
    "create",
    "pull",
    "read",
    "create_shard",
    "stage",
)


def _plain(value: Any) -> Any:
    """A number of NumPy's, which a store on this machine takes too."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} does not travel over the link")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Call | Ping | Bye)
_replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer | Failure | Pong)
_creations = msgspec.msgpack.Decoder(CreateRequest)


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are no message of ours, and why."""

    reason: str


def encode(message: Call | Ping | Bye | Answer | Failure | Pong) -> bytes:
    return _encoder.encode(message)


def encode_raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))


def decode_creation(request: Any) -> CreateRequest:
    """Raises msgspec's errors."""
    return _creations.decode(request)


def decode_request(header: Any) -> Call | Ping | Bye | Malformed:
    """A header from any client: never raises."""
    if len(header) > MAX_HEADER_BYTES:
        return Malformed(f"a header of {len(header)} bytes")
    try:
        request: Call | Ping | Bye = _requests.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Malformed(str(error))
    return request


def decode_reply(header: Any) -> Answer | Failure | Pong | Malformed:
    """A header from a server: never raises."""
    try:
        reply: Answer | Failure | Pong = _replies.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Malformed(str(error))
    return reply


def failure(seq: int, error: StoreError) -> bytes:
    """An error, to be raised again on the other side."""
    return encode(Failure(seq, error.code, error.what, error.message[:MAX_MESSAGE_CHARACTERS]))


def raised(reply: Failure) -> StoreError:
    """The error that a Failure stands for."""
    return ERRORS.get(reply.code, StoreError)(reply.what, reply.message)


def check_byte_order() -> None:
    """Raise InvalidArgument on a machine whose numbers are not what the link carries."""
    if sys.byteorder != "little":
        raise InvalidArgument("link", f"found a {sys.byteorder}-endian machine; expected a little-endian one")
