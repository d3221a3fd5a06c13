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
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from pyps.errors import InputError
from pyps.torch.accumulate import samples_of
from pyps.torch.global_mean import mean_of, unweighted
from pyps.torch.norm import sees_own_batch_alone
from pyps.torch.peers import all_copies, parameters_of, peers_of
from pyps.torch.schedule import PlanLike, read_split
from pyps.torch.wrapped import REDUCED
from pyps.torch.wrapped_models import WrappedShards, wrapped_models

TOLERANCE = 1e-3  # relative: well above fp32's rounding, well below the effect of any of the mistakes
Loss = Callable[..., torch.Tensor]


class Cause(Enum):
    """Why a gradient is wrong, and what helps."""

    NONE = "it is the gradient of the loss over all samples"
    EQUAL_WEIGHTS = "ranks count equally, whatever their batches: GlobalMean(model), mean.backward(loss)"
    SUM = "ranks are added up, not averaged: GlobalMean(model), mean.backward(loss)"
    SUM_LOSS = "the loss is a sum over samples: GlobalMean(model, reduction='sum'), or a mean loss"
    BATCH_NORM = "BatchNorm sees each rank's batch alone: UnevenSyncBatchNorm.convert(model)"
    RANDOM = "dropout draws differently each time: check with model.eval() or p = 0"
    NOT_SAMPLES = "the loss is no mean over samples: mean.backward(loss), or n= what it is a mean over"
    UNKNOWN = (
        "none of the usual mistakes: a loss or layer that mixes a batch's samples, or rounding (int8, int4, "
        "autocast)"
    )


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
    model: nn.Module, loss: Loss, batch: Sequence[Any], plan: PlanLike | None = None, *, n: Any = None
) -> GradientCheck:
    """Compare on all ranks; gradients, buffers and random states stay as they were.

    model: DistributedDataParallel or from fully_shard; its GlobalMean is used, if it has one. loss: (model,
    *batch) -> the scalar to call backward() on. batch: this rank's tensors, samples in the first dimension.
    plan: if given, the batches must match it. n: as in GlobalMean.backward. Every rank needs memory for all
    ranks' samples. With int8 or int4 call it before training, because it reduces like a step and changes the
    kept errors. Raises InputError for another model, or batches that are not the plan's.
    """
    averages = _Averages(model)
    group, module = averages.group, averages.module
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, tree_map(_to("cpu"), tuple(batch)), group=group)
    batches = tuple(samples_of(one) for one in gathered)
    if plan is not None and (planned := read_split(plan)) != batches:
        raise InputError("check_gradient", "batches", f"{batches}", f"the plan's {planned}")
    whole = tree_map(_to(next(module.parameters()).device), tree_map(_concatenated, *gathered))
    share = len(batches) * samples_of(tuple(batch)) / sum(batches)
    with _restored(model, averages.parameters):
        right = averages.of(loss, whole)
        averaged, weighted = averages.of(loss, batch), averages.of(loss, batch, share)
        is_sum = _is_sum(module, loss, whole)
    with _restored(model, averages.parameters):
        reduced = _reduced(model, loss, batch, averages.parameters, _step_of(model, n))
    error = _Distance(averages.parameters, group)
    # All ranks compute all errors, because some need a sum over the ranks.
    errors = [error(reduced, other) for other in (right, weighted, averaged, averaged * len(batches))]
    cause = _cause([one < TOLERANCE for one in errors], module, is_sum)
    return GradientCheck(errors[0], cause, batches)


class _Averages:
    """Averages over ranks of a model's gradients, as a plain backward pass has them; .grad may change."""

    def __init__(self, model: Any) -> None:
        self._wrapped = wrapped_models(model, "check_gradient")[0]
        if isinstance(self._wrapped, WrappedShards):
            expected = "a DistributedDataParallel, or what fully_shard gives"
            raise InputError("check_gradient", "model", "what shard() gives", expected)
        self.module: nn.Module = model.module if self._wrapped.is_ddp else model
        self.group = self._wrapped.group
        self.parameters = [p for p in parameters_of(model) if p.requires_grad]

    def of(self, loss: Loss, batch: Sequence[Any], scale: float = 1.0) -> torch.Tensor:
        """The average of each rank's gradient times its scale: float64 [this rank's parameters]."""
        with unweighted():
            if not self._wrapped.is_ddp:
                with self._wrapped.averaged_evenly():
                    return _reduced(self.module, lambda *given: loss(*given) * scale, batch, self.parameters)
            found = torch.autograd.grad(loss(self.module, *batch), self.parameters, allow_unused=True)
        both = zip(self.parameters, found, strict=True)
        flat = scale * _flat(torch.zeros_like(p) if g is None else g for p, g in both)
        dist.all_reduce(flat, group=self.group)
        return flat / dist.get_world_size(self.group)


