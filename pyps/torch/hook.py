"""weighted_hook: the gradient of uneven batches, exactly, in DDP's own reduction.

DDP averages: 1/N for each rank, whatever its batch. The gradient of the mean loss over all samples is

    g = sum_i (w_i / W) g_i,    W = sum_i w_i,    w_i the samples (or targets) behind rank i's gradient g_i

The hook multiplies each bucket by w_i / W and sums. w_i is counted from the batch that the model was given, W
is summed beside the first bucket: both are true also in the epoch's last round, after a new plan and after
ranks have come or gone. W of the round before is used for the multiplication, so that nobody waits for the
sum, and corrected once it is there, if it changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from pyps.errors import InputError
from pyps.torch.codec import INT4, INT8
from pyps.torch.exchange import quantized_sum
from pyps.torch.norm import UnevenSyncBatchNorm
from pyps.torch.residual import Residuals
from pyps.torch.sampler import UnevenBatchSampler

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Wire = Literal["same", "bf16", "f16", "int8", "int4"]
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
CODECS = {"int8": INT8, "int4": INT4}
Reduced = Future[torch.Tensor]


@dataclass
class Traffic:
    """What this rank sent for gradients: bytes, and what fp32 by ring all-reduce would have sent."""

    sent_bytes: int = 0
    fp32_bytes: int = 0


def weighted_hook(
    model: torch.nn.Module,
    sampler: UnevenBatchSampler | None = None,
    *,
    count: Callable[..., Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    wire: Wire = "same",
    scaler: Any = None,
) -> WeightedHook:
    """Register the weighted reduction on a DistributedDataParallel model, compiled or not.

    sampler: if given, the first round's samples are checked against its rounds. count: from forward()'s
    arguments to w_i; by default the length of the first tensor among them (its samples). For weights by
    targets: count=lambda inputs, targets: (targets != -100).sum(), or hook.weigh(n) before each backward().
    reduction: whether the loss is the mean over those w_i, or their sum. wire: what gradients travel as; int8
    and int4 with error feedback. scaler: the torch.amp.GradScaler in use, so that kept errors follow its
    scale. Raises InputError for a model that is not DDP or an unknown option.
    """
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        raise InputError("weighted_hook", "model", type(ddp).__name__, "a DistributedDataParallel")
    if wire != "same" and wire not in HALVES and wire not in CODECS:
        raise InputError("weighted_hook", "wire", repr(wire), "same, bf16, f16, int8 or int4")
    if reduction not in ("mean", "sum"):
        raise InputError("weighted_hook", "reduction", repr(reduction), "mean or sum")
    hook = WeightedHook(ddp, sampler, count, reduction, wire, scaler)
    # DDP compares annotations with types; a lambda has none.
    ddp.register_comm_hook(hook, lambda state, bucket: state.reduce(bucket))
    return hook


class WeightedHook:
    """Made by weighted_hook. `traffic` counts bytes; what is in on_ready is called when this rank's last
    gradient of a round is there but not yet on its way.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        sampler: UnevenBatchSampler | None,
        count: Callable[..., Any] | None,
        reduction: str,
        wire: str,
        scaler: Any,
    ) -> None:
        self.wire, self.reduction, self.scaler = wire, reduction, scaler
        self.group: dist.ProcessGroup = ddp.process_group
        self.device: torch.device = next(ddp.parameters()).device
        self.traffic = Traffic()
        self.on_ready: list[Callable[[], None]] = []
        self.blocked_seconds = 0.0  # of the step under way, in reductions before the last bucket
        self._ddp, self._sampler, self._count = ddp, sampler, count
        self._residuals = Residuals(ddp.module.named_parameters())
        self._earlier: Any = 0.0  # w of micro-batches whose gradients wait to be reduced
        self._latest: Any = 0.0
        self._latest_waits = False
        self._scale = torch.ones(())  # w_i / W, or its estimate, of the round under way
        self._total: torch.Tensor | None = None  # W of the latest round: float64 [], on the gradients' device
        self._total_is: Reduced | None = None
        self._assumed = torch.ones(())  # the W that `_scale` was made with
        self._lane: Any = None  # on CUDA: the stream of the quantized exchange
        ddp.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        for module in ddp.module.modules():
            if isinstance(module, UnevenSyncBatchNorm) and reduction == "mean":
                module.loss_weight = lambda: self._latest

    def weigh(self, weight: Any) -> None:
        """Say w_i of the micro-batch whose backward() comes next, in place of what was counted."""
        self._latest = weight

    def state_dict(self) -> dict[str, Any]:
        """This rank's kept errors of int8 and int4 by parameter name, in the gradient's own units."""
        return {"residuals": self._residuals.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put kept errors back. Raises InputError for parameters that the model does not have."""
        self._residuals.load_state_dict(state["residuals"])

    def reduce(self, bucket: GradBucket) -> Reduced:
        """DDP's communication hook: the bucket's weighted sum over all ranks."""
        buffer = bucket.buffer()
        if bucket.is_last():
            for observe in self.on_ready:
                observe()
        elements, ranks = buffer.numel(), dist.get_world_size(self.group)
        self.traffic.fp32_bytes += 8 * elements * (ranks - 1) // ranks
        if self.wire not in CODECS or ranks == 1:
            if bucket.index() == 0:
                self._begin(buffer.device, wait=False)
            return self._reduce_plain(buffer)
        began = time.monotonic()
        with self._aside(buffer.device):
            if bucket.index() == 0:
                self._begin(buffer.device, wait=True)
            done = self._reduce_quantized(bucket)
        if not bucket.is_last():
            self.blocked_seconds += time.monotonic() - began
        return done

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        if self._latest_waits:
            self._earlier = self._earlier + self._latest
        # A forward() whose backward() never came is forgotten; those under no_sync() are kept.
        self._latest_waits, self.blocked_seconds = not self._ddp.require_backward_grad_sync, 0.0
        self._latest = self._count(*args, **kwargs) if self._count else rows_of((args, kwargs))

    def _begin(self, device: torch.device, wait: bool) -> None:
        """Sum the round's weights; without waiting, scale by the sum of the round before for now."""
        weight = torch.as_tensor(self._earlier + self._latest, dtype=torch.float64, device=device)
        self._earlier, self._latest_waits = 0.0, False
        total, before = weight.clone(), self._total
        work = dist.all_reduce(total, group=self.group, async_op=True)
        if before is None or wait:
            work.wait()
            self._total_is = None
            if before is None:
                self._check(float(total))
            self._assumed = _not_zero(total)
        else:
            self._total_is = work.get_future()
            self._assumed = _not_zero(before)
        self._total = total
        self._scale = (weight if self.reduction == "mean" else 1.0) / self._assumed

    def _check(self, total: float) -> None:
        if self._sampler is None or self._count is not None or self.reduction == "sum":
            return
        if total not in (sizes := set(self._sampler.sizes())) and self._sampler.accumulation == 1:
            raise InputError(
                "weighted_hook",
                "samples of the first round",
                f"{total:.0f}, by the first tensor that forward() got",
                f"one of {sorted(sizes)[-3:]}; if samples are not its first dimension, pass count=",
            )

    def _reduce_plain(self, buffer: torch.Tensor) -> Reduced:
        half = HALVES.get(self.wire)
        message = _weigh(buffer, self._scale) if half is None else _weigh(buffer, self._scale).to(half)
        ranks = dist.get_world_size(self.group)
        self.traffic.sent_bytes += 2 * message.numel() * message.element_size() * (ranks - 1) // ranks
        done = dist.all_reduce(message, group=self.group, async_op=True).get_future()
        assumed, total, total_is = self._assumed, self._total, self._total_is

        def finish(_: object) -> torch.Tensor:
            for reduced in waited_for:
                reduced.wait()  # raises what the reduction raised: a lost peer must not pass for a sum
            if message is not buffer:
                buffer.copy_(message)
            if total_is is not None and total is not None:
                _correct(buffer, assumed / _not_zero(total))
            return buffer

        waited_for = [done] if total_is is None else [total_is, done]
        result: Reduced = torch.futures.collect_all(waited_for).then(finish)
        return result

    @contextmanager
    def _aside(self, device: torch.device) -> Iterator[None]:
        """On CUDA, in a stream of its own beside the rest of the backward pass; on a CPU it is waited for."""
        if device.type != "cuda":
            yield
            return
        if self._lane is None:
            self._lane = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lane.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._lane):
            yield

    def _reduce_quantized(self, bucket: GradBucket) -> Reduced:
        buffer = bucket.buffer()
        done: Reduced = Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)
        self._exchange(bucket, buffer)
        done.set_result(buffer)
        return done

    def _exchange(self, bucket: GradBucket, buffer: torch.Tensor) -> None:
        unit = float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0
        kept = self._residuals.of(bucket.parameters(), buffer)
        values = _weigh(buffer.to(torch.float32, copy=True), self._scale).add_(kept, alpha=unit)
        total, error, sent = quantized_sum(CODECS[self.wire], values, self.group)
        # What is not finite must not stay behind: a scaler drops this step, and the errors are as they were.
        kept.copy_(torch.where(torch.isfinite(total), error / unit, kept))
        self.traffic.sent_bytes += sent
        buffer.copy_(total)


def _not_zero(total: torch.Tensor) -> torch.Tensor:
    """W, or 1 where nobody has a target: every weight is zero then."""
    return torch.where(total > 0, total, 1.0)


def _weigh(buffer: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In place. A mean over no targets is NaN, and so is its gradient: weight 0 leaves it out."""
    if buffer.device.type == "cpu":
        factor = float(scale)  # a third of the time that a float64 tensor of one takes
        return buffer.mul_(factor) if factor else buffer.zero_()
    return buffer.mul_(scale).masked_fill_(scale == 0, 0)


def _correct(buffer: torch.Tensor, ratio: torch.Tensor) -> None:
    """Bring a sum that was scaled by another W to the right one; mostly they are the same."""
    if buffer.device.type != "cpu":
        buffer.mul_(ratio)
    elif (factor := float(ratio)) != 1.0:
        buffer.mul_(factor)


def rows_of(batch: Any) -> int:
    """The length of the first tensor in nested tuples, lists and dicts. Raises InputError without one."""
    for leaf in _tensors(tree_leaves(batch)):
        return int(leaf.shape[0])
    raise InputError(
        "weighted_hook", "count", "no tensor among forward()'s arguments", "count=, or hook.weigh(n)"
    )


def _tensors(leaves: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
