"""A script for torchrun that is killed once: uneven batches and shares, a checkpoint every third step.

argv: the folder for checkpoints. The last rank dies in its eighth step, at the first start. The first prints
JSON: the step that it went on from, and how far the parameters are off those of one process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_tools import flat, numbers, off
from sharding_jobs import ROWS, Net, batch, groups, sharded
from torch import nn

import pyps.torch
from pyps.sharding import gathered
from pyps.torch import GlobalMean

STEPS, SAVE_EVERY, DIES_AT = 12, 3, 7


def one_process() -> torch.Tensor:
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    for step in range(STEPS):
        x, y = numbers(step, ROWS, torch.float64)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main() -> None:
    dist.init_process_group("gloo")
    group, folder = dist.group.WORLD, Path(sys.argv[1])
    assert group is not None
    model: Any = sharded(Net(), [0.7, 0.3], group)
    mean = GlobalMean(model)
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    saved = pyps.torch.load(folder, model, optimizer, mean=mean)
    first = 0 if saved is None else saved["step"]
    for step in range(first, STEPS):
        x, y = batch(step, group)
        mean.backward(nn.functional.mse_loss(model(x), y))
        if step == DIES_AT and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            pyps.torch.save(folder, model, optimizer, step=step + 1, mean=mean)
    with gathered(model):
        whole = flat(model.parameters())
    if dist.get_rank() == 0:
        print(json.dumps({"from": first, "off": off(whole, one_process())}))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