def _cause(near: Sequence[bool], module: nn.Module, is_sum: bool) -> Cause:
    """Say what is likely; near: to the right gradient, to the ranks' own weighted by samples, to these
    averaged, to these added up.
    """
    is_right, is_weighted, is_averaged, is_summed = near
    if is_right:
        return Cause.NONE
    if is_sum:
        return Cause.SUM_LOSS
    layers = [layer for layer in module.modules() if layer.training]
    if any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in layers):
        return Cause.RANDOM
    if is_weighted:
        return Cause.BATCH_NORM if sees_own_batch_alone(module) else Cause.NOT_SAMPLES
    if is_averaged:
        return Cause.EQUAL_WEIGHTS
    return Cause.SUM if is_summed else Cause.UNKNOWN


class _Distance:
    """Relative distances of gradients, float64 [this rank's values], over all parts of a model."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group, self._peers = group, peers_of(parameters, group)
        ranks = dist.get_world_size(group)
        ranks *= dist.get_world_size(self._peers) if self._peers is not None else 1
        counted = ((getattr(p, "_local_tensor", p).numel(), 1 / all_copies(p, ranks)) for p in parameters)
        self._shares = torch.cat([torch.full((n,), share, dtype=torch.float64) for n, share in counted])

    def __call__(self, found: torch.Tensor, right: torch.Tensor) -> float:
        shares = self._shares.to(right.device)
        squares = torch.stack([(shares * x.square()).sum() for x in (found - right, right)])
        for group in (self._group, self._peers):
            if group is not None:
                dist.all_reduce(squares, group=group)
        return float((squares[0] / squares[1].clamp_min(1e-300)).sqrt())


def _plain(loss: torch.Tensor) -> None:
    """A backward pass without weights."""
    with unweighted():
        loss.backward()  # type: ignore[no-untyped-call]


def _step_of(model: nn.Module, n: Any) -> Callable[[torch.Tensor], None]:
    """The backward pass of a training step: that of the model's GlobalMean, or a plain one."""
    if (mean := mean_of(model)) is None:
        if any(hasattr(p, REDUCED) for p in model.parameters()):
            raise InputError("check_gradient", "GlobalMean", "one that is gone", "mean = GlobalMean(model)")
        return _plain

    def weighed(loss: torch.Tensor) -> None:
        calls = mean.calls
        mean.backward(loss, n)
        mean.calls = calls

    return weighed


def _reduced(
    model: nn.Module,
    loss: Loss,
    batch: Sequence[Any],
    trained: Sequence[nn.Parameter],
    step: Callable[[torch.Tensor], None] = _plain,
) -> torch.Tensor:
    """The gradient as a backward pass reduces it: float64 [parameters]."""
    for parameter in trained:
        parameter.grad = None
    step(loss(model, *batch))
    return _flat(torch.zeros_like(p) if p.grad is None else p.grad for p in trained)


def _is_sum(module: nn.Module, loss: Loss, batch: Sequence[Any]) -> bool:
    """Tell whether the loss doubles with the samples."""
    with torch.no_grad():
        once = float(loss(module, *batch))
        twice = float(loss(module, *tree_map(lambda x: _concatenated(x, x), tuple(batch))))
    return abs(twice - 2 * once) < abs(twice - once)


@contextmanager
def _restored(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Puts gradients, buffers and the random state back at the end."""
    gradients = [(p, p.grad) for p in parameters]
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
    """float64 [values], of a sharded gradient this rank's."""
    own = (getattr(g, "_local_tensor", g) for g in gradients)
    return torch.cat([g.detach().double().flatten() for g in own])
