"""Ranks of a loop as in diffusers' training scripts, uneven: the gradient's error, and the batches."""

from __future__ import annotations

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader, TensorDataset

from pyps.torch import check_gradient
from pyps.torch.accelerate import UnevenAccelerator

BLOCKS = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}


def network() -> UNet2DModel:
    torch.manual_seed(0)
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    return UNet2DModel(in_channels=1, out_channels=1, **sizes, **BLOCKS).double()


def loss_of(
    model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(noisy, times).sample, noise)


def main() -> None:
    accelerator = UnevenAccelerator(cpu=True, plan=[6, 2], rebalance=False)
    images = torch.randn(32, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(images), batch_size=8, shuffle=True)  # of all ranks
    model, scheduler = network(), DDPMScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(accelerator.process_index)
    worst, sizes = 0.0, set()
    for (clean,) in loader:
        noise, times = torch.randn_like(clean), torch.randint(0, 1000, (len(clean),))
        batch = scheduler.add_noise(clean, noise, times), times, noise
        worst = max(worst, check_gradient(model, loss_of, batch).error)
        sizes.add(len(clean))
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, *batch))
        optimizer.step()
    if accelerator.is_main_process:
        print(f"{worst:.2g} off, batches of {sizes}")
    accelerator.end_training()


main()
