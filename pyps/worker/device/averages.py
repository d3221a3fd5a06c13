"""Buffers that training changes, such as BatchNorm's running statistics: the store averages them.

Every worker's forward moves its own copy r, by its part g of the way, toward the statistics of its batch,
s = r + (change of r) / g. With the gradient a push brings s, and the store moves its own values toward it by
the layer's momentum for each global batch (csrc/store/averaged.c). So a round of fresh workers gives the mean
of their copies, and no worker is pulled back by the age of its r. A step in k micro-batches, which moves r
by g = 1 - (1 - momentum)^k, counts as one batch.

Every persistent buffer of floating-point numbers takes part, rank 0's being the first values. Others stay
local: non-persistent ones, float64, integers, and those with values that are not finite (masks).
`num_batches_tracked` counts global batches, by the run's position: it is set before each step, so that a
layer with momentum=None, which divides by it, does not begin to average anew in a worker that begins late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pyps.errors import InputError
from pyps.native.values import Hyper, Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COUNTER = "num_batches_tracked"
USUAL_MOMENTUM = 0.1  # torch's default; buffers of unknown kind follow a worker so fast


@dataclass(frozen=True)
class BufferPace:
    """How far a buffer moves in one global batch: `momentum` of the way, or 1 / (batches seen) if `counted`.

    counted: batches that the layer had seen before the run.
    """

    momentum: float = USUAL_MOMENTUM
    counted: int | None = None

    def part(self, past: int, forwards: int = 1) -> float:
        """Return the part of the way in the global batch after `past` others, or in `forwards` of it."""
        if self.counted is None:
            return 1.0 - (1.0 - self.momentum) ** forwards if forwards > 1 else self.momentum
        return 1.0 / (self.counted + past + 1)

    def gone(self, past: int, planned: int, done: int) -> float:
        """Return what is gone of the way by `done` forwards of a step that began as for `planned` a batch."""
        if self.counted is None:
            return 1.0 - (1.0 - self.momentum) ** done
        return done / ((self.counted + past) * planned + done)


@dataclass(frozen=True)
class AveragedBuffer:
    """A buffer by its place in the model: a forward may put another tensor there."""

    name: str  # as in state_dict()
    module: Any
    key: str
    pace: BufferPace

    @property
    def value(self) -> torch.Tensor:
        found: torch.Tensor | None = self.module._buffers[self.key]
        if found is None:
            raise InputError("step", self.name, "None", "the buffer that attach() found")
        return found

    @property
    def counts(self) -> bool:
        """Return whether it counts batches."""
        return self.key == COUNTER


def find_buffers(model: nn.Module) -> tuple[tuple[AveragedBuffer, ...], ...]:
    """The buffers that the store averages, each once; those of one pace together, a group of the store.

    Raises InputError for SyncBatchNorm.
    """
    seen: set[int] = set()
    groups: dict[BufferPace, list[AveragedBuffer]] = {}
    for buffer in _persistent(model):
        value = buffer.module._buffers[buffer.key]
        if value is not None and id(value) not in seen and _is_averaged(buffer, value):
            seen.add(id(value))
            groups.setdefault(buffer.pace, []).append(buffer)
    return tuple(map(tuple, groups.values()))


def _persistent(model: nn.Module) -> Iterator[AveragedBuffer]:
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            expected = (
                "BatchNorm: each worker normalises its own batch, and the store averages the statistics"
            )
            raise InputError("attach", path or "model", "SyncBatchNorm", expected)
        for key in module._buffers:
            if key not in module._non_persistent_buffers_set:
                name = plain_name(f"{path}.{key}" if path else key)
                yield AveragedBuffer(name, module, key, _pace_of(module, key))


def plain_name(name: str) -> str:
    """The name that a parameter or buffer has without torch.compile."""
    return name.replace("_orig_mod.", "")


def _pace_of(module: nn.Module, key: str) -> BufferPace:
    if not isinstance(module, _NormBase) or key == COUNTER:
        return BufferPace()
    if module.momentum is None:
        counter = module.num_batches_tracked
        return BufferPace(0.0, int(counter) if counter is not None else 0)
    return BufferPace(module.momentum) if 0.0 < module.momentum <= 1.0 else BufferPace()


def _is_averaged(buffer: AveragedBuffer, value: torch.Tensor) -> bool:
    if isinstance(value, nn.parameter.UninitializedBuffer) or value.layout is not torch.strided:
        return False
    if buffer.counts and isinstance(buffer.module, _NormBase):
        return True
    if value.dtype not in DTYPES or value.numel() == 0 or value.is_meta:
        return False
    return bool(torch.isfinite(value).all())


@dataclass(frozen=True)
class Moment:
    """One tensor of the state that a worker's own optimizer has of one parameter; the optimizer may put
    another there. Workers go all of the way to the mean.
    """

    name: str
    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    key: str
    pace: BufferPace = field(default=BufferPace(1.0), init=False)
    module: Any = field(default=None, init=False)
    counts: bool = field(default=False, init=False)

    @property
    def value(self) -> torch.Tensor:
        found: torch.Tensor = self.optimizer.state[self.parameter][self.key]
        return found


Averaged = AveragedBuffer | Moment


class BufferGroup:
    """Averaged buffers of one pace, and their range of the flat vector.

    places: of all of the store's tensors. device: of the model, where they are gathered.
    """

    def __init__(
        self, buffers: tuple[Averaged, ...], places: dict[str, Tensor], device: torch.device
    ) -> None:
        self.pace = buffers[0].pace
        self._buffers, self._device = buffers, device
        self._places = [places[buffer.name] for buffer in buffers]
        self._range = slice(self._places[0].offset, self._places[-1].offset + self._places[-1].elements)
        self._counted = [int(b.value) if b.counts else 0 for b in buffers]  # before the run
        self._counters: tuple[tuple[bool, ...], torch.Tensor, torch.Tensor] | None = None
        self._pulled = self._before = torch.empty(0)

    @torch.no_grad()
    def load(self, flat: torch.Tensor) -> None:
        """Give the buffers the values that were pulled."""
        self._pulled = flat[self._range].to(self._device, copy=True)
        for buffer, place in zip(self._buffers, self._places, strict=True):
            begin = place.offset - self._range.start
            put(buffer.value, self._pulled[begin : begin + place.elements].view(place.shape))
        self._before = self._values()

    def _values(self) -> torch.Tensor:
        flat = [b.value.detach().reshape(-1).to(self._device, torch.float32) for b in self._buffers]
        return torch.cat(flat)

    @torch.no_grad()
    def set_counters(self, past: int, planned: int) -> None:
        """Set them as after `past` batches of `planned` forwards each, where a forward reads its counter."""
        for buffer, counted in zip(self._buffers, self._counted, strict=True):
            if buffer.counts and buffer.module.momentum is None and buffer.module.training:
                buffer.value.fill_((counted + past) * planned)

    def _counting(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where counters of layers in training are, bool [elements], and their counts before the run."""
        now = tuple(b.counts and b.module.training for b in self._buffers)
        if self._counters is None or self._counters[0] != now:
            sizes = torch.tensor([place.elements for place in self._places])
            where = torch.tensor(now).repeat_interleave(sizes).to(self._device)
            counted = torch.tensor(self._counted).float().repeat_interleave(sizes).to(self._device)
            self._counters = now, where, counted
        return self._counters[1], self._counters[2]

    @torch.no_grad()
    def collect(self, staging: torch.Tensor, past: int, planned: int, done: int) -> None:
        """Stage what this worker's values are on their way to."""
        gone, part = self.pace.gone(past, planned, done), self.pace.part(past)
        where, counted = self._counting()
        moved = (self._values() - self._before) / gone
        moved = torch.where(where, (counted + (past + 1) - self._pulled) / part, moved)
        staging[self._range].copy_(self._pulled + moved)


