"""UnevenSyncBatchNorm: BatchNorm over all samples of a round on all ranks, exactly.

The statistics are those of the whole round: every rank's count, mean and sum of squared deviations, merged in
rank order (Chan, Golub, LeVeque 1979). running_var takes the unbiased variance, n / (n - 1) with the whole
round's n.

Its backward pass adds up, over the ranks, how each rank's loss depends on the statistics. GlobalMean lets the
gradient into each rank's loss with its weight, and all that follows is averaged alike: so the sum is plain,
also for a rank of weight 0, whose samples are in the statistics of the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from pyps.errors import InputError
from pyps.torch.waiting import Waiting
from pyps.worker.step.terms import normalized_by_batch

PLAIN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
TRAINED = "_pyps_has_trained"  # an attribute of layers that a GlobalMean has trained


class UnevenSyncBatchNorm(_BatchNorm):
    """Replaces BatchNorm1d, 2d, 3d and SyncBatchNorm, with the same parameters, buffers and state_dict.

    All ranks of `group` have to run it the same number of times; a rank may have no samples, but not all of
    them. In eval mode, and without a process group, it is BatchNorm. Raises InputError for an input of
    another shape, and for a class with a forward() of its own, but for timm's: its dropout and activation
    are kept.
    """

    group: dist.ProcessGroup | None = None

    @classmethod
    def convert(cls, module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
        """The module with each BatchNorm replaced; parameters and buffers are kept.

        It is for models before their first step, wrapped or not. Raises InputError for a layer that trained
        by its own rank's statistics.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            if getattr(module, TRAINED, False):
                expected = "convert() before the first step, on all ranks"
                raise InputError("UnevenSyncBatchNorm", "convert", "a layer that has trained", expected)
            return cls._like(module, group)
        for name, child in module.named_children():
            if (new := cls.convert(child, group)) is not child:
                setattr(module, name, new)
        return module

    @classmethod
    def _like(cls, old: _BatchNorm, group: dist.ProcessGroup | None) -> UnevenSyncBatchNorm:
        new = cls(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
        new.weight, new.bias = old.weight, old.bias
        new.running_mean, new.running_var = old.running_mean, old.running_var
        new.num_batches_tracked = old.num_batches_tracked
        new.group = group
        if type(old).forward not in PLAIN:
            kind, parts = type(old), dict(old.named_children())
            if not kind.__module__.startswith("timm.") or parts.keys() != {"drop", "act"}:
                expected = "a class without a forward() of its own, which would be lost"
                raise InputError("UnevenSyncBatchNorm", "convert", kind.__qualname__, expected)
            new.drop, new.act = parts["drop"], parts["act"]  # under these names in the state, too
        return new.train(old.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[n, channels, ...] -> the same shape, normalised by channel over all ranks."""
        found = self._normed(input)
        return self.act(self.drop(found)) if "act" in self._modules else found  # type: ignore[operator]

    def _normed(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        self._check_input_dim(input)
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self.group) == 1
        if not self.training or alone:
            return super().forward(input)
        normed, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.group
        )
        self._track(mean, variance, count)
        return normed  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp_min(1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's own name
        if input.dim() < 2:
            shape = f"shape {list(input.shape)}"
            raise InputError("UnevenSyncBatchNorm", "input", shape, "[n, channels, ...]")


def sees_own_batch_alone(module: nn.Module) -> bool:
    """Tell whether a layer that trains normalises over its rank's samples, unlike in one process."""
    return any(not isinstance(layer, UnevenSyncBatchNorm) for layer in normalized_by_batch(module))


def note_trained(module: nn.Module) -> None:
    """The module's first step begins: layers that normalise by batch are what they are from now on."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            setattr(layer, TRAINED, True)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias over all ranks, and its statistics, fp32 or wider."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        mean, squares, count = _merged(*_own_statistics(wide), group)
        variance = squares / count
        inverse_std = torch.rsqrt(variance + eps)
        shape = _across(values)
        normed = (wide - mean.view(shape)) * inverse_std.view(shape)
        ctx.save_for_backward(normed, inverse_std, weight, count)
        ctx.group, ctx.dtype = group, values.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        result = normed if weight is None else normed * weight.view(shape)
        return (result if bias is None else result + bias.view(shape)).to(values.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        normed, inverse_std, weight, count = ctx.saved_tensors
        shape, others = _across(normed), _not_channels(normed)
        above = above.to(normed.dtype)
        sums = torch.stack([above.sum(others), (above * normed).sum(others)])  # gradients of bias and weight
        total = sums.clone()
        with Waiting.on(sums.device).counted():
            dist.all_reduce(total, group=ctx.group)
        total /= count
        below = above - total[0].view(shape) - normed * total[1].view(shape)
        below = below * (inverse_std if weight is None else inverse_std * weight).view(shape)
        own_weight, own_bias = (None, None) if weight is None else (sums[1].to(weight), sums[0].to(weight))
        return below.to(ctx.dtype), own_weight, own_bias, None, None


def _own_statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """By channel: mean and sum of squared deviations of this rank's values, and how many there are."""
    if not values.numel():  # of no samples, both would be NaN
        zeros = values.new_zeros(values.shape[1])
        return zeros, zeros, 0
    variance, mean = torch.var_mean(values, _not_channels(values), correction=0)
    count = values.numel() // values.shape[1]
    return mean, variance * count, count


def _merged(
    mean: torch.Tensor, squares: torch.Tensor, count: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same over all ranks, in rank order; count becomes a tensor []."""
    own = torch.cat([mean, squares, mean.new_full((1,), count)])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with Waiting.on(own.device).counted():
        dist.all_gather(gathered, own, group=group)
    table = torch.stack(gathered)
    means, deviations, counts = table[:, : len(mean)], table[:, len(mean) : -1], table[:, -1:]
    total = counts.sum()
    merged = (means * (counts / total)).sum(0)
    return merged, (deviations + counts * (means - merged) ** 2).sum(0), total


def _across(values: torch.Tensor) -> list[int]:
    """The shape that lays a vector of channels along the second dimension."""
    return [1, -1] + [1] * (values.dim() - 2)


def _not_channels(values: torch.Tensor) -> list[int]:
    return [0, *range(2, values.dim())]
