"""Copy gradients from their parameters to a staging buffer, bucket by bucket while backward goes on.

A bucket is a range of the flat vector. As soon as backward has accumulated all of its gradients, it goes on
the `bus`; with a codec it is encoded on the device first. A gradient that changes afterwards (clipped,
unscaled) is copied again. What is copied is checked on the way, so that a push need not: a flag says so.

A CPU fp32 gradient needs no bucket. As soon as backward has made it, a hook copies it to the staging buffer
and checks whether it is finite, while it is in cache; `.grad` is a view of the buffer from then on. So a push
need not read it once more to refuse it. One that changes afterwards is checked by the push. Small gradients
have no hook: backward adds them to zeros in the buffer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pyps import native
from pyps.errors import InputError
from pyps.native.values import Codec, Tensor
from pyps.store.codec import Residual, encoded_bytes
from pyps.store.staging import StagingBuffer
from pyps.worker.device.bus import Bus
from pyps.worker.device.quantize import INT4, INT8, SCALE_BYTES, TINY, block_maxima, pack, quantize

LEAST_ELEMENTS = 1 << 14  # with a hook, whose Python takes as long as to check so many
BUCKET_ELEMENTS = 1 << 21  # 8 MiB: long enough for a link's full speed, short enough to begin early
ENCODED_ELEMENTS = 1 << 23  # a bucket is encoded in some 25 kernels, which smaller ones do not keep busy


@dataclass
class Part:
    """The part of a parameter in a bucket: `lo` to `hi` of the flat vector; all of it begins at `offset`."""

    parameter: nn.Parameter
    offset: int
    lo: int
    hi: int
    flag: int = 0  # its place among the flags of all parts
    finite: bool = False  # what was copied, as checked


@dataclass
class Bucket:
    """A range of the flat vector; `shipped` says which gradients, in which state, have been copied."""

    first: int
    end: int
    parts: list[Part]
    waiting: set[int] = field(default_factory=set)
    shipped: list[tuple[int, int]] | None = None

    def state(self) -> list[tuple[int, int]]:
        return states_of(part.parameter.grad for part in self.parts)


def states_of(gradients: Iterable[torch.Tensor | None]) -> list[tuple[int, int]]:
    """Return what is equal as long as every gradient is the same object, and unchanged."""
    return [(0, 0) if g is None else (id(g), g._version) for g in gradients]


def buckets_of(
    parameters: Sequence[tuple[nn.Parameter, Tensor]], elements: int, size: int = BUCKET_ELEMENTS
) -> list[Bucket]:
    """The ranges of `size` elements with parts of these parameters. A parameter may be in several."""
    buckets, flags = [], itertools.count()
    for first in range(0, elements, size):
        end = min(first + size, elements)
        parts = [
            Part(p, t.offset, max(first, t.offset), min(end, t.offset + t.elements), next(flags))
            for p, t in parameters
            if t.elements and t.offset < end and first < t.offset + t.elements
        ]
        if parts:
            buckets.append(Bucket(first, end, parts))
    return buckets


class GradientBuckets:
    """Gradients of these parameters, of one device.

    parameters: with their places in the flat vector of `elements`. bus: to the device. codec: int8 or int4,
    which needs parameters in all of the vector; None: as `begin` says. size: elements of a bucket; 0: the
    default. checks_finite: whether gradients are checked, where codes do not show it. The residual of the
    codes stays on the device and is added to the next gradient; a process that dies loses it.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Tensor]],
        elements: int,
        bus: Bus,
        codec: Codec | None = None,
        size: int = 0,
        *,
        checks_finite: bool = False,
    ) -> None:
        self.codec = codec
        self._checks_finite = checks_finite and codec is None
        size = size or (BUCKET_ELEMENTS if codec is None else ENCODED_ELEMENTS)
        self._buckets = buckets_of(parameters, elements, size)
        self._bus = bus
        self._parts = [part for bucket in self._buckets for part in bucket.parts]
        device = parameters[0][0].device
        self._flags = torch.zeros(len(self._parts), device=device)  # of each part: finite, if that is
        self._seen = torch.zeros(len(self._parts), pin_memory=self.on_gpu)  # these, on the host
        self._to: torch.Tensor | None = None
        self._eager, self._scale = False, 1.0
        if codec is not None:
            self._flat = torch.zeros(elements, device=device)  # on the device
            whole = torch.zeros(encoded_bytes(codec, elements), dtype=torch.uint8, pin_memory=self.on_gpu)
            self._codes: torch.Tensor = whole
        self._residual: Residual[torch.Tensor] = Residual(partial(torch.empty, elements, device=device))
        self._residuals: tuple[torch.Tensor | None, torch.Tensor] | None = None
        self._hooks: list[Any] = []
        for bucket in self._buckets:
            for part in bucket.parts:
                parameter: Any = part.parameter
                self._hooks.append(
                    parameter.register_post_accumulate_grad_hook(partial(self._accumulated, bucket))
                )

    @property
    def on_gpu(self) -> bool:
        return self._flags.device.type == "cuda"

    @property
    def codes(self) -> NDArray[np.uint8]:
        """After finish(): codes, then scales. Raises AttributeError without a codec."""
        array: NDArray[np.uint8] = self._codes.numpy()
        return array

    def begin(self, to: torch.Tensor) -> None:
        """Begin a new gradient. to: [elements] in host memory, where it goes without a codec."""
        self.forget()
        self._to, self._eager = to, False
        if self._residuals is not None:  # that of a step which was given up: no push of it ended
            self._residual.cancel()
        self._residuals = self._residual.begin() if self.codec is not None else None

    def last_backward(self, scale: float = 1.0) -> None:
        """The next backward is the last one of this gradient. `scale` multiplies what is encoded."""
        self._eager, self._scale = True, scale
        for bucket in self._buckets:
            bucket.waiting = {id(part.parameter) for part in bucket.parts}

    def forget(self) -> None:
        """Copy all gradients again: they may have changed without a trace."""
        if self._to is not None and any(bucket.shipped is not None for bucket in self._buckets):
            self._bus.wait_for_host()  # first copies, which are not to end after these
        for bucket in self._buckets:
            bucket.shipped = None

    def finish(self, scale: float = 1.0) -> None:
        """Copy the gradients that have changed since their copy, and wait for all copies."""
        if self._to is None:
            return
        stale, self._scale = scale != self._scale, scale
        for bucket in self._buckets:
            if bucket.shipped != bucket.state() or (stale and self.codec is not None):
                if bucket.shipped is not None:
                    self._bus.wait_for_host()  # its first copy, which is not to end after this one
                self._ship(bucket)
        if self._checks_finite:
            with self._bus.leaving():
                self._bus.start_to_host(self._seen, self._flags)
        self._bus.wait_for_host()
        if self._checks_finite:
            for part, flag in zip(self._parts, self._seen.tolist(), strict=True):
                part.finite = math.isfinite(flag)
        self._to, self._eager = None, False

    @property
    def finite(self) -> bool:
        """After finish(): whether all of the gradient is known to be finite."""
        return all(part.finite for part in self._parts)

    def finite_ranges(self) -> list[tuple[int, int]]:
        """After finish(): the first element and the count of each part that is known to be finite."""
        return [(part.lo, part.hi - part.lo) for part in self._parts if part.finite]

    def squared_norm(self) -> float:
        """After finish(), with a codec: the sum of the squares of the gradient that was encoded, unscaled."""
        return float(torch.dot(self._flat, self._flat))

    def commit_residual(self, admitted: bool) -> None:
        """Commit the new residual if the push was admitted; otherwise keep the old one."""
        self._residual.commit(admitted)
        self._residuals = None

    def close(self) -> None:
        """Forget the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._to = [], None

    def _accumulated(self, bucket: Bucket, parameter: torch.Tensor) -> None:
        if not self._eager or self._to is None:
            return
        bucket.waiting.discard(id(parameter))
        if not bucket.waiting:
            self._ship(bucket)

    @torch.no_grad()
    def _ship(self, bucket: Bucket) -> None:
        assert self._to is not None  # for mypy: between begin() and finish()
        with self._bus.leaving():
            for part in bucket.parts:
                values = _values(part)
                if self.codec is not None:
                    _put(self._flat[part.lo : part.hi], values)
                elif values is None:
                    self._to[part.lo : part.hi].zero_()
                else:
                    self._bus.start_to_host(self._to[part.lo : part.hi], values)
                if self._checks_finite:
                    self._look(self._flags[part.flag], values)
            if self.codec is not None:
                self._encode(self.codec, bucket)
        bucket.shipped = bucket.state()

    def _look(self, flag: torch.Tensor, values: torch.Tensor | None) -> None:
        if values is None:
            flag.zero_()
        else:
            self._bus.start_look(flag, values)

    def _encode(self, codec: Codec, bucket: Bucket) -> None:
        assert self._residuals is not None  # for mypy: since begin()
        run, (old, new) = slice(bucket.first, bucket.end), self._residuals
        residual = None if old is None else old[run]
        codes, scales = encode(
            codec, self._flat[run], scale=self._scale, residual=residual, residual_out=new[run]
        )
        form = FORMATS[codec]
        begin = bucket.first * form.bits // 8
        self._bus.start_to_host(self._codes[begin : begin + codes.numel()], codes)
        first_scale = self._flat.numel() * form.bits // 8 + SCALE_BYTES * (bucket.first // form.block)
        packed = scales.view(torch.uint8)
        self._bus.start_to_host(self._codes[first_scale : first_scale + packed.numel()], packed)


def _put(to: torch.Tensor, values: torch.Tensor | None) -> None:
    if values is None:
        to.zero_()
    else:
        to.copy_(values)


def _values(part: Part) -> torch.Tensor | None:
    """Return those of its gradient, if there is one."""
    grad = part.parameter.grad
    if grad is None:
        return None
    dense = grad.to_dense() if grad.is_sparse else grad
    return dense.reshape(-1)[part.lo - part.offset : part.hi - part.offset]


class PinnedMemory:
    """Host memory registered with the GPU's driver, which the GPU copies to and from by itself.

    runtime: has cudaHostRegister and cudaHostUnregister, as torch.cuda.cudart() does. Memory that the driver
    refuses is used as it is.
    """

    def __init__(self, runtime: Any = None) -> None:
        cuda: Any = torch.cuda
        self._runtime = runtime if runtime is not None else cuda.cudart()
        self._held: dict[int, NDArray[Any]] = {}

    def pin(self, array: NDArray[Any]) -> bool:
        """Register the array's memory, and hold it mapped; False if the driver refuses."""
        address = array.ctypes.data
        if address not in self._held:
            if int(self._runtime.cudaHostRegister(address, array.nbytes, 0)) != 0:
                return False
            self._held[address] = array
        return True

    def close(self) -> None:
        """Unregister all memory, before it is unmapped. Idempotent."""
        while self._held:
            address, _ = self._held.popitem()
            self._runtime.cudaHostUnregister(address)


