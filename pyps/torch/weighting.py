"""Weights of gradients: their samples, and whether this process uses any.

Without weights, unequal batches give a wrong gradient, silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from pyps.errors import InputError

IGNORED = -100  # a label that is no target, as in torch's cross entropy
_weighted = False
_scales = 0  # see scales_made()


def note_weights() -> None:
    """This process weights its gradients."""
    global _weighted
    _weighted = True


def scales_made() -> int:
    """How many scales this process has computed: a hook must not weigh such a loss again."""
    return _scales


def warn_without_weights(split: Sequence[int]) -> None:
    """Warn where ranks with unequal batches have trained without weights."""
    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if grouped and not _weighted and len(set(split)) > 1:
        warnings.warn(
            f"batches {list(split)} differ, but neither weighted_hook nor loss_scale is in use: "
            "the average over ranks is not the gradient of all samples",
            stacklevel=3,
        )


def check_weight(where: str, name: str, weight: Any) -> None:
    """Raise InputError for a number below 0, and for a type that would round it."""
    if isinstance(weight, int | float) and not (0 <= weight < float("inf")):
        raise InputError(where, name, repr(weight), "a number from 0")
    if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.element_size() < 4:
        raise InputError(where, name, str(weight.dtype), "float32 or whole numbers: sum(dtype=torch.float32)")


def not_zero(total: torch.Tensor) -> torch.Tensor:
    """W, or 1 where no rank has a target: every weight is zero then."""
    return torch.where(total > 0, total, 1.0)


def as_float64(number: Any, device: torch.device) -> torch.Tensor:
    """A number or a tensor as float64 [] on a device; for a number the CPU does not wait for the device."""
    if isinstance(number, torch.Tensor):
        return number.to(device, torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Those with a dimension in nested tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() > 0:
            yield batch
        return
    plain = type(batch) in (tuple, list, dict)  # pytree takes ten times as long
    for one in batch.values() if type(batch) is dict else batch if plain else tree_leaves(batch):
        if plain:
            yield from tensors_of(one)
        elif isinstance(one, torch.Tensor) and one.dim() > 0:
            yield one


def rows_of(batch: Any) -> int:
    """The length of the first tensor in nested tuples, lists and dicts. Raises InputError without one."""
    for leaf in tensors_of(batch):
        return int(leaf.shape[0])
    found = "no tensor among forward()'s arguments"
    raise InputError("weighted_hook", "count", found, "count=, or hook.set_weight(n)")


def count_targets(batch: Any = None, *, labels: Any = None, shift: bool = True, **_: Any) -> torch.Tensor:
    """The targets that a causal language model's loss is the mean over: for count=, or hook.set_weight().

        weighted_hook(model, count=count_targets)      # where forward() gets labels=

    batch: a mapping with labels, if these are not given by name. labels: [rows, tokens]; -100 is no target.
    shift: whether position i predicts label i + 1, as in Hugging Face's causal models, so that a row's first
    label is no target. Raises InputError without labels.
    """
    if labels is None and isinstance(batch, Mapping):
        labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        raise InputError("count_targets", "labels", repr(type(labels).__name__), "labels= of forward()")
    return (labels[..., 1:] if shift else labels).ne(IGNORED).sum()


def loss_scale(
    weight: Any, total: Any = None, group: dist.ProcessGroup | None = None, *, ranks: int | None = None
) -> torch.Tensor:
    """N w_i / W as float64 [], for the mean loss over w_i samples (or targets) of this rank; 0 if W is 0.

        loss = loss * loss_scale(len(inputs))

    DDP, FSDP2 and the libraries built on them take 1/N of each rank's gradient. With a loss multiplied so,
    the average is the gradient of the mean over all samples, sum_i (w_i / W) g_i, without a hook.

    weight: w_i, a number or a tensor of one element; the result lies on its device. For micro-batches: the
        micro-batch's.
    total: W of the whole round. If absent, the weights are summed over the ranks of `group`, and all of them
        have to call this.
    ranks: N, by default the group's size, or 1 without a group. Give it together with the total where a
        library averages over other ranks (torchft's Manager).
    Raises InputError for a number below 0, and for 16 bits, which would round it.
    """
    global _scales
    note_weights()
    _scales += torch.is_grad_enabled()
    for name, number in (("weight", weight), ("total", total), ("ranks", ranks)):
        check_weight("loss_scale", name, number)
    own = torch.as_tensor(weight, dtype=torch.float64)
    grouped = dist.is_available() and dist.is_initialized()
    if total is None:
        summed = own.clone().to(_device_for(own, group)) if grouped else own
        if grouped:
            dist.all_reduce(summed, group=group)
    else:
        summed = torch.as_tensor(total, dtype=torch.float64)
    summed = summed.to(own.device)
    if ranks is None:
        ranks = dist.get_world_size(group) if grouped else 1
    return torch.where(summed > 0, ranks * own / summed, 0.0)


def _device_for(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group can sum it: NCCL takes no tensors of the CPU."""
    if tensor.device.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device


def scale_in_place(values: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply by a factor, float64 []; by 0 it makes zeros of NaN too: a mean over no targets has such."""
    if values[0].device.type == "cpu":
        number = float(factor)  # three times as fast as a float64 tensor of one
        if number == 0:
            torch._foreach_zero_(values)
        elif number != 1:
            torch._foreach_mul_(values, number)
        return
    for one in values:
        half = one.element_size() == 2  # would round the factor
        one.copy_(one.float().mul_(factor)) if half else one.mul_(factor)
        one.masked_fill_(factor == 0, 0)
