"""Consensus: all ranks report what they know, the first rank decides, and all read the same decision.

Messages lie in the process group's store. The first rank may wait for reports and the others for the
decision, both with a deadline. Where training steps lie between (each is a barrier), no rank ever waits.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pyps.solver.costs import Cost, Line, Table

DEADLINE = timedelta(seconds=60)
Message = TypeVar("Message", bound=msgspec.Struct)


class CostMessage(msgspec.Struct, frozen=True):
    """A cost as a message: the three numbers of a line, or the points of a table."""

    line: tuple[float, float, float] | None = None
    table: list[tuple[int, float]] | None = None

    @staticmethod
    def of(cost: Cost) -> CostMessage:
        if isinstance(cost, Table):
            return CostMessage(table=list(cost.points))
        return CostMessage(line=(cost.fixed_seconds, cost.per_sample_seconds, cost.floor_seconds))

    def cost(self) -> Cost:
        return Line(*self.line) if self.line else Table(tuple(self.table or ()))


class Consensus:
    """Numbered decisions of the ranks of a group.

    All ranks construct it together: it begins with a broadcast.
    """

    def __init__(self, purpose: str, group: dist.ProcessGroup | None = None, store: Any = None) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # The store may outlive a restart, with its messages: each Consensus has a random name.
        first = 0 if group is None else dist.get_global_rank(group, 0)
        name = [secrets.token_hex(8)]
        dist.broadcast_object_list(name, src=first, group=group)
        base = store or dist.distributed_c10d._get_default_store()
        self._store = PrefixStore(f"pyps/{purpose}/{name[0]}", base)

    def report(self, number: int, message: msgspec.Struct) -> None:
        """Send what this rank knows for decision `number`."""
        self._store.set(f"{number}/{self.rank}", msgspec.json.encode(message).decode())

    def reports(self, number: int, kind: type[Message]) -> list[Message]:
        """The reports of all ranks, in their order; waits for those that have not reported yet."""
        keys = [f"{number}/{rank}" for rank in range(self.ranks)]
        self._store.wait(keys, DEADLINE)
        found = [msgspec.json.decode(self._store.get(key), type=kind) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return found

    def decide(self, number: int, message: msgspec.Struct) -> None:
        """Announce the decision. The one before the last is deleted: all ranks have read it."""
        self._store.set(f"{number}/decision", msgspec.json.encode(message).decode())
        self._store.delete_key(f"{number - 2}/decision")

    def decision(self, number: int, kind: type[Message]) -> Message:
        """The decision; waits for it."""
        key = f"{number}/decision"
        self._store.wait([key], DEADLINE)
        return msgspec.json.decode(self._store.get(key), type=kind)