class BufferBinding:
    """A model's averaged buffers: their way to the staging buffer, and back from the flat vector."""

    def __init__(
        self, groups: tuple[tuple[Averaged, ...], ...], places: dict[str, Tensor], device: torch.device
    ) -> None:
        self._groups = [BufferGroup(buffers, places, device) for buffers in groups]
        self._past = 0  # global batches before the step under way
        self._planned = self._done = 1  # its micro-batches, and those that have begun
        self._forwards = 1

    def load(self, flat: torch.Tensor) -> None:
        """Give the buffers the values that were pulled. flat: float32 [flat_elements], host."""
        for group in self._groups:
            group.load(flat)

    def begin_step(self, past: int, planned: int, forwards: int = 1) -> None:
        """A step begins, after `past` global batches, in `planned` micro-batches. The buffers move as by
        `forwards` forward passes of a worker: one for each of its local steps, or one.
        """
        self._past, self._planned, self._done, self._forwards = past, planned, 0, forwards
        for group in self._groups:
            group.set_counters(past, planned)

    def begin_micro_batch(self) -> None:
        """Each changes the buffers once."""
        self._done += 1

    def begin_again(self, forwards: int) -> None:
        """The buffers got other values within a step. Only the forward passes since then changed them;
        `forwards` of these have not finished.
        """
        self._done = forwards

    def hyper(self) -> tuple[Hyper, ...]:
        """The groups' constants for the step under way."""
        return tuple(Hyper(lr=group.pace.part(self._past, self._forwards)) for group in self._groups)

    def collect(self, staging: torch.Tensor) -> None:
        """Put this worker's values into the staging buffer. staging: float32 [flat_elements], host."""
        for group in self._groups:
            group.collect(staging, self._past, self._planned, self._done)


@torch.no_grad()
def put(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy fp32 values to a parameter or buffer; to the nearest whole numbers if it holds those."""
    target.copy_(values if target.is_floating_point() else values.round())
