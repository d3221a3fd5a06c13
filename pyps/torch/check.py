"""check_gradient: how far the reduced gradient is from that of a single process, and the likely cause.

Every rank also computes the gradient of all ranks' samples together. Where the two differ, the reduced one is
compared with the results of the usual mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from pyps.errors import InputError
from pyps.torch.hook import rows_of
from pyps.torch.norm import UnevenSyncBatchNorm, equally_weighted
from pyps.torch.schedule import PlanLike, read_split

TOLERANCE = 1e-3  # relative: well above fp32's rounding, well below the effect of any of the mistakes
Loss = Callable[..., torch.Tensor]


class Cause(Enum):
    """Why a gradient is wrong, and what helps."""

    NONE = "it is the gradient of the mean over all samples"
    EQUAL_WEIGHTS = "ranks count equally, whatever their batches: weighted_hook(model), or loss_scale"
    SUM = "ranks are added up, not averaged: weighted_hook(model), or divide the loss"
    SUM_LOSS = "the loss is a sum over samples: weighted_hook(model, reduction='sum'), or a mean loss"
    BATCH_NORM = "BatchNorm sees each rank's batch alone: UnevenSyncBatchNorm.convert(model)"
    RANDOM = "dropout draws differently each time: check with model.eval() or p = 0"
    NOT_SAMPLES = "the loss is no mean over samples (over targets?): weighted_hook(model, count=...)"
    UNKNOWN = "none of the usual mistakes; int8, int4 and autocast gradients differ by their rounding"


@dataclass(frozen=True)
class GradientCheck:
    """`error`: |reduced - right| / |right|; `cause`: the likely one; `batches`: the samples by rank."""

    error: float
    cause: Cause
    batches: tuple[int, ...]

    @property
    def exact(self) -> bool:
        return self.cause is Cause.NONE

    def __str__(self) -> str:
        split = "/".join(map(str, self.batches))
        return f"batches {split}: {self.error:.2%} off the single-process gradient: {self.cause.value}"


def check_gradient(
    model: nn.Module, loss: Loss, batch: Sequence[Any], plan: PlanLike | None = None
) -> GradientCheck:
    """Compare on all ranks; gradients, buffers and random states stay as they were.

    model: DistributedDataParallel, with its hook. loss: (model, *batch) -> the scalar to call backward() on.
    batch: this rank's tensors, samples in the first dimension. plan: if given, the batches must match it.
    Every rank needs memory for all ranks' samples. With int8 or int4 call it before training, because it
    reduces like a step and changes the kept errors. Raises InputError for another model, or batches that are
    not the plan's.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InputError("check_gradient", "model", type(model).__name__, "a DistributedDataParallel")
    group, module = model.process_group, model.module
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, tree_map(_to("cpu"), tuple(batch)), group=group)
    batches = tuple(rows_of(one) for one in gathered)
    if plan is not None and (planned := read_split(plan)) != batches:
        raise InputError("check_gradient", "batches", f"{batches}", f"the plan's {planned}")
    whole = tree_map(_to(next(module.parameters()).device), tree_map(_concatenated, *gathered))
    with _restored(model), equally_weighted(module):
        own = _gradient(module, loss, batch)
        right = _gradient(module, loss, whole)
        is_sum = _is_sum(module, loss, whole)
    with _restored(model):
        reduced = _reduced(model, loss, batch)
    if is_sum:
        right = right / sum(batches)
    sums = torch.stack([own, own * rows_of(batch)])
    dist.all_reduce(sums, group=group)
    candidates = _Candidates(right, sums[1] / sum(batches), sums[0] / len(batches), sums[0])
    return GradientCheck(
        _relative_error(reduced, right), _cause(reduced, candidates, module, is_sum), batches
    )


@dataclass(frozen=True)
class _Candidates:
    """Gradients to compare with: right; the ranks' own, weighted by samples, averaged, or added up."""

    right: torch.Tensor
    weighted: torch.Tensor
    averaged: torch.Tensor
    summed: torch.Tensor


def _cause(found: torch.Tensor, known: _Candidates, module: nn.Module, is_sum: bool) -> Cause:
    if _relative_error(found, known.right) < TOLERANCE:
        return Cause.NONE
    if is_sum:
        return Cause.SUM_LOSS
    layers = [layer for layer in module.modules() if layer.training]
    if any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in layers):
        return Cause.RANDOM
    if _relative_error(found, known.weighted) < TOLERANCE:
        alone = any(isinstance(x, _BatchNorm) and not isinstance(x, UnevenSyncBatchNorm) for x in layers)
        return Cause.BATCH_NORM if alone else Cause.NOT_SAMPLES
    if _relative_error(found, known.averaged) < TOLERANCE:
        return Cause.EQUAL_WEIGHTS
    return Cause.SUM if _relative_error(found, known.summed) < TOLERANCE else Cause.UNKNOWN


def _gradient(module: nn.Module, loss: Loss, batch: Sequence[Any]) -> torch.Tensor:
    """The gradient without reduction, float64 [parameters]; .grad, which DDP hooks into, does not change."""
    trained = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss(module, *batch), trained, allow_unused=True)
    return _flat(torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True))


def _reduced(model: nn.Module, loss: Loss, batch: Sequence[Any]) -> torch.Tensor:
    """The gradient as a training step reduces it: float64 [parameters]."""
    model.zero_grad(set_to_none=True)
    loss(model, *batch).backward()  # type: ignore[no-untyped-call]
    trained = [p for p in model.parameters() if p.requires_grad]
    return _flat(torch.zeros_like(p) if p.grad is None else p.grad for p in trained)


def _is_sum(module: nn.Module, loss: Loss, batch: Sequence[Any]) -> bool:
    """Whether the loss doubles with the samples."""
    with torch.no_grad():
        once = float(loss(module, *batch))
        twice = float(loss(module, *tree_map(lambda x: _concatenated(x, x), tuple(batch))))
    return abs(twice - 2 * once) < abs(twice - once)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Puts gradients, buffers and the random state back at the end."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    with torch.random.fork_rng():
        yield
    for parameter, gradient in gradients:
        parameter.grad = gradient
    with torch.no_grad():
        for buffer, values in buffers:
            buffer.copy_(values)


def _to(device: Any) -> Callable[[Any], Any]:
    return lambda leaf: leaf.detach().to(device) if isinstance(leaf, torch.Tensor) else leaf


def _concatenated(*leaves: Any) -> Any:
    return torch.cat(leaves) if isinstance(leaves[0], torch.Tensor) and leaves[0].dim() else leaves[0]


def _flat(gradients: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.cat([g.detach().double().flatten() for g in gradients])


def _relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm().clamp_min(1e-300))
