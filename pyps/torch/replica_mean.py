"""ReplicaMean: the GlobalMean of a model whose replicas meet through a manager, as torchft's do.

Rows and gradients are summed by the manager, which knows the replicas of the step; so the mean is over those
that are there. With its row each tells how many samples it takes. If these are not the round's, the step is
not committed. Nothing is kept from one step for the next: a replica that comes would not have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pyps.agreement.rows import Fields, Rows, StepAgreement, digest_of
from pyps.errors import InputError
from pyps.torch.global_mean import BackwardCall, GlobalMean
from pyps.torch.norm import UnevenSyncBatchNorm

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class ReplicaMean(GlobalMean):
    """The mean over a replica's own DistributedDataParallel, whose process group has this replica alone.

    rows: the samples that this replica takes in the step. expected: those of all replicas. idle: whether what
    it computes counts for nothing. trained: the samples of the latest step of all replicas.
    """

    def __init__(self, ddp: DistributedDataParallel, manager: Any, reduction: Any) -> None:
        if any(isinstance(module, UnevenSyncBatchNorm) for module in ddp.modules()):
            expected = "none: its ranks are those of a process group, not replicas that come and go"
            raise InputError("UnevenReplica", "model", "an UnevenSyncBatchNorm", expected)
        self.rows, self.expected, self.idle, self.trained = 0, 0, False, 0
        self._manager = manager
        super().__init__(ddp, reduction=reduction)
        state: Any = None
        ddp.register_comm_hook(state, lambda _, bucket: self._reduced(bucket))  # a lambda has no annotations

    def run(self, loss: torch.Tensor, call: BackwardCall, n: Any = None, *, is_part: bool = False) -> None:
        self._own_counts.clear()
        self.repeats(self._empty or self.idle)
        try:
            super().run(loss, call, n, is_part=is_part)
        finally:
            self.repeats(False)

    def sum(self, tensor: torch.Tensor) -> bool:
        """Sum in place over the step's replicas; whether that went well: else the step is not committed."""
        with self.waiting.counted():
            self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
        return self._manager.errored() is None

    def samples_now(self) -> int:
        return self.rows

    def meeting_groups(self) -> list[Any]:
        """None: what the manager sums is counted as a wait."""
        return []

    def check(self, found: torch.Tensor) -> None:
        """Note the samples of the step; others than the round's are not committed."""
        self.trained = int(found.sum())
        if self.expected and self.trained != self.expected:
            error = InputError(
                "UnevenReplica", "samples", f"{self.trained} of all replicas", f"{self.expected}"
            )
            self._manager.report_error(error)

    def _made_agreement(self, timeout: float) -> Any:
        if refused := self._refused_options():
            raise refused
        return _Rows(self, self._manager)

    def _reduced(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """DDP's communication hook: the bucket's average over the step's replicas."""
        buffer = bucket.buffer()
        self.sum(buffer)
        buffer /= self._manager.num_participants()
        done: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)
        done.set_result(buffer)
        return done

    def _reduce_held(self, *arguments: Any) -> None:
        super()._reduce_held(*arguments)
        self._unit = 1.0

    def rows_of(self, own: torch.Tensor) -> torch.Tensor | None:
        """A row of each of the step's replicas; None where one is gone: then the step is not committed."""
        rank, replicas = self._manager.participating_rank(), self._manager.num_participants()
        every = own.new_zeros(replicas, len(own), device=self.device)
        if rank is not None:
            every[rank] = own
        return every if self.sum(every) else None

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """By the manager. Where a replica is gone, the own row for each."""
        every = self.rows_of(own)
        return own.expand(self._manager.num_participants(), -1) if every is None else every


class _Rows(StepAgreement):
    """The rows of the step's replicas."""

    def __init__(self, mean: ReplicaMean, manager: Any) -> None:
        self._mean, self._manager = mean, manager
        self.rank = 0  # of this replica among those of the step

    def exchange(self, fields: Fields, values: Sequence[float], error: InputError | None = None) -> Rows:
        """Exchange rows. Where a replica is gone, take the own row for each: the step is not committed."""
        rank = self._manager.participating_rank()
        self.rank = rank or 0
        digest = digest_of(fields)
        rows = 0.0 if self._mean.idle or rank is None else float(self._mean.rows)
        head = [float(digest >> 32), float(digest & 0xFFFFFFFF), float(error is not None), rows]
        every = self._mean.rows_of(torch.tensor([*head, *values], dtype=torch.float64))
        if every is None:
            return [list(values)] * self._manager.num_participants()
        every = every.cpu()
        if error is not None or bool(every[:, 2].any()):
            listed = ", ".join(str(k) for k in every[:, 2].nonzero().flatten().tolist())
            found = error or InputError("UnevenReplica", "replicas", f"a refusal on {listed}", "none")
            raise found
        if bool((every[:, :2] != every[0, :2]).any()):
            expected = "the same model, loss and versions on all"
            raise InputError("UnevenReplica", "replicas", "rows that differ", expected)
        self._mean.check(every[:, 3])
        found_rows: Rows = every[:, len(head) :].tolist()
        return found_rows
