"""The wire: in which type DDP sends gradients. Its communication hook averages over the ranks, as DDP does.

bf16 and f16 are casts. int8 and int4 round each block to its scale; what was rounded off is kept and sent
with the next step's gradient. The hook knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.torch.exchange import quantized_sum
from pyps.torch.residuals import Regrouped, Residuals
from pyps.torch.waiting import Waiting
from pyps.worker.quantize import INT4, INT8

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Wire = Literal["same", "bf16", "f16", "int8", "int4"]
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
QUANTIZED = {"int8": INT8, "int4": INT4}
Reduced = Future[torch.Tensor]


@dataclass
class GradientBytes:
    """Bytes that this rank has sent for gradients, and bytes that an fp32 ring all-reduce would have sent."""

    sent: int = 0
    fp32: int = 0


def install_wire(ddp: torch.nn.Module, wire: Wire, scaler: Any = None) -> GradientWire:
    """Let a model send its gradients in another type than their own, from its next backward pass on.

    wire: bf16, f16, int8 or int4. scaler: the torch.amp.GradScaler in use, so that kept errors follow its
    scale. Raises InputError for an unknown type and for a model that has a communication hook.
    """
    if wire not in get_args(Wire) or wire == "same":
        raise InputError("install_wire", "wire", repr(wire), "bf16, f16, int8 or int4")
    if not isinstance(ddp, DistributedDataParallel):
        raise InputError("install_wire", "model", type(ddp).__name__, "a DistributedDataParallel")
    if getattr(ddp, "_comm_hooks", None):
        raise InputError(
            "install_wire", "model", "one with a communication hook", "one without: one hook each"
        )
    if any(getattr(layer, "sparse", False) for layer in ddp.module.modules()):
        expected = "dense ones, or wire='same'"
        raise InputError("install_wire", "model", "sparse gradients", expected)
    return GradientWire(ddp, wire, scaler)


class GradientWire:
    """A model's communication hook. `bytes`: what was sent so far; `name`: the type."""

    def __init__(self, ddp: DistributedDataParallel, name: Wire, scaler: Any) -> None:
        self.name, self.bytes, self._scaler = name, GradientBytes(), scaler
        self._ddp, self._group, self._ranks = ddp, ddp.process_group, ddp.process_group.size()
        self._residuals = Residuals(ddp.module.named_parameters())
        self._regrouped: Regrouped | None = None  # in the first step of a run that goes on
        self._unnumbered = 0  # parameters of a static graph's first pass that are still to come
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            self._unnumbered = sum(p.requires_grad for p in ddp.module.parameters())
        self._stream: Any = None  # on CUDA: the stream of the exchange
        ddp.register_comm_hook(self, _average)

    def state_dict(self) -> dict[str, Any]:
        """This rank's kept errors by parameter name, in the gradient's own units, and its buckets."""
        buckets = [list(names) for names in self._residuals.buckets]
        return {"residuals": self._residuals.state_dict(), "buckets": buckets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put kept errors back. Raises InputError for parameters that the model does not have."""
        self._residuals.load_state_dict(state["residuals"])
        if buckets := [tuple(names) for names in state.get("buckets", ())]:
            self._regrouped = Regrouped(buckets, self._residuals.sizes, self._exchange)

    def average(self, bucket: GradBucket) -> Reduced:
        """DDP's communication hook: the bucket's mean over all ranks."""
        buffer, last = bucket.buffer(), self._is_last(bucket)
        self.bytes.fp32 += 8 * buffer.numel() * (self._ranks - 1) // self._ranks
        if self.name in HALVES:
            return self._average_half(buffer)
        done: Reduced = Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)
        if self._ranks == 1:
            done.set_result(buffer)
            return done
        # On CUDA the exchange runs parallel to the backward pass; on a CPU this rank waits for the others.
        waiting = Waiting.on(buffer.device)
        with self._on_own_stream(buffer.device) if buffer.device.type == "cuda" else waiting.counted():
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

    def _average_half(self, buffer: torch.Tensor) -> Reduced:
        message = buffer.div_(self._ranks).to(HALVES[self.name])  # divided first: a sum may overflow in f16
        self.bytes.sent += 2 * message.numel() * message.element_size() * (self._ranks - 1) // self._ranks
        work = dist.all_reduce(message, group=self._group, async_op=True)
        future: Reduced = work.get_future()

        def finish(sent: Reduced) -> torch.Tensor:
            sent.value()  # raises the reduction's error: a lost peer must not pass for a mean
            return buffer.copy_(message)

        return future.then(finish)

    def _is_last(self, bucket: GradBucket) -> bool:
        """Tell whether it is its pass's last; a static graph's first buckets all say so."""
        if not self._unnumbered:
            return bucket.is_last()
        self._unnumbered -= len(bucket.parameters())
        return not self._unnumbered

    @contextmanager
    def _on_own_stream(self, device: torch.device) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def _exchange(self, names: tuple[str, ...], buffer: torch.Tensor) -> None:
        """Put the mean into a bucket, and keep what was rounded off."""
        scaled = self._scaler is not None and self._scaler.is_enabled()
        unit = float(self._scaler.get_scale()) if scaled else 1.0
        kept = self._residuals.of(names, buffer)
        values = buffer.to(torch.float32, copy=True).div_(self._ranks).add_(kept, alpha=unit)
        total, error, sent = quantized_sum(QUANTIZED[self.name], values, self._group)
        if unit != 1.0:
            error.div_(unit)
        if total.device.type == "cpu" and torch.isfinite(total.sum()):
            kept.copy_(error)  # the general case below takes seven passes over memory
        else:
            # Where the mean is not finite the old errors stay: a scaler drops this step.
            kept.copy_(torch.where(torch.isfinite(total), error, kept))
        self.bytes.sent += sent
        buffer.copy_(total)


# DDP compares annotations with types: it has none.
def _average(state, bucket):  # type: ignore[no-untyped-def]
    return state.average(bucket)
