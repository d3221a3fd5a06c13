"""ReplicaHook: the weights of a model whose replicas meet through a manager, as torchft's do.

The sums go through the manager, which knows the replicas of the step. The first one of a step sums the
weights, so W is that of the replicas that are there. With it each tells how many samples it takes. If these
are not the round's, the step is not committed. Weights that are counted from forward()'s arguments have to be
in proportion to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.torch.ddp_hook import DDPHook, Reduced
from pyps.torch.norm import UnevenSyncBatchNorm
from pyps.torch.weighting import as_float64, not_zero

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class ReplicaHook(DDPHook):
    """The hook of a replica's own DistributedDataParallel, whose process group has this replica alone.

    rows: the samples that this replica takes in the step. expected: those of all replicas. idle: whether what
    it computes counts for nothing. trained: the samples of the latest step of all replicas.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        manager: Any,
        count: Callable[..., Any] | None,
        reduction: str,
    ) -> None:
        if any(isinstance(module, UnevenSyncBatchNorm) for module in ddp.modules()):
            expected = "none: its ranks are those of a process group, not replicas that come and go"
            raise InputError("UnevenReplica", "model", "an UnevenSyncBatchNorm", expected)
        super().__init__(ddp, None, count, reduction, "same", None)
        # Its process group has this replica alone.
        self.passes.largest, self.passes.ranks = lambda own: own, frozenset
        self.rows, self.expected, self.idle, self.trained = 0, 0, False, 0
        self._manager = manager

    def sum(self, tensor: torch.Tensor) -> bool:
        """Sum in place over the step's replicas; whether that went well: else the step is not committed."""
        with self.waiting.counted():
            self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
        return self._manager.errored() is None

    def reduce(self, bucket: GradBucket) -> Reduced:
        """DDP's communication hook: the bucket's weighted sum over the step's replicas."""
        buffer = bucket.buffer()
        if bucket.is_last():
            self._ready()
        if bucket.index() == 0:
            self._sum_weights(buffer.device, wait=True)
        self.sum(self._scaled(buffer))
        done: Reduced = Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)
        done.set_result(buffer)
        return done

    def meetings(self) -> int:
        """They are counted as waits."""
        return 0

    def watch_gradients(self) -> None:
        raise InputError("GradientNoise", "hook", "that of a replica", "one of ranks that stay")

    def _sum_weights(self, device: torch.device, wait: bool) -> None:
        own, unit = self._own_weight()
        if self.idle:
            own = unit = 0.0
        rows = as_float64(0 if self.idle else self.rows, device)
        message = torch.stack([as_float64(own, device), rows])
        if self.sum(message):
            self.trained = int(message[1])
            if self.expected and self.trained != self.expected:
                found, expected = f"{self.trained} of all replicas", f"{self.expected}"
                self._manager.report_error(InputError("UnevenReplica", "samples", found, expected))
            counted = self._count is None and not self.passes.is_said
            if counted and float(own) * self.trained != float(message[0]) * float(rows):
                found = f"{float(own):g} for {float(rows):g} samples, by the first tensor that forward() got"
                raise InputError("UnevenReplica", "weight", found, "as many for each sample, or pass count=")
        total, means = not_zero(message[0]), self.reduction == "mean"
        self._scale = (as_float64(unit, device) if means else float(not self.idle)) / total
        self._factors.clear()
        self._may_be_zero = True
        self._total = message[0]

    def _accumulate(self, batch: Any, parts: int | Sequence[int]) -> Iterator[Any]:
        if not isinstance(parts, int):
            raise InputError("accumulate", "parts", repr(parts), "this replica's number: UnevenReplica.parts")
        return self._micro_batches.cut(batch, parts)
