"""The wire: in which type DDP sends gradients. Its communication hook averages over the ranks, as DDP does.

bf16 and f16 are casts. int8 and int4 round each block to its scale; what was rounded off is kept and sent
with the next step's gradient. The hook knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.torch.waiting import Waiting
from pyps.worker.device.quantize import (
    INT4,
    INT8,
    SCALE_BYTES,
    BlockFormat,
    block_maxima,
    pack,
    quantize,
    unpack,
)
from pyps.worker.step.terms import Number

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Wire = Literal["same", "bf16", "f16", "int8", "int4"]
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
QUANTIZED = {"int8": INT8, "int4": INT4}
PIECE = 1 << 19  # values that are encoded at once
Reduced = Future[torch.Tensor]
Names = tuple[str, ...]
Exchange = Callable[[Names, torch.Tensor], None]  # sums a bucket of these parameters over the ranks, in place


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
        expected = "one without: one hook each"
        raise InputError("install_wire", "model", "one with a communication hook", expected)
    if any(getattr(layer, "sparse", False) for layer in ddp.module.modules()):
        expected = "dense ones, or wire='same'"
        raise InputError("install_wire", "model", "sparse gradients", expected)
    return GradientWire(ddp, wire, scaler)


class GradientWire:
    """A model's communication hook. `name`: the type."""

    def __init__(self, ddp: DistributedDataParallel, name: Wire, scaler: Any) -> None:
        self.name, self._scaler = name, scaler
        self.late: Number = 1.0  # what the pass's gradients are multiplied by after their reduction
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
        unit = (float(self._scaler.get_scale()) if scaled else 1.0) / float(self.late)
        kept = self._residuals.of(names, buffer)
        values = buffer.to(torch.float32, copy=True).div_(self._ranks).add_(kept, alpha=unit)
        total, error = quantized_sum(QUANTIZED[self.name], values, self._group)
        if unit != 1.0:
            error.div_(unit)
        if total.device.type == "cpu" and torch.isfinite(total.sum()):
            kept.copy_(error)  # the general case below takes seven passes over memory
        else:
            # Where the mean is not finite the old errors stay: a scaler drops this step.
            kept.copy_(torch.where(torch.isfinite(total), error, kept))
        buffer.copy_(total)


# DDP compares annotations with types: it has none.
def _average(state, bucket):  # type: ignore[no-untyped-def]
    return state.average(bucket)


class Residuals:
    """Rounding errors of gradients that are still to be sent: fp32, one flat vector a bucket, zero at first.

    DDP cuts parameters into other buckets after the first step. A residual belongs to its parameter: a new
    bucket's vector is put together from theirs. sizes: elements of each parameter, by name.
    """

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        parameters = dict(named)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._flat: dict[tuple[str, ...], torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}

    @property
    def buckets(self) -> list[tuple[str, ...]]:
        """The parameters of each bucket in use, by name."""
        return list(self._flat)

    def names_of(self, parameters: Sequence[torch.Tensor]) -> tuple[str, ...]:
        return tuple(self._names[id(parameter)] for parameter in parameters)

    def of(self, names: tuple[str, ...], buffer: torch.Tensor) -> torch.Tensor:
        """The residual of a bucket, float32 [its elements], on its device; written to in place."""
        flat = self._flat.get(names)
        if flat is not None and flat.device == buffer.device:
            return flat
        flat = torch.zeros(buffer.numel(), dtype=torch.float32, device=buffer.device)
        offset = 0
        for name in names:
            view = flat[offset : offset + self.sizes[name]]
            if (old := self._views.get(name)) is not None:
                view.copy_(old)
            self._views[name] = view
            offset += self.sizes[name]
        self._flat = {key: kept for key, kept in self._flat.items() if not set(key) & set(names)}
        self._flat[names] = flat
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy by parameter name, float32 [numel]; only of those that were reduced at least once."""
        return {name: view.clone() for name, view in self._views.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take a copy of a state; parameters that it does not name get zero.

        Raises InputError for a wrong size.
        """
        for name, values in state.items():
            if self.sizes.get(name) != values.numel():
                expected = f"{self.sizes.get(name)} values"
                raise InputError("hook state", f"residuals[{name!r}]", f"{values.numel()} values", expected)
        self._flat, self._views = {}, {name: values.clone() for name, values in state.items()}


