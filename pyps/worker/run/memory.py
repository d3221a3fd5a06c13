"""The bytes a step may still use, read while training, and the samples that fit into them.

On a GPU that is CUDA's own figure and what torch's allocator keeps there; on a CPU, this process's share of
what its host has free (pyps.profiler.host_memory).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyps.formats import Memory
from pyps.native.status import MemberState
from pyps.profiler.host_memory import PROC, cgroup_peers, cpu_free_bytes, cpu_held_bytes, trim_malloc
from pyps.store.store import Store

if TYPE_CHECKING:
    import torch

SHARE = 0.9  # of what is free; the rest is for other processes, which read it no more often than this one
GROWTH = 1.05  # hysteresis: the budget rises only after more than 5 % growth, since free memory fluctuates


def budget_bytes(device: torch.device, neighbours: int = 1, proc: Path = PROC) -> int:
    """All that this process may hold on a device: what it holds, and its share of what is free.

    `neighbours`: the processes, this one counted, that take from the same free memory of a CPU.
    """
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(SHARE * free) + int(torch.cuda.memory_reserved(device))
    return cpu_held_bytes(proc) + int(SHARE * cpu_free_bytes(proc)) // max(1, neighbours)


class MemoryBudget:
    """How many samples at once fit, of which the store's policy is told, so that it sizes batches by it.

    memory: the model of a profile. most: samples that a plan allows; 0: no limit. device: where steps are
    computed. extra_bytes: what this worker holds in host memory beyond what was profiled. announces: False:
    the policy may claim any number of samples, which local steps take a few at once. `most_` is the last
    answer of look(); 0: no limit.
    """

    def __init__(
        self,
        store: Store,
        memory: Memory | None,
        most: int,
        device: torch.device,
        extra_bytes: int = 0,
        announces: bool = True,
    ) -> None:
        self._store, self._memory, self._most = store, memory, most
        self._device, self._announces = device, announces
        self._extra_bytes = extra_bytes if device.type == "cpu" else 0
        self._peers = 1  # processes that take from the same free memory
        self._announced = -1
        self.most_ = 0

    def look(self) -> int:
        """Read the memory again: fewer samples as soon as fewer fit, more once it is clear that more do."""
        if self._memory is None:
            self.most_ = self._most
            return self.most_
        held = budget_bytes(self._device, self._peers) - self._extra_bytes
        fits = max(1, int((held - self._memory.fixed_bytes) // self._memory.bytes_per_sample))
        fits = min(fits, self._most) if self._most else fits
        if fits < self.most_:
            trim_malloc()  # smaller steps do not need it, and others may
        if not self.most_ or fits < self.most_ or fits > GROWTH * self.most_ or fits == self._most:
            self.most_ = fits
        return self.most_

    def announce(self) -> None:
        """Before a claim: give the store the number of samples that fit, if it has changed."""
        if self._store.servers:
            self._count_peers()
        if (most := self.change()) is not None:
            self._store.set_max_samples(most)

    def _count_peers(self) -> None:
        alive = (MemberState.ACTIVE, MemberState.FENCED)
        self._peers = cgroup_peers([m.pid for m in self._store.members() if m.state in alive])

    def change(self) -> int | None:
        """The number of samples that fit, for the caller to give to the store; None: it has not changed."""
        if not self._store.servers:  # else a look at its members is a call
            self._count_peers()
        if not self._announces or (most := self.look()) == self._announced:
            return None
        self._announced = most
        return most

    def forget(self) -> None:
        """Forget it: what was announced may not have arrived."""
        self._announced = -1
