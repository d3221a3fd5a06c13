"""Uneven DDP between unlike shares of one GPU: python benchmarks/gpu_ddp.py [--save].

Two ranks of a built-in CNN train on one GPU. NVIDIA's multi-process service gives them 70 and 30 % of its
multiprocessors; where it cannot be started they have equal shares, and the output says so. Gloo sums the
gradients (NCCL wants a GPU for each rank), so a reduction goes through host memory. Equal batches first; then
a Rebalancer finds others while it trains. Steps are the median of the last half.
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
from statistics import median
from typing import Any

from gpu_profile import SHARES, multi_process_service
from record import machine, save_table, table

STEPS, WARM_UP = 60, 3
DEADLINE_SECONDS = 150


def train(model: str, batch: int, device: str) -> None:
    """One rank; the first prints seconds and batches of both runs as JSON."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from pyps.tasks import load_task
    from pyps.torch import GlobalMean, Rebalancer, UnevenBatchSampler

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for way in ("equal", "rebalanced"):
        task = load_task(model)
        ddp = DistributedDataParallel(task.model.to(device))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        data = [part.to(device) for part in task.make_batch(batch)]
        sampler = UnevenBatchSampler(batch * STEPS, [batch // 2, batch // 2])
        mean = GlobalMean(ddp, sampler)
        balance = Rebalancer(sampler, mean) if way == "rebalanced" else None
        seconds, began = [], time.perf_counter()
        for rows in DataLoader(range(batch * STEPS), batch_sampler=sampler):  # type: ignore[arg-type]
            optimizer.zero_grad()
            mean.backward(task.loss(ddp(data[0][: len(rows)]), data[1][: len(rows)]))
            optimizer.step()
            if balance is not None:
                balance.step()
            if device != "cpu":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
        found[way] = {"seconds": seconds[WARM_UP:], "batches": list(sampler.split)}
        if balance is not None:
            found[way]["history"] = [str(change) for change in balance.history]
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's own threads may abort a process while its interpreter is torn down


def launch(model: str, batch: int, device: str, shares: tuple[int, ...]) -> dict[str, Any]:
    """Return what the ranks found; each has its share of the GPU, if there are shares."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29573", "WORLD_SIZE": "2"}
    command = [sys.executable, __file__, "--rank", "--model", model, "--batch", str(batch), "--on", device]
    running = []
    for rank in range(2):
        environment = {**common, "RANK": str(rank)}
        if shares:
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(shares[rank])
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    try:
        said = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        sys.exit("a rank failed")
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch", type=int, default=8192, help="of both ranks together")
    parser.add_argument("--on", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rank", action="store_true", help="be one of the ranks")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.rank:
        train(options.model, options.batch, options.on)
        return
    with tempfile.TemporaryDirectory() as pipes, multi_process_service(Path(pipes)) as service:
        found = launch(options.model, options.batch, options.on, SHARES if service else ())
    rows = [["", "batches", "step, ms"]]
    for way, run in found.items():
        later = run["seconds"][len(run["seconds"]) // 2 :]
        rows.append([way, " ".join(map(str, run["batches"])), f"{1e3 * median(later):.1f}"])
    name = torch.cuda.get_device_name() if options.on != "cpu" else "CPU"
    shares = f"shares of {' and '.join(map(str, SHARES))} %" if service else "equal shares"
    history = "; ".join(found["rebalanced"]["history"])
    text = f"{options.model} on {name}, {shares}, gloo. {machine()}.\n\n{table(rows)}\n\n{history}"
    print(text)
    if options.save:
        save_table("gpu-ddp", text)


if __name__ == "__main__":
    main()