FORMATS = {Codec.INT8: INT8, Codec.INT4: INT4}


def encode(
    codec: Codec,
    values: torch.Tensor,
    *,
    scale: float = 1.0,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """scale * values + residual, encoded: (codes, uint8; scales, float32 [blocks]).

    values, residual, residual_out: float32 [n] on one device; `residual_out`, which must not be `residual`,
    receives what the code does not carry. A last block that is not full is coded as if zeros followed. A
    block with something that is not finite has a NaN for its scale, which a store refuses, and the device is
    not waited for. Raises InputError for another codec.
    """
    if codec not in FORMATS:
        raise InputError("device codec", "codec", codec.name.lower(), "int8 or int4")
    form = FORMATS[codec]
    v = _blocks(values, form.block)
    kept = None if residual is None else _blocks(residual, form.block)
    v = v if scale == 1.0 else v * scale
    summed = v if kept is None else v + kept
    maxima = block_maxima(summed)
    codes, scales = quantize(summed, maxima, form)
    if residual_out is not None:
        left = summed - codes.add_(0.0) * scales.unsqueeze(1)  # a code is whole: its zero has no sign
        left = torch.where((maxima >= TINY).unsqueeze(1), left, summed)
        residual_out.copy_(left.reshape(-1)[: residual_out.numel()])
    return pack(codes, form).reshape(-1), scales


def _blocks(flat: torch.Tensor, block: int) -> torch.Tensor:
    """[blocks, block], the last one filled up with zeros."""
    missing = -flat.numel() % block
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, block) if missing else flat.view(-1, block)


