"""Shares of memory within real limits of one GPU: python benchmarks/gpu_sharding.py [--blocks 24] [--save].

Two processes share a GPU. Each may allocate so much of it alone: a model in training fits with unlike shares,
and not with equal ones. For stages 1 and 3, and both kinds of shares, the output says whether two steps fit,
and the most that each rank has allocated beside what the planner counts. Gloo carries the tensors, as NCCL
wants a GPU for each rank. It has not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_profile import multi_process_service
from record import machine, save_table, table

BYTES, STATES = 4, 8  # of a parameter in float32, and of its state in AdamW
LIMITS = {1: (15.0, 11.0), 3: (12.5, 6.5)}  # of the ranks, in bytes for each parameter of the model
SHARES = {1: (0.75, 0.25), 3: (0.7, 0.3)}
EQUAL = (0.5, 0.5)
WHOLE_BLOCKS = 3  # that a rank holds at a time
STEPS, BATCH = 2, 8
FULL = 3  # the exit status of a rank without memory
DEADLINE_SECONDS = 120


def planned_bytes(parameters: int, stage: int, share: float, blocks: int) -> float:
    """Return what the planner counts for a rank, without activations."""
    from pyps.solver.shards import ModelState

    sizes = BYTES * parameters, BYTES * parameters, STATES * parameters
    return sum(ModelState(*sizes, stage=stage, whole=WHOLE_BLOCKS / blocks, share=share).held(share))


def train(stage: int, shares: tuple[float, ...], blocks: int, width: int) -> None:
    """One rank; prints the most bytes that it had allocated, or ends with the status FULL."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from pyps.torch import GlobalMean, shard, shard_optimizer

    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cuda", 0)
    count = blocks * (width * width + width)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMITS[stage][rank] * count / total), device)
    try:
        model: Any = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        )
        if stage == 3:
            for block in model:
                shard(block, shares, device=device)
            shard(model, shares, device=device)
        else:
            model = DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        if stage == 1:
            shard_optimizer(optimizer, shares)
        mean = GlobalMean(model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            mean.backward(model(torch.ones(BATCH, width, device=device)).square().mean())
            optimizer.step()
    except torch.cuda.OutOfMemoryError:
        os._exit(FULL)  # the other rank waits for this one
    print(json.dumps(torch.cuda.max_memory_allocated(device)), flush=True)
    os._exit(0)


def launch(options: argparse.Namespace, stage: int, shares: tuple[float, ...]) -> list[int] | None:
    """Return the most bytes of each rank; None if one ran out of memory."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29574", "WORLD_SIZE": "2"}
    command = [sys.executable, __file__, "--rank", str(stage), "--shares", *map(str, shares)]
    command += ["--blocks", str(options.blocks), "--width", str(options.width)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**common, "RANK": str(rank)})
        for rank in range(2)
    ]
    end = time.monotonic() + DEADLINE_SECONDS
    try:
        while any(one.poll() is None for one in running) and time.monotonic() < end:
            if any(one.poll() == FULL for one in running):
                return None
            time.sleep(0.1)
        if any(one.poll() != 0 for one in running):
            sys.exit("a rank failed, or took too long")
        return [json.loads(one.communicate()[0].splitlines()[-1]) for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()


def rows_of(options: argparse.Namespace) -> list[list[str]]:
    """Run every stage with equal and unlike shares."""
    parameters = options.blocks * (options.width**2 + options.width)
    rows = [["stage", "shares", "limits, MB", "allocated, MB", "over the planner's"]]
    for stage, limits in LIMITS.items():
        for shares in (EQUAL, SHARES[stage]):
            found = launch(options, stage, shares)
            planned = [planned_bytes(parameters, stage, share, options.blocks) for share in shares]
            cells = ["out of memory", "-"]
            if found is not None:
                ratios = [f"{have / want:.3f}" for have, want in zip(found, planned, strict=True)]
                cells = [" ".join(f"{one / 1e6:.0f}" for one in found), " ".join(ratios)]
            allowed = " ".join(f"{limit * parameters / 1e6:.0f}" for limit in limits)
            rows.append([str(stage), " ".join(map(str, shares)), allowed, *cells])
    return rows


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--shares", type=float, nargs=2, help="of the ranks, with --rank")
    parser.add_argument("--rank", type=int, choices=[*LIMITS], metavar="STAGE", help="be one of the ranks")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_sharding: torch sees no CUDA device; the limits are those of a GPU")
    if options.rank is not None:
        train(options.rank, tuple(options.shares), options.blocks, options.width)
    with tempfile.TemporaryDirectory() as pipes, multi_process_service(Path(pipes)):
        rows = rows_of(options)
    text = f"Two processes on {torch.cuda.get_device_name()}, gloo. {machine()}.\n\n{table(rows)}"
    print(text)
    if options.save:
        save_table("gpu-sharding", text)


if __name__ == "__main__":
    main()
