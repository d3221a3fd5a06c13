"""Say what goes over the link: which calls there are, and what each carries. One page is the whole protocol.

A header is msgpack, at most MAX_HEADER_BYTES; bare numbers are frames (pyps.remote.framing). The calls are
those of pyps.remote.verbs. Every call has a unique name, {session, seq}: a server does each one once, in
order, and answers a repeated one with the same bytes again. At most MAX_IN_FLIGHT calls of a session are
under way at once; `received` says up to which seq the client has all replies.

To the server each frame is a message of its own, and a call says how many bytes of numbers follow it: the
parts of one message would all wait in the server's memory, uncounted, until the last has come.

    client -> server    Call(session, seq, verb, arguments, received, follow), then numbers of `follow` bytes
                        Ping(session, received)  on a separate connection, which no bulk holds up
                        Bye(session)        nothing comes back
    server -> client    Answer(seq, value) [numbers ...]
                        Failure(seq, code, what, message)
                        Pong(server, ...)   another server than before: it was restarted; no progress for
                                            long: a call or its reply got lost, and the call is sent again

Numbers are little-endian fp32, a codec's bytes, or (steps of a snapshot, ranges) 64-bit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from pyps.errors import InvalidArgument, StoreError
from pyps.native import ERRORS
from pyps.native.decisions import PolicyNeeds, PolicyParams
from pyps.native.state import StateHeader
from pyps.native.values import (
    Agreement,
    Codec,
    Encoding,
    Hyper,
    Layout,
    Optimizer,
    PushRequest,
    Tensor,
)
from pyps.store.backend import MAX_CALL_SECONDS, Count, Position

PROTOCOL = 12
SESSION_BYTES = 16
MAX_HEADER_BYTES = 1 << 18
MAX_REQUEST_BYTES = 4 << 20  # of a CreateRequest, with tensors by name: some 20,000 of them
MAX_MESSAGE_CHARACTERS = 2000  # of an error: it may quote what was sent
MAX_IN_FLIGHT = 16  # calls of a session: the transfers of the deepest pipeline, and some more

T = TypeVar("T")
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
    received: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0


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
    """Hold what an opened store is like; a client not heard of for `client_timeout_seconds` is dead."""

    server: bytes
    client_timeout_seconds: float
    layout: Layout
    tensors: tuple[Tensor, ...]
    policy_params: PolicyParams
    policy_needs: PolicyNeeds


class PushHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """pyps.native.values.PushRequest without its arrays.

    The gradient is the call's numbers, encoded unless it is fp32; averaged tensors follow as fp32. There are
    none where samples is 0. ranges: how many the gradient is of; None: it is whole. They go ahead of the
    numbers. staging: the client's buffer, that of the push before if this one waits on for its round.
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
    staging: Count = 0
    weight: Annotated[float, Meta(ge=0.0)] | None = None

    @classmethod
    def of(cls, request: PushRequest) -> PushHeader:
        fields = {name: getattr(request, name) for name in cls.__struct_fields__}
        return cls(**fields | {"ranges": None if request.ranges is None else len(request.ranges)})


def _plain(value: Any) -> Any:
    """A number of NumPy's, which a store on this machine takes too."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} does not travel over the link")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_requests: msgspec.msgpack.Decoder[Call | Ping | Bye] = msgspec.msgpack.Decoder(Call | Ping | Bye)
_replies: msgspec.msgpack.Decoder[Answer | Failure | Pong] = msgspec.msgpack.Decoder(Answer | Failure | Pong)
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
    return _decoded(_requests, header)


def decode_reply(header: Any) -> Answer | Failure | Pong | Malformed:
    """A header from a server: never raises."""
    return _decoded(_replies, header)


def _decoded(decoder: msgspec.msgpack.Decoder[T], header: Any) -> T | Malformed:
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Malformed(str(error))


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
