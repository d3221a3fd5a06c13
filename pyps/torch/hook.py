"""weighted_hook: the gradient of uneven batches is that of one process with all samples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.torch.ddp_hook import HALVES, QUANTIZED, DDPHook, Wire
from pyps.torch.rounds import Rounds
from pyps.torch.weighted import WeightedHook


@overload
def weighted_hook(
    model: DistributedDataParallel,
    sampler: Rounds | None = None,
    *,
    count: Callable[..., Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    wire: Wire = "same",
    scaler: Any = None,
) -> DDPHook: ...


@overload
def weighted_hook(
    model: torch.nn.Module,
    sampler: Rounds | None = None,
    *,
    count: Callable[..., Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    wire: Wire = "same",
    scaler: Any = None,
) -> WeightedHook: ...


def weighted_hook(
    model: torch.nn.Module,
    sampler: Rounds | None = None,
    *,
    count: Callable[..., Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    wire: Wire = "same",
    scaler: Any = None,
) -> WeightedHook:
    """Give the gradients of a DistributedDataParallel or fully_shard model their weights, compiled or not.

    sampler: if given, the samples of the first round are checked against its rounds.
    count: computes w_i from forward()'s arguments; by default the length of the first tensor among them (its
        samples). For weights by targets: count=lambda inputs, targets: (targets != -100).sum(), or
        hook.set_weight(n) before each backward().
    reduction: whether the loss is the mean over those w_i, or their sum.
    wire: the type in which DDP's gradients are sent; int8 and int4 with error feedback.
    scaler: the torch.amp.GradScaler in use, so that kept errors and GradientNoise follow its scale.
    Raises InputError for another model or one that has a hook, and for an unknown option; in forward(), on
    all ranks, if their data sets or their calls of Rebalancer.step() differ.
    """
    if wire != "same" and wire not in HALVES and wire not in QUANTIZED:
        raise InputError("weighted_hook", "wire", repr(wire), "same, bf16, f16, int8 or int4")
    if reduction not in ("mean", "sum"):
        raise InputError("weighted_hook", "reduction", repr(reduction), "mean or sum")
    plain = getattr(model, "_orig_mod", model)
    if isinstance(plain, DistributedDataParallel):
        return DDPHook(plain, sampler, count, reduction, wire, scaler)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded model has imported it
    if fsdp is None or not hasattr(fsdp, "FSDPModule") or not isinstance(plain, fsdp.FSDPModule):
        expected = "a DistributedDataParallel, or what fully_shard gives"
        raise InputError("weighted_hook", "model", type(plain).__name__, expected)
    if wire != "same":
        expected = "same: fully_shard's MixedPrecisionPolicy(reduce_dtype=...) says what FSDP2 sends"
        raise InputError("weighted_hook", "wire", repr(wire), expected)
    from pyps.torch.fsdp_hook import FSDPHook

    return FSDPHook(plain, sampler, count, reduction, scaler)
