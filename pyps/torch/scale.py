"""loss_scale: the same exact gradient without a hook, wherever ranks are averaged with equal weights.

    loss = loss * loss_scale(len(inputs))

DDP, FSDP2 and what is built on them take 1/N of each rank's gradient. A loss that is first multiplied by
N w_i / W makes of that the gradient of the mean over all samples, sum_i (w_i / W) g_i.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def loss_scale(
    weight: Any, total: Any = None, group: dist.ProcessGroup | None = None, *, ranks: int | None = None
) -> torch.Tensor:
    """N w_i / W as float64 [], for the mean loss over w_i samples (or targets) of this rank.

    weight: w_i, a number or a tensor of one, on whose device the result is. total: W of the whole round; if
    absent, the weights are summed over the ranks of `group`, which all have to call this. For micro-batches:
    that of the micro-batch, and the total of the round. ranks: N, by default the group's, or 1 without one;
    to be given with the total where somebody else averages (torchft's Manager). 0 if W is 0.
    """
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
    """Where the group can sum it: NCCL takes nothing from a CPU."""
    if tensor.device.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device