class Regrouped:
    """The first step of a run that goes on, reduced in the buckets of the process before.

    DDP cuts other buckets in its first step than later, and int8 and int4 scale blocks of a bucket: the step
    would be rounded otherwise than in a run that did not stop. So its buckets are collected first.

    layout: the parameters of each bucket before, by name. sizes: elements of each parameter. exchange: what
    is done with each bucket.
    """

    def __init__(self, layout: Sequence[Names], sizes: Mapping[str, int], exchange: Exchange) -> None:
        self._layout, self._sizes, self._exchange = list(layout), sizes, exchange
        self._waiting: list[tuple[Names, torch.Tensor, Future[torch.Tensor]]] = []

    def add(self, names: Names, buffer: torch.Tensor, done: Future[torch.Tensor]) -> None:
        """A bucket that is there; `done` gets its sum in flush()."""
        self._waiting.append((names, buffer, done))

    def flush(self) -> None:
        """Reduce the remaining buckets in last step's order; if their parameters changed, as they arrived."""
        parts: dict[str, torch.Tensor] = {}
        for names, buffer, _ in self._waiting:
            parts |= self._parts(names, buffer)
        if sorted(parts) == sorted(name for names in self._layout for name in names):
            for names in self._layout:
                whole = torch.cat([parts[name] for name in names])
                self._exchange(names, whole)
                for name, total in self._parts(names, whole).items():
                    parts[name].copy_(total)
        else:
            for names, buffer, _ in self._waiting:
                self._exchange(names, buffer)
        for _, buffer, done in self._waiting:
            done.set_result(buffer)
        self._waiting.clear()

    def _parts(self, names: Names, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a bucket, by parameter."""
        sizes = [self._sizes[name] for name in names]
        return dict(zip(names, torch.split(whole, sizes), strict=True))


def encode(form: BlockFormat, values: torch.Tensor) -> torch.Tensor:
    """float32 [rows, n], n a multiple of the block -> uint8 [rows, bytes]: scales, then codes."""
    rows = values.shape[0]
    blocks = values.reshape(rows, -1, form.block)
    codes, scales = quantize(blocks, block_maxima(blocks), form)
    return torch.cat([scales.view(torch.uint8), pack(codes, form).reshape(rows, -1)], dim=1)


def decode(form: BlockFormat, packed: torch.Tensor, values: int) -> torch.Tensor:
    """Say what encode() made of [rows, values], float32: each value off by at most half its block's scale."""
    rows, count = packed.shape[0], values // form.block
    scales = packed[:, : count * SCALE_BYTES].contiguous().view(torch.float32)
    codes = packed[:, count * SCALE_BYTES :].reshape(rows, count, -1)
    found = unpack(codes, form).to(torch.float32)
    return found.mul_(scales.unsqueeze(2)).reshape(rows, values)


def quantized_sum(
    form: BlockFormat, values: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over ranks of float32 [n], and this rank's error [n] to add next time.

    Stage 1: each rank cuts its vector into N parts, encodes each and sends part j to rank j (all_to_all).
    Rank j sums the parts it receives, in rank order. Stage 2: rank j encodes its sum and sends it to all
    ranks (all_gather). All ranks decode the same bytes, so all get the same bits.

    Both stages round, and both errors are fed back (Seide et al., Interspeech 2014, for one stage). Rank j
    adds the error of stage 2 in its part to its own residual of stage 1, so the next sum takes that error up
    once, from rank j. One residual a rank therefore holds both. It belongs to a parameter and not to a part:
    it stays right when the parts change, and the sums sent and the residuals add up to the gradients put in.

    A long vector goes in pieces: one is encoded while another is on its way, and a piece fits into the cache.
    A block with a NaN or an infinity decodes to NaN, on every rank: a gradient scaler sees it, and the error
    means nothing.
    """
    pieces = [_Piece(form, piece, group) for piece in torch.split(values, PIECE)]
    for piece in pieces:
        piece.reduce()
    for piece in pieces:
        piece.finish()
    total, error = (torch.cat(parts) for parts in zip(*((p.total, p.error) for p in pieces), strict=True))
    return total, error


class _Piece:
    """A piece of the vector.

    Made: stage 1 is under way. After reduce(): stage 2. After finish(): `total`, `error`.
    """

    def __init__(self, form: BlockFormat, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self._form, self._group, self._length = form, group, len(values)
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._part = -(-len(values) // (self._ranks * form.block)) * form.block
        missing = self._ranks * self._part - len(values)
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        padded = padded.view(self._ranks, self._part)
        self._sent = encode(form, padded)
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)
        self._error = padded - decode(form, self._sent, self._part)

    def reduce(self) -> None:
        self._work.wait()
        mine = decode(self._form, self._received, self._part).sum(dim=0, keepdim=True)
        back = encode(self._form, mine)
        self._gathered = torch.empty(self._ranks * back.shape[1], dtype=torch.uint8, device=back.device)
        self._back = back.view(-1)
        self._work = _all_gather(self._gathered, self._back, self._group)
        self._error[self._rank] += mine[0] - decode(self._form, back, self._part)[0]

    def finish(self) -> None:
        self._work.wait()
        total = decode(self._form, self._gathered.view(self._ranks, -1), self._part)
        self.total, self.error = total.view(-1)[: self._length], self._error.view(-1)[: self._length]


def _all_gather(into: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    # Renamed in torch 2.13; before, the old name is the only one.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(into, values, group=group, async_op=True)
