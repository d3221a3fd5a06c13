"""The row of agreement: what all ranks of a step must have alike, compared before the gradients are reduced.

Each rank sends one row of numbers: a digest of its fields (epoch, position, split, wire, the trained
parameters, versions ...), the kinds of its loss's terms, and what these were divided by. Rows that differ are
refused on all ranks, with the field, the ranks and their values. Rows travel on a gloo group of their own, so
that no GPU is waited for; a rank that sends none is named after a time that the script can set.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pyps.agreement.consensus import Consensus
from pyps.errors import InputError

Fields = Mapping[str, Any]
Rows = list[list[float]]  # by rank
GRACE_SECONDS = 2.0  # after a timeout: until all ranks that wait have said so
HEAD = 4  # numbers of a row before its values: a digest in two halves, whether it refuses, how many values
WIDTH = 28  # values that a row has room for; longer ones follow in a second exchange


class StepAgreement:
    """Rows of the ranks of a model, compared at each step.

    All ranks construct it together. group: the ranks with different samples. peers: the ranks that share this
    rank's samples, if there are any; they are compared too. timeout: seconds to wait for a rank's row.
    purpose: the call that sends rows, for messages. Raises InputError that names ranks which do not construct
    it, and on all ranks `error` if one gives that.
    """

    def __init__(
        self,
        purpose: str,
        group: dist.ProcessGroup,
        peers: dist.ProcessGroup | None,
        timeout: float,
        error: InputError | None = None,
    ) -> None:
        consensus = Consensus(purpose, group, timeout, peers)
        consensus.agree(error)
        own = dist.get_process_group_ranks(group)
        every = [own]
        if peers is not None:
            every = [[]] * dist.get_world_size(peers)
            dist.all_gather_object(every, own, group=peers)
        self.ranks = sorted({rank for ranks in every for rank in ranks})
        self._own = [self.ranks.index(rank) for rank in own]  # the rows of those with different samples
        self.rank = dist.get_rank(group)  # this rank's row among these
        self._purpose, self._timeout = purpose, timeout
        # dist.new_group would name it by the number of groups of each rank, which may differ.
        self._store = PrefixStore("rows", consensus.store)
        limit = timedelta(seconds=timeout + GRACE_SECONDS)
        self._place = self.ranks.index(dist.get_rank())
        self._group: Any = dist.ProcessGroupGloo(self._store, self._place, len(self.ranks), limit)
        self._calls = 0
        _alive.add(self)

    def exchange(self, fields: Fields, values: Sequence[float], error: InputError | None = None) -> Rows:
        """Send this rank's row and wait for all: the values of each rank of the group.

        error: what this rank refuses. Raises it on all ranks; and InputError where fields differ, or the
        number of values does.
        """
        self._calls += 1
        digest = digest_of(fields)
        head = [digest >> 32, digest & 0xFFFFFFFF, error is not None, len(values)]
        rows = self._gather([*head, *values[:WIDTH], *[0.0] * (WIDTH - len(values))])
        if any(row[2] for row in rows):
            self._raise_refusal(error)
        if any(row[:2] != rows[0][:2] or row[3] != rows[0][3] for row in rows):
            self._raise_difference({**fields, "values of a row": len(values)})
        rest = self._gather(values[WIDTH:]) if len(values) > WIDTH else [[]] * len(rows)
        return [[*rows[k][HEAD : HEAD + len(values)], *rest[k]] for k in self._own]

    def _gather(self, row: Sequence[float]) -> Rows:
        """Return each rank's row, of one length, in log2(ranks) messages (Bruck et al., 1997).

        gloo's own allgather hands a row to other threads and back, which takes twice as long.
        """
        many, own, known = len(self.ranks), self._place, 1
        rows = torch.empty(many, len(row), dtype=torch.float64)  # from this rank's on
        rows[0] = torch.tensor(row, dtype=torch.float64)
        deadline = time.monotonic() + self._timeout
        try:
            while known < many:
                part = min(known, many - known)
                sent = self._group.send([rows[:part]], (own - known) % many, 0)
                came = self._group.recv([rows[known : known + part]], (own + known) % many, 0)
                for work in (came, sent):
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                known += part
        except (RuntimeError, dist.DistError) as error:
            self._raise_missing(error)
        found: Rows = rows.tolist()
        return found[many - own :] + found[: many - own]

    def _gather_all(self, value: Any) -> list[Any]:
        """A value of JSON's types of each rank."""
        own = msgspec.json.encode(value)
        most = int(max(length for (length,) in self._gather([len(own)])))
        return [msgspec.json.decode(bytes(map(int, row))) for row in self._gather(list(own.ljust(most)))]

    def _raise_missing(self, error: Exception) -> None:
        """Name the ranks that have not sent their row."""
        with suppress(RuntimeError, dist.DistError):
            own, store = dist.get_rank(), PrefixStore(f"waits/{self._calls}", self._store)
            store.set(str(own), "waits")
            time.sleep(GRACE_SECONDS)
            missing = [rank for rank in self.ranks if rank != own and not store.check([str(rank)])]
            if missing:
                expected = f"as many calls on all ranks, within {self._timeout:g} s"
                found = f"no call {self._calls} on ranks {missing}, on rank {own}"
                raise InputError(self._purpose, "calls", found, expected) from error
        raise error

    def _raise_refusal(self, error: InputError | None) -> None:
        own = None if error is None else (error.where, error.field, error.found, error.expected)
        every = [None if one is None else tuple(one) for one in self._gather_all(own)]
        found = [
            (rank, refused) for rank, refused in zip(self.ranks, every, strict=True) if refused is not None
        ]
        where, field, what, expected = found[0][1]
        alike = len(found) == len(self.ranks) and len({refused for _, refused in found}) == 1
        on = "" if alike else f" on rank{'s' * (len(found) > 1)} {', '.join(str(rank) for rank, _ in found)}"
        raise InputError(where, f"{field}{on}", what, expected) from error

    def _raise_difference(self, fields: Fields) -> None:
        every = self._gather_all({name: repr(value) for name, value in fields.items()})
        for name in dict.fromkeys(name for one in every for name in one):
            values = [one.get(name, "nothing") for one in every]
            if len(set(values)) > 1:
                raise InputError(self._purpose, name, self._listed(values), "the same on all ranks")
        raise InputError(self._purpose, "row", "rows that differ", "the same on all ranks")

    def _listed(self, values: Sequence[str]) -> str:
        """Each value with its ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, value in zip(self.ranks, values, strict=True):
            ranks.setdefault(value, []).append(rank)
        return ", ".join(
            f"{value} on rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for value, of in ranks.items()
        )


# A DataLoader's worker that collected a group as garbage would end threads that it does not have, and crash.
_alive: WeakSet[StepAgreement] = WeakSet()
_of_parent: list[StepAgreement] = []
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=lambda: _of_parent.extend(_alive))


def digest_of(fields: Fields) -> int:
    """64 bits of the fields' text."""
    return int.from_bytes(hashlib.blake2b(repr(sorted(fields.items())).encode(), digest_size=8).digest())
