"""Which stores are parts of a model over several servers: their last tensor's name says so."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyps.errors import InvalidArgument
from pyps.native.values import Tensor

MARK = re.compile(r"pyps\.([0-9a-f]{16})\.(\d+)\.(\d+)")


def mark(run: int, servers: int, group: int) -> str:
    """A tensor's name in the store of a head or a shard (pyps.shards.cut)."""
    return f"pyps.{run:016x}.{servers}.{group}"


def run_and_servers(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Of the store of a head or a shard: which run's, and over how many servers; None: of no such store."""
    found = MARK.fullmatch(tensors[-1].name) if tensors and tensors[-1].shape != (0,) else None
    return None if found is None else (int(found[1], 16), int(found[2]))


def check_whole(tensors: Sequence[Tensor]) -> None:
    """Raise InvalidArgument for a part: a push there alone would tear the model."""
    if (marked := run_and_servers(tensors)) is not None:
        expected = f"expected `join` over the link, with the addresses of its {marked[1]} servers"
        raise InvalidArgument("join", f"found a part of a model over several servers; {expected}")
