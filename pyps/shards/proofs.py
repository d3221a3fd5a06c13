"""How the servers of one model know a client, its parts and one another: by what no other can know.

A client's session at each shard is made from that at the first server, which therefore knows it; the log
gives each shard a proof of it, from which it cannot be made. A shard gives a receipt for each part it was
sent: made with the model's seal, which its maker gave to the servers alone.
"""

from __future__ import annotations

import hashlib
import hmac

from pyps.native.values import Tag

PROOF_BYTES = 16


def _digest(data: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=PROOF_BYTES, key=key).digest()


def shard_session(session: bytes, index: int) -> bytes:
    """The session at shard `index` of the client that has this one at the first server."""
    return _digest(b"shard" + index.to_bytes(4, "little"), session)


def proof(session: bytes) -> bytes:
    """By which a session at a shard is known."""
    return _digest(b"proof", session)


def proofs(session: bytes, servers: int) -> tuple[bytes, ...]:
    """Return those of the sessions at each shard of the client that has this one at the first server."""
    return tuple(proof(shard_session(session, index)) for index in range(servers))


def receipt(seal: bytes, index: int, tag: Tag) -> bytes:
    """That shard `index` holds its part of this gradient."""
    numbers = (index, *tag)
    return _digest(b"receipt" + b"".join(number.to_bytes(8, "little") for number in numbers), seal)


def same(found: bytes, expected: bytes) -> bool:
    """Return whether a secret is right, in a time that does not tell how much of it is."""
    return hmac.compare_digest(found, expected)