class GradientPlace:
    """A gradient's part of one staging buffer, as torch and as NumPy see it.

    `finite_version`: the version at which all of it was finite; None: not known to be.
    """

    __slots__ = ("array", "finite_version", "view")

    def __init__(self, staging: StagingBuffer, tensor: Tensor) -> None:
        self.array = staging.flat[tensor.offset : tensor.offset + tensor.elements]
        self.view = torch.from_numpy(self.array).view(tensor.shape)  # with a version of its own
        self.finite_version: int | None = None

    def check_finite(self) -> None:
        self._know(native.finite(self.array))

    @torch.no_grad()
    def take(self, gradient: torch.Tensor | None, *, checks_finite: bool) -> None:
        """Copy a gradient here, and check it on the way if `checks_finite`; None counts as zero."""
        self.finite_version = None
        if gradient is not None and _is_plain(gradient):
            finite = native.take(gradient.detach().view(-1).numpy(), self.array)
            self._know(checks_finite and finite)
            return
        if gradient is None:
            self.view.zero_()
        elif gradient.is_sparse:
            self.view.zero_().add_(gradient)
        else:
            self.view.copy_(gradient)
        if checks_finite:
            self.check_finite()

    def _know(self, finite: bool) -> None:
        self.finite_version = self.view._version if finite else None


