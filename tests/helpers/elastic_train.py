"""A script for torchrun that can be stopped at any step: argv is the folder for the checkpoint and the notes.

Each rank notes the samples of every step before it computes them: a step that counts has all its notes. Ranks
finish if they start when the folder holds a file `last`; others take HOLD_STEPS, then wait until torchrun
starts them again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from pyps.torch import GlobalMean, UnevenBatchSampler, agreed_split

B, SAMPLES, EVERY = 24, 24 * 40 + 7, 4
HOLD_STEPS, STEP_SECONDS = 9, 0.05  # of a start that does not finish


def wait_for_restart() -> NoReturn:
    """Meet the other ranks again and again: a rank that is gone is noticed, as in a step."""
    while True:
        dist.all_reduce(torch.zeros(1))
        time.sleep(STEP_SECONDS)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    said = torch.tensor([time.time(), (folder / "last").exists()], dtype=torch.float64)
    dist.broadcast(said, 0)
    started, finishes = said[0].item(), bool(said[1])
    sampler = UnevenBatchSampler(SAMPLES, agreed_split(B, max_batch=20))
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mean = GlobalMean(model, sampler)
    checkpoint, done = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        sampler.load_state_dict(state["sampler"])
        done = state["steps"]
    notes = (folder / f"notes-{os.getpid()}.jsonl").open("a")
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=sampler)
    for number, (rows,) in enumerate(loader, done):
        note = {
            "started": started,
            "step": number,
            "ranks": ranks,
            "rows": rows.tolist(),
            "from": done,
        }
        notes.write(json.dumps(note) + "\n")
        notes.flush()
        optimizer.zero_grad()
        mean.backward(nn.functional.mse_loss(model(rows[:, None] / SAMPLES), rows[:, None] / SAMPLES))
        optimizer.step()
        mean.end_step()
        if (number + 1) % EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "sampler": sampler.state_dict(), "steps": number + 1}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").rename(checkpoint)
        if not finishes:
            time.sleep(STEP_SECONDS)
            if number + 1 >= done + HOLD_STEPS:
                wait_for_restart()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
