"""DDPHook: the gradient of uneven batches, exactly, in DDP's own reduction.

DDP averages: 1/N for each rank, whatever its batch. The gradient of the mean loss over all samples is

    g = sum_i (w_i / W) g_i,    W = sum_i w_i,    w_i the samples (or targets) behind rank i's gradient g_i

The hook multiplies each bucket by w_i / W and sums. It counts w_i from the batches that the gradient comes
from (passes.py) and sums W over the ranks together with the first bucket, so both are right in the epoch's
last round, after a new plan and after ranks have come or gone. With NCCL a stream of its own waits for W: no
longer than the sum of the bucket would. Elsewhere a thread would wait, so a bucket is multiplied with the W
of the round before, and corrected when the new W has arrived and differs. On a CPU W travels behind the
last bucket, in the same message: another one would take as long as a small model's bucket, and only then are
all forward passes met that the gradient comes from. There DDP gets its answers at once, and the end of the
backward pass waits for all buckets: what follows a future would run in gloo's threads, and take the
interpreter from the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.torch.accumulate import MicroBatches
from pyps.torch.exchange import quantized_sum
from pyps.torch.gathered import is_gathered
from pyps.torch.lockstep import REFUSED
from pyps.torch.norm import UnevenSyncBatchNorm
from pyps.torch.passes import Passes
from pyps.torch.peers import own_copies
from pyps.torch.residuals import Regrouped, Residuals
from pyps.torch.rounds import Rounds
from pyps.torch.weighted import Apart, OwnGradients, WeightedHook, suspended
from pyps.torch.weighting import as_float64, not_zero, rows_of
from pyps.worker.quantize import INT4, INT8

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Wire = Literal["same", "bf16", "f16", "int8", "int4"]
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
QUANTIZED = {"int8": INT8, "int4": INT4}
Reduced = Future[torch.Tensor]
_engine: Any = torch.autograd.Variable._execution_engine


@dataclass
class GradientBytes:
    """Bytes that this rank has sent for gradients, and bytes that an fp32 ring all-reduce would have sent."""

    sent: int = 0
    fp32: int = 0


class DDPHook(WeightedHook):
    """The weights of a DistributedDataParallel model, in its communication hook.

    gradient_bytes: bytes sent so far. wire and scaler: as in weighted_hook.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        sampler: Rounds | None,
        count: Callable[..., Any] | None,
        reduction: str,
        wire: str,
        scaler: Any,
    ) -> None:
        if getattr(ddp, "_comm_hooks", None):
            expected = "one without: one hook each"
            raise InputError("weighted_hook", "model", "one with a communication hook", expected)
        device = next(ddp.parameters()).device
        super().__init__(ddp, ddp.process_group, device, sampler, count, reduction, scaler)
        self.wire, self._ranks = wire, self.group.size()
        self.gradient_bytes = GradientBytes()
        self._squares: torch.Tensor | None = None  # of this rank's gradient, in its unit; None: not asked for
        self._round_weights: tuple[Any, Any] = 0.0, 0.0  # w_i, and the factor of its gradient before 1 / W
        self._residuals = Residuals(ddp.module.named_parameters())
        self.passes = Passes(reduction == "sum", self._gradients, lambda: None, self._pass_over)
        self.passes.is_gathered = lambda: is_gathered(self.group)
        self.passes.ranks = lambda: frozenset(dist.get_process_group_ranks(self.group))
        # A rank that has left DDP's join() takes part in reductions alone.
        self.passes.largest = lambda own: own if ddp._join_config.enable else self._largest(own)
        self._micro_batches = MicroBatches(ddp, self.passes)
        self._ddp, self._is_reduced = ddp, False  # whether the running backward pass was
        self._unnumbered = self._delayed_parameters()
        self._watch_parameters()
        self._scale: Any = 1.0  # w_i / W of this round, with `_assumed` for W
        self._factors: dict[torch.dtype, torch.Tensor] = {}  # the same, by type of gradient
        self._may_be_zero = True  # whether w_i may be 0, as far as the CPU knows
        self._message = torch.empty(0)  # the last bucket, and W behind it
        self._on_the_way: list[tuple[Any, torch.Tensor, torch.Tensor]] = []  # a CPU's: work, message, bucket
        self._total_work: Any = None  # after which `_total` is the sum over ranks
        self._assumed: Any = 1.0  # W, until it is known; a number or on the gradients' device
        self._regrouped: Regrouped | None = None  # in the first step of a run that goes on
        self._stream: Any = None  # on CUDA: the stream of what waits for W
        self._on_nccl = device.type == "cuda" and dist.get_backend(self.group) == "nccl"
        for module in ddp.module.modules():
            if isinstance(module, UnevenSyncBatchNorm) and reduction == "mean":
                module.loss_weight = lambda: self.passes.loss_weight()
        ddp.register_comm_hook(Apart(self.reduce), _reduce)

    def _accumulate(self, batch: Any, parts: int | Sequence[int]) -> Iterator[Any]:
        """Only the last backward() reduces. With one number, a rank has as many passes as samples at most, or
        one.
        """
        own = parts if isinstance(parts, int) else parts[dist.get_rank(self.group)]
        if isinstance(parts, int) and self._waits_in_parts():  # some ranks may have fewer samples than parts
            rows = rows_of(batch)
            least, most = -self._largest(-rows), self._largest(rows)
            self._check_alike("accumulate", [max(1, min(rows, parts)) for rows in (least, most)])
        return self._micro_batches.cut(batch, own)

    def _rounds(self, loader: Any, parts: Sequence[int]) -> Iterator[Iterator[Any]]:
        return self._micro_batches.rounds(loader, parts[dist.get_rank(self.group)])

    def share(self, weight: Any, total: Any) -> Any:
        """weight / total, for the loss of a micro-batch in a loop with no_sync() of its own.

        weight: the micro-batch's samples (or targets). total: those of this rank in the round. Raises
        InputError for a weight below 0 or above the total; so does backward() if the shares of a round do
        not add up to 1.
        """
        return self.passes.share(weight, total)

    def state_dict(self) -> dict[str, Any]:
        """This rank's kept errors of int8 and int4 by parameter name, in the gradient's own units; and W."""
        total = None if self._total is None else float(self._total)
        buckets = [list(names) for names in self._residuals.buckets]
        return {"residuals": self._residuals.state_dict(), "total": total, "buckets": buckets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put kept errors back. Raises InputError for parameters that the model does not have."""
        self._residuals.load_state_dict(state["residuals"])
        if buckets := [tuple(names) for names in state.get("buckets", ())]:
            self._regrouped = Regrouped(buckets, self._residuals.sizes, self._exchange)
        if (total := state.get("total")) is not None:
            self._total = torch.tensor(total, dtype=torch.float64, device=self.device)

    def reduce(self, bucket: GradBucket) -> Reduced:
        """DDP's communication hook: the bucket's weighted sum over all ranks."""
        buffer, (first, last) = bucket.buffer(), self._place_of(bucket)
        if last:
            self._ready()
        if self._squares is not None:
            if first:
                self._squares.zero_()
            self._squares += self._square_of(bucket)
        elements, ranks = buffer.numel(), self._ranks
        self.gradient_bytes.fp32 += 8 * elements * (ranks - 1) // ranks
        if buffer.device.type == "cpu" and (self.wire not in QUANTIZED or ranks == 1):
            return self._reduce_on_cpu(buffer, first, last)
        if self.wire not in QUANTIZED or ranks == 1:
            with self._on_own_stream(buffer.device) if self._on_nccl else nullcontext():
                if first:
                    self._sum_weights(buffer.device, wait=self._on_nccl)
                return self._reduce_plain(buffer)
        # On CUDA the exchange runs parallel to the backward pass and blocks nothing.
        waits = self.waiting.counted() if buffer.device.type == "cpu" else nullcontext()
        with waits, self._on_own_stream(buffer.device):
            if first:
                self._sum_weights(buffer.device, wait=True)
            return self._reduce_quantized(bucket, last)

    def _delayed_parameters(self) -> int:
        """Those of a static graph's first pass, whose buckets all have number 0: torch reduces after it."""
        delays = self._ddp.static_graph and not self._ddp._static_graph_delay_allreduce_enqueued
        return sum(p.requires_grad for p in self._parameters) if delays else 0

    def _place_of(self, bucket: GradBucket) -> tuple[bool, bool]:
        """Whether it is the first bucket of its pass, and whether the last."""
        if not self._unnumbered:
            return bucket.index() == 0, bucket.is_last()
        self._unnumbered -= len(bucket.parameters())
        return not self._is_reduced, not self._unnumbered

    def watch_gradients(self) -> None:
        """From now on keep the square norm of this rank's gradient."""
        self._squares = torch.zeros((), dtype=torch.float64, device=self.device)

    def own_gradients(self) -> OwnGradients:
        """This rank's gradient of the round."""
        assert self._squares is not None
        if self.peers is not None:
            dist.all_reduce(self._squares, group=self.peers)
        own, unit = (float(x) for x in self._round_weights)
        square = float(self._squares)
        return OwnGradients(own, square * unit**2 / own, 1) if own else OwnGradients(0.0, 0.0, 0)

    def _square_of(self, bucket: GradBucket) -> torch.Tensor:
        """The square norm of a bucket; of what several peers have, this rank's share."""
        if self.peers is None:
            return bucket.buffer().double().square().sum()
        both = zip(bucket.parameters(), bucket.gradients(), strict=True)
        return torch.stack([g.double().square().sum() / own_copies(p, self.peers) for p, g in both]).sum()

    def _begin(self, weight: Any) -> None:
        self.passes.begin(weight, not self._ddp.require_backward_grad_sync)

    def _watch_parameters(self) -> None:
        """Learn of each backward pass, also where DDP reduces nothing: from one parameter of each module."""
        for module in self._ddp.module.modules():
            trained = (p for p in module.parameters(recurse=False) if p.requires_grad)
            for parameter in islice(trained, 1):
                self._on_parts.append(parameter.register_post_accumulate_grad_hook(self._arrived))

    def _arrived(self, _: torch.Tensor) -> None:
        if not suspended():
            self.passes.arrived()

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _pass_over(self) -> torch.Tensor | None:
        """A backward pass is over: W. Raises InputError if its gradients are this rank's own, unreduced."""
        if self._is_reduced:
            self._is_reduced = False
            if self.lockstep.is_due():
                self._compare_ranks(now=True)
                if self.device.type == "cuda" or self.wire in QUANTIZED:  # else W was behind all gradients
                    self._check_late()
            self.waiting.over()  # ranks that meet after it meet between passes
            if (refusal := self._refused() or self.passes.refused()) is not None:
                raise refusal
            return self._total
        if self.passes.is_kept or not self._ddp.require_backward_grad_sync:
            self.passes.keep()
            return None
        if (refusal := self.passes.refused()) is not None:
            raise refusal
        found = "gradients that DistributedDataParallel did not reduce"
        expected = "one backward() for each forward() of the model, to all of its parameters"
        raise InputError("weighted_hook", "backward()", found, expected)

    def _own_weight(self) -> tuple[Any, Any]:
        """The weight in W, and that of the gradients; no samples on a rank that has left DDP's join()."""
        if self._ddp._join_config.enable and torch._C._current_graph_task_id() == -1:
            return 0.0, 0.0
        self._is_reduced = True
        return self.passes.reduced()

    def _sum_weights(self, device: torch.device, wait: bool) -> None:
        """Sum the round's weights over the ranks; unless `wait`, scale by the sum of the round before."""
        own, unit, row = self._begin_sum(device)
        message, before = torch.cat([as_float64(own, device).view(1), row]), self._total
        self.lockstep.sent(message[1:])
        work = dist.all_reduce(message, group=self.group, async_op=True)
        total = message[0]
        if before is None or wait:
            work.wait()
            self._total_work = None
            if before is None:
                self._check_first(own, float(total))
            self._assumed = not_zero(total)
        else:
            self._total_work = work
            self._assumed = not_zero(before)
        self._total = total
        means = self.reduction == "mean"
        self._scale = (as_float64(unit, device) if means else 1.0) / self._assumed
        self._factors.clear()
        self._may_be_zero = means and (isinstance(own, torch.Tensor) or not own)

    def _begin_sum(self, device: torch.device) -> tuple[Any, Any, torch.Tensor]:
        """This rank's weight in W, that of its gradients, and its row, float64 [columns], on a device."""
        own, unit = self._weigh()
        return own, unit, self._row(device)

    def _weigh(self) -> tuple[Any, Any]:
        """This rank's weight in W, and that of its gradients."""
        try:
            own, unit = self._own_weight()
        except InputError as refusal:  # raised when the round's messages are through: others wait for them
            self._refusal, own, unit = refusal, 0.0, 0.0
        self._round_weights = own, unit if self.reduction == "mean" else 1.0
        return own, unit

    def _row(self, device: torch.device) -> torch.Tensor:
        """What the ranks compare, of this one."""
        if not self._is_reduced:
            return self.lockstep.row(device, None)
        added = self.passes.added if self._refusal is None else REFUSED
        return self.lockstep.row(device, added, self._fingerprint(self.passes.shapes))

    def _reduce_on_cpu(self, buffer: torch.Tensor, first: bool, last: bool) -> Reduced:
        """Send a bucket; it holds the sum by the time that DDP takes that."""
        is_sent = first and self._total is None
        if first:
            self._on_the_way.clear()  # else of a backward pass that failed
            self._assume_weights(buffer.device)
        half = HALVES.get(self.wire)
        message = self._scaled(buffer) if half is None else self._scaled(buffer).to(half)
        if last and not is_sent:
            message = self._with_weights(message)
        self._count_sent(message)
        work = self.group.allreduce([message])  # without what torch logs, and looks up, around it
        self._on_the_way.append((work, message, buffer))
        if last and torch._C._current_graph_task_id() != -1 and not self._ddp.static_graph:
            _engine.queue_callback(self._receive)  # before DDP's own, which it queues after this
        elif last:  # no backward pass in DDP's join(); a static graph's first buckets are taken at once
            self._receive()
        done: Reduced = Future()
        done.set_result(buffer)
        return done

    def _assume_weights(self, device: torch.device) -> None:
        """Scale by the W of the round before. The first round's is summed, and checked, before it is used."""
        if self._total is None:
            self._sum_weights(device, wait=False)
            try:
                self._compare_ranks(now=True)  # the last bucket brings another table
            except InputError as unlike:
                self._refusal = unlike
            return
        _, unit = self._weigh()
        self._assumed = float(self._total) or 1.0
        self._scale = (float(unit) if self.reduction == "mean" else 1.0) / self._assumed

    def _with_weights(self, message: torch.Tensor) -> torch.Tensor:
        """The last bucket with W and what the ranks compare behind its end, if there is room for these; else
        they travel apart.
        """
        try:
            self.passes.check_met()
        except InputError as refusal:
            self._refusal = self._refusal or refusal
        row, apart = self._row(message.device), not self._has_room(message)
        whole = row.new_empty(1 + row.numel()) if apart else self._extended(message, 1 + row.numel())
        total, table = torch.split(whole[-1 - row.numel() :], [1, row.numel()])
        total.fill_(float(self._round_weights[0]))
        table.copy_(row)
        self.lockstep.sent(table)
        self._total = total[0]
        self._total_work = dist.all_reduce(whole, group=self.group, async_op=True) if apart else None
        return message if apart else whole

    def _has_room(self, message: torch.Tensor) -> bool:
        """Whether whole numbers fit behind its end: into its type, and into a storage of its own."""
        is_wide = message.dtype in (torch.float32, torch.float64) and message.layout == torch.strided
        return is_wide and not message.storage_offset()  # Embedding(sparse=True) has none

    def _receive(self) -> None:
        """All buckets are on their way: wait for them, and correct them if W is not what was assumed."""
        if self._total_work is not None:
            self._total_work.wait()
        for work, _, _ in self._on_the_way:
            work.wait()  # raises the reduction's error: a lost peer must not pass for a sum
        assert self._total is not None
        self._total = self._total.to(torch.float64, copy=True)  # the message is used again
        factor = float(self._assumed) / (float(self._total) or 1.0)
        for _, message, buffer in self._on_the_way:
            if message.dtype != buffer.dtype:
                buffer.copy_(message)
            if factor != 1:
                buffer.mul_(factor)
        self._on_the_way.clear()

    def _extended(self, buffer: torch.Tensor, more: int) -> torch.Tensor:
        """A bucket and `more` values behind it, in its own storage; DDP's views stay what they are."""
        size = buffer.numel() + more
        if self._message.data_ptr() != buffer.data_ptr() or self._message.numel() != size:
            storage = buffer.untyped_storage()
            if storage.nbytes() < size * buffer.element_size():
                storage.resize_(size * buffer.element_size())
            self._message = buffer.new_empty(0).set_(storage, 0, (size,), (1,))
        return self._message

    def _count_sent(self, message: torch.Tensor) -> None:
        ranks = self._ranks
        self.gradient_bytes.sent += 2 * message.numel() * message.element_size() * (ranks - 1) // ranks

    def _reduce_plain(self, buffer: torch.Tensor) -> Reduced:
        """On a GPU."""
        half = HALVES.get(self.wire)
        message = self._scaled(buffer) if half is None else self._scaled(buffer).to(half)
        self._count_sent(message)
        done = dist.all_reduce(message, group=self.group, async_op=True).get_future()
        assumed = self._assumed
        total_future = None if self._total_work is None else self._total_work.get_future()

        def finish(_: object) -> torch.Tensor:
            done.value()  # raises the reduction's error: a lost peer must not pass for a sum
            if message is not buffer:
                buffer.copy_(message)
            if total_future is not None and self._total is not None:
                total_future.wait()
                multiply(buffer, {}, assumed / not_zero(self._total))
            return buffer

        # What follows a future that knows its device has a stream of its own, and the backward pass goes on.
        result: Reduced = done.then(finish)
        return result

    def _scaled(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer, scaled in place. A mean over no targets has a NaN gradient: weight 0 makes it zero."""
        if buffer.device.type == "cpu":
            factor = float(self._scale)  # three times as fast as a float64 tensor of one
            return buffer.mul_(factor) if factor else buffer.zero_()
        multiply(buffer, self._factors, self._scale)
        return buffer.masked_fill_(self._scale == 0, 0) if self._may_be_zero else buffer

    @contextmanager
    def _on_own_stream(self, device: torch.device) -> Iterator[None]:
        """On CUDA, run on another stream, parallel to the rest of the backward pass; on a CPU, at once."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def _reduce_quantized(self, bucket: GradBucket, last: bool) -> Reduced:
        buffer = bucket.buffer()
        done: Reduced = Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)
        names = self._residuals.names_of(bucket.parameters())
        if self._regrouped is None:
            self._exchange(names, buffer)
            done.set_result(buffer)
            return done
        self._regrouped.add(names, buffer, done)
        if last:
            self._regrouped.flush()
            self._regrouped = None
        return done

    def _exchange(self, names: tuple[str, ...], buffer: torch.Tensor) -> None:
        unit = float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0
        kept = self._residuals.of(names, buffer)
        values = self._scaled(buffer.to(torch.float32, copy=True)).add_(kept, alpha=unit)
        total, error, sent = quantized_sum(QUANTIZED[self.wire], values, self.group)
        if unit != 1.0:
            error.div_(unit)
        if total.device.type == "cpu" and torch.isfinite(total.sum()):
            kept.copy_(error)  # the general case below takes seven passes over memory
        else:
            # Where the sum is not finite the old errors stay: a scaler drops this step.
            kept.copy_(torch.where(torch.isfinite(total), error, kept))
        self.gradient_bytes.sent += sent
        buffer.copy_(total)


# DDP compares annotations with types: it has none.
def _reduce(state, bucket):  # type: ignore[no-untyped-def]
    return state(bucket)


def multiply(buffer: torch.Tensor, factors: dict[torch.dtype, torch.Tensor], exact: torch.Tensor) -> None:
    """Multiply in place by a factor on the same device, which half precision would round. factors: filled."""
    wide = buffer.to(torch.float32) if buffer.dtype in HALVES.values() else buffer
    if wide.dtype not in factors:
        factors[wide.dtype] = exact.to(wide.dtype)
    torch._foreach_mul_([wide], factors[wide.dtype])  # a vector at a time; mul_() goes value by value
    if wide is not buffer:
        buffer.copy_(wide)