def _is_plain(gradient: torch.Tensor) -> bool:
    strided = gradient.layout is torch.strided and gradient.device.type == "cpu"
    return strided and gradient.dtype is torch.float32 and gradient.is_contiguous()


class DirectGradients:
    """Gradients of these parameters, which have these places in the flat vector.

    checks_finite: whether they are checked. hooks: whether backward makes what is pushed; otherwise it is
    taken when the step is collected.
    """

    def __init__(
        self, parameters: Sequence[tuple[nn.Parameter, Tensor]], *, checks_finite: bool, hooks: bool = True
    ) -> None:
        self.places = [place for _, place in parameters]
        self._parameters = [p for p, _ in parameters]
        self._checks_finite = checks_finite
        self._known: dict[int, tuple[StagingBuffer, list[GradientPlace]]] = {}  # by staging buffer
        self._in_use: list[GradientPlace] = []
        self._last = False  # the next backward is the step's last one
        self._made = [not hooks or t.elements >= LEAST_ELEMENTS for t in self.places]
        self._awaited = [False] * len(self.places)  # those that backward is to make
        self._hooks: list[Any] = []
        for k, (p, _) in enumerate(parameters):
            if hooks and self._made[k]:
                parameter: Any = p  # whose method has no types
                hook = partial(self._accumulated, k)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    @property
    def overwritten(self) -> list[Tensor]:
        """The places that collect() writes whole: they need no zeros."""
        return [place for place, made in zip(self.places, self._made, strict=True) if made]

    def gradients(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self._parameters]

    def begin(self, staging: StagingBuffer) -> None:
        """Begin a new gradient in a staging buffer, which has zeros where it is not overwritten."""
        known = self._known.get(staging.index)
        if known is None or known[0] is not staging:
            known = staging, [GradientPlace(staging, place) for place in self.places]
            self._known[staging.index] = known
        self._in_use, self._last = known[1], False
        self._awaited = list(self._made)
        for p, place, made in zip(self._parameters, self._in_use, self._made, strict=True):
            place.finite_version = None
            p.grad = None if made else place.view

    def last_backward(self) -> None:
        """The next backward is the last one of this gradient."""
        self._last = self._checks_finite

    def collect(self, *, unscaled: bool) -> None:
        """Take every gradient that is not in its place. unscaled: a GradScaler changed them, perhaps without
        a trace.
        """
        for p, place in zip(self._parameters, self._in_use, strict=True):
            if p.grad is not place.view:
                place.take(p.grad, checks_finite=self._checks_finite)
            elif unscaled:
                place.finite_version = None

    def finite_ranges(self) -> list[tuple[int, int]]:
        """After collect(): the first element and the count of each gradient that is known to be finite."""
        return [
            (tensor.offset, tensor.elements)
            for tensor, place in zip(self.places, self._in_use, strict=True)
            if place.finite_version is not None and place.finite_version == place.view._version
        ]

    def release(self) -> None:
        """Detach from the staging buffer: `.grad` is None until the next begin()."""
        self._in_use = []
        for p in self._parameters:
            p.grad = None

    def close(self) -> None:
        """Forget the staging buffers, and remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._known.clear()

    def _accumulated(self, k: int, parameter: torch.Tensor) -> None:
        """Backward has added to a gradient. One of a graph, for a derivative of it, stays as it is."""
        gradient = parameter.grad
        if not self._in_use or gradient is None or gradient.requires_grad:
            return
        place = self._in_use[k]
        if gradient is not place.view:
            if not self._awaited[k]:
                return  # the script has put it there
            place.take(gradient, checks_finite=self._last)
            parameter.grad = place.view
        elif self._last:
            place.check_finite()
        self._awaited[k] = False
