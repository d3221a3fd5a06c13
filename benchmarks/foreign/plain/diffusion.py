"""A denoiser of a diffusion model, with a moving average of its weights."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GLOBAL_BATCH, EPOCHS, TIMES, SAVE_EVERY = 32, 3, 50, 4


class Noised(Dataset):
    """Points on a circle, each with the noise and the time that belong to it."""

    def __len__(self):
        return 320

    def __getitem__(self, k):
        draws = torch.Generator().manual_seed(k)
        angle = 6.283 * torch.rand(1, generator=draws)
        noise, time = torch.randn(2, generator=draws), torch.randint(TIMES, (1,), generator=draws)
        return torch.cat([angle.cos(), angle.sin()]), noise, time


class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        first, second = [nn.Linear(3, width), nn.SiLU()], [nn.Linear(width, width), nn.SiLU()]
        self.net = nn.Sequential(*first, *second, nn.Linear(width, 2))

    def forward(self, x, time):
        return self.net(torch.cat([x, time / TIMES], 1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, path = Noised(), os.path.join(sys.argv[1], "denoiser.pt")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    kept = torch.linspace(1.0, 0.0, TIMES + 1)[1:].cumsum(0).flip(0) / TIMES
    model = DistributedDataParallel(Denoiser())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    begin, steps = 0, 0
    if os.path.exists(path):
        found = torch.load(path, weights_only=True)
        model.module.load_state_dict(found["model"])
        average.load_state_dict(found["average"])
        optimizer.load_state_dict(found["optimizer"])
        begin, steps = found["epoch"], found["steps"]
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for x, noise, time in loader:
            share = kept[time]
            loss = mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, time), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model.module)
            steps += 1
            if steps % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "average": average.state_dict(), "epoch": epoch, "steps": steps}, path)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
