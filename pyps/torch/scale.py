"""loss_scale: the same exact gradient without a hook, wherever ranks are averaged with equal weights.

    loss = loss * loss_scale(len(inputs))

DDP, FSDP2 and the libraries built on them take 1/N of each rank's gradient. With a loss multiplied by
N w_i / W, the average is the gradient of the mean over all samples, sum_i (w_i / W) g_i.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.torch.weighting import note_weights


def loss_scale(
    weight: Any, total: Any = None, group: dist.ProcessGroup | None = None, *, ranks: int | None = None
) -> torch.Tensor:
    """N w_i / W as float64 [], for the mean loss over w_i samples (or targets) of this rank; 0 if W is 0.

    weight: w_i, a number or a tensor of one element; the result lies on its device. For micro-batches: the
        micro-batch's.
    total: W of the whole round. If absent, the weights are summed over the ranks of `group`, and all of them
        have to call this.
    ranks: N, by default the group's size, or 1 without a group. Give it together with the total where a
        library averages over other ranks (torchft's Manager).
    Raises InputError for a number below 0.
    """
    note_weights()
    for name, number in (("weight", weight), ("total", total), ("ranks", ranks)):
        if isinstance(number, int | float) and not (0 <= number < float("inf")):
            raise InputError("loss_scale", name, repr(number), "a number from 0")
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
