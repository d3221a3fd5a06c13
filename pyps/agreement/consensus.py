"""Consensus: all ranks report what they know, the first rank decides, and all read the same decision.

Messages lie in the process group's store. The first rank may wait for reports and the others for the
decision, both with a deadline. Where training steps lie between (each is a barrier), no rank ever waits.
A rank that does not come is named: first in a warning, and at the deadline in an InputError.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pyps.errors import InputError
from pyps.formats.files import learnt

DEADLINE_SECONDS = 300.0
WARN_SECONDS = 10.0
Message = TypeVar("Message", bound=msgspec.Struct)


class _Refusal(msgspec.Struct, frozen=True):
    """Hold what a rank refuses: the arguments of its InputError, or nothing."""

    error: tuple[str, str, str, str] | None = None


class _Refusals(msgspec.Struct, frozen=True):
    """The ranks that refuse, with what."""

    found: list[tuple[int, tuple[str, str, str, str]]]


class Consensus:
    """Numbered decisions of the ranks of a group.

    All ranks construct it together: it begins with a broadcast. purpose: the call that needs it, for
    messages. timeout: seconds to wait for other ranks. peers: the ranks that share a batch, of which the
    first one reports for all; the decision is the same in all of their groups. Raises InputError that names
    those that do not come.
    """

    def __init__(
        self,
        purpose: str,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEADLINE_SECONDS,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._peers, self._speaks = peers, peers is None or dist.get_rank(peers) == 0
        self._purpose, self._timeout = purpose, timeout
        base = dist.distributed_c10d._get_default_store()
        of_group = "" if group is None else group.group_name
        present = PrefixStore(f"pyps/{purpose}/present/{of_group}", base)
        came = present.add(str(self.rank), 1)  # how often; other ranks that are behind have not come yet
        # The store may outlive a restart, with its messages: each Consensus has a random name.
        device = "cpu" if dist.get_backend(group) != "nccl" else torch.cuda.current_device()
        name = torch.tensor([secrets.randbits(62)], device=device)
        first = 0 if group is None else dist.get_global_rank(group, 0)
        work = dist.broadcast(name, src=first, group=group, async_op=True)
        self._wait(work.is_completed, lambda rank: present.add(str(rank), 0) < came)
        work.wait()
        if peers is not None:
            dist.broadcast(name, src=dist.get_global_rank(peers, 0), group=peers)
        self.store = PrefixStore(f"pyps/{purpose}/{int(name)}", base)

    @property
    def decides(self) -> bool:
        """Return whether this rank makes the decisions."""
        return self.rank == 0 and self._speaks

    def agree(self, error: InputError | None) -> None:
        """Every rank calls it with what it refuses, if anything: all raise the first rank's that refuses."""
        own = None if error is None else (error.where, error.field, error.found, error.expected)
        if self._peers is not None:
            refusals: list[Any] = [None] * dist.get_world_size(self._peers)
            dist.all_gather_object(refusals, own, group=self._peers)
            own = next((refusal for refusal in refusals if refusal is not None), None)
        self.report(-1, _Refusal(own))
        if self.decides:
            reports = enumerate(self.reports(-1, _Refusal))
            self.decide(-1, _Refusals([(k, report.error) for k, report in reports if report.error]))
        refused = self.decision(-1, _Refusals).found
        if refused:
            rank, (where, field, found, expected) = refused[0]
            others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            raise InputError(where, f"{field} on rank {rank}{others}", found, expected) from error

    def report(self, number: int, message: msgspec.Struct) -> None:
        """Send what this rank knows for decision `number`."""
        if self._speaks:
            self.store.set(f"{number}/{self.rank}", msgspec.json.encode(message).decode())

    def reports(self, number: int, kind: type[Message]) -> list[Message]:
        """The reports of all ranks, in their order; waits for those that have not reported yet."""
        keys = [f"{number}/{rank}" for rank in range(self.ranks)]
        self._wait_for(keys, lambda rank: not self.store.check([keys[rank]]))
        found = [msgspec.json.decode(self.store.get(key), type=learnt(kind)) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        return found

    def decide(self, number: int, message: msgspec.Struct) -> None:
        """Announce the decision. The one before the last is deleted: all ranks have read it."""
        self.store.set(f"{number}/decision", msgspec.json.encode(message).decode())
        self.store.delete_key(f"{number - 2}/decision")

    def decision(self, number: int, kind: type[Message]) -> Message:
        """The decision; waits for it."""
        key = f"{number}/decision"
        self._wait_for([key], lambda rank: rank == 0)
        return msgspec.json.decode(self.store.get(key), type=learnt(kind))

    def _wait_for(self, keys: list[str], is_missing: Callable[[int], bool]) -> None:
        if not self.store.check(keys):
            self._wait(lambda: self.store.check(keys), is_missing)

    def _wait(self, is_done: Callable[[], bool], is_missing: Callable[[int], bool]) -> None:
        """Wait until it is done. Warn of the missing ranks, and at the deadline raise InputError."""
        began, warned = time.monotonic(), False
        while not is_done():
            waited = time.monotonic() - began
            if waited > min(WARN_SECONDS, self._timeout) and not warned:
                warned = True
                warnings.warn(f"rank {self.rank}: {self._purpose}: {self._found(is_missing)}", stacklevel=4)
            if waited > self._timeout:
                expected = f"a call on all {self.ranks} ranks within {self._timeout:g} s"
                raise InputError(
                    self._purpose, f"ranks, on rank {self.rank}", self._found(is_missing), expected
                )
            time.sleep(min(0.05, 0.001 + waited / 10))

    def _found(self, is_missing: Callable[[int], bool]) -> str:
        missing = [rank for rank in range(self.ranks) if rank != self.rank and is_missing(rank)]
        return f"no call on ranks {missing}" if missing else "a call on all ranks, but no answer"
