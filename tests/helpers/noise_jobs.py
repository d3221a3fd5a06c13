"""Define what the ranks of GradientNoise's tests do: random batches at fixed parameters."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from ddp_tools import flat, mine, net, numbers
from device import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pyps.torch import GlobalMean, GradientNoise, UnevenBatchSampler


class Complex(nn.Module):
    """Real features -> a complex linear layer -> its squared magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4, dtype=torch.complex128)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs.to(torch.complex128))
        return torch.view_as_real(found).square().sum(-1)


def real(gradients: list[torch.Tensor]) -> torch.Tensor:
    return flat(torch.view_as_real(g) if g.is_complex() else g for g in gradients)


def noise_scales(
    group: dist.ProcessGroup, batches: list[int], kind: str, parts: int, scaled: bool, sums: bool
) -> tuple[float | None, float]:
    """The measured noise scale of random batches at fixed parameters, and the exact one."""
    inputs, targets = numbers(3, 400, torch.float64)
    torch.manual_seed(1)
    alone = Complex().to(DEVICE) if kind == "complex" else net(torch.float64)
    each = []
    for x, y in zip(inputs, targets, strict=True):
        loss = nn.functional.mse_loss(alone(x[None]), y[None])
        each.append(real(list(torch.autograd.grad(loss, list(alone.parameters())))))
    samples = torch.stack(each)
    exact = float(samples.var(0, correction=0).sum() / samples.mean(0).square().sum())
    model = copy.deepcopy(alone)
    if kind == "fsdp":
        model = fully_shard(model, mesh=DeviceMesh.from_group(group, DEVICE.type))
    else:
        model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=kind == "views")
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=scaled, init_scale=2.0**10)
    sampler = UnevenBatchSampler(400, batches, dist.get_rank(group))
    mean = GlobalMean(model, sampler, scaler=scaler, reduction="sum" if sums else "mean")
    noise = GradientNoise(mean, memory=0.999)
    draws = torch.Generator().manual_seed(7)
    for _ in range(50):
        rows = torch.randint(400, (sum(batches),), generator=draws)[mine(batches, group)]
        model.zero_grad()
        for x, y in mean.accumulate((inputs[rows], targets[rows]), parts):
            loss = nn.functional.mse_loss(model(x), y, reduction="sum" if sums else "mean")
            mean.backward(scaler.scale(loss))
        noise.step()
        mean.calls = 0
    noise.load_state_dict(noise.state_dict())
    return noise.scale, exact
