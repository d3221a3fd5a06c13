"""Which stores are parts of a model over several servers: their last tensor's name says so."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from pyps.errors import InvalidArgument
from pyps.native.values import Tensor

MARK = re.compile(r"pyps\.([0-9a-f]{16})\.(\d+)\.([0-9a-f]{32})\.(\d+)")
SEAL_BYTES = 16


def mark(run: int, servers: int, seal: bytes, group: int) -> str:
    """A tensor's name in the store of a head or a shard (pyps.shards.cut)."""
    return f"pyps.{run:016x}.{servers}.{seal.hex()}.{group}"


def run_and_servers(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return which run's a head's or shard's store is, and over how many servers; None: no such store."""
    found = _marked(tensors)
    return None if found is None else (int(found[1], 16), int(found[2]))


def seal_of(tensors: Sequence[Tensor]) -> bytes:
    """The seal of a shard, known to its maker and the servers alone; of a head what `sealed` makes of it."""
    found = _marked(tensors)
    return b"" if found is None else bytes.fromhex(found[3])


def sealed(seal: bytes) -> bytes:
    """Return what all may see of a seal: who knows the seal is known by it."""
    return hashlib.blake2b(seal, digest_size=SEAL_BYTES).digest()


def _marked(tensors: Sequence[Tensor]) -> re.Match[str] | None:
    return MARK.fullmatch(tensors[-1].name) if tensors and tensors[-1].shape != (0,) else None


def check_whole(tensors: Sequence[Tensor]) -> None:
    """Raise InvalidArgument for a part: a push there alone would tear the model."""
    if (marked := run_and_servers(tensors)) is not None:
        expected = f"expected `join` over the link, with the addresses of its {marked[1]} servers"
        raise InvalidArgument("join", f"found a part of a model over several servers; {expected}")
