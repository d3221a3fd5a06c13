"""The jobs of the DDP tests over NCCL, between ranks of one GPU: python tests/helpers/nccl_on_one_gpu.py 2

NCCL wants a GPU for each rank of a host. Ranks that call themselves hosts may share one; they talk over TCP.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 75
BATCHES = [48, 16, 3, 9]
FEW = [20, 3, 9, 4]


Jobs = dict[str, Callable[[], Any]]  # by name; those that give errors give their largest


def ddp_jobs_of(group: Any, ranks: int) -> Jobs:
    import ddp_accumulate_jobs as accumulating
    import ddp_jobs
    import ddp_more_jobs as more

    batches, few, parts = BATCHES[:ranks], FEW[:ranks], [4, 3, 1, 2][:ranks]

    def off(*options: Any) -> float:
        return max(ddp_jobs.gradient_errors(group, batches, *options)[0])

    def noise(scaled: bool) -> float:
        measured, exact = accumulating.noise_scales(group, [b + 10 for b in few], 2, scaled, False, 100)
        assert measured is not None
        return measured / exact - 1

    return {
        "gradient": lambda: off({}),
        "in bf16": lambda: off({"wire": "bf16"}),
        "micro-batches": lambda: off({}, [2, 1, 1, 1][:ranks]),
        "accumulate": lambda: max(accumulating.accumulated_errors(group, batches, parts)),
        "accumulate, clipped and scaled": lambda: max(
            accumulating.accumulated_errors(group, batches, parts, True, True)
        ),
        "rounds of a loader": lambda: max(accumulating.rounds_errors(group, batches, parts)),
        "accumulate by targets": lambda: max(accumulating.token_rounds_errors(group, batches, 3, False)),
        "the same, said": lambda: max(accumulating.token_rounds_errors(group, batches, 3, True)),
        "accumulate with BatchNorm": lambda: accumulating.norm_rounds_error(group, batches, 3, False),
        "noise scale, off by": lambda: noise(False),
        "noise scale with a scaler, off by": lambda: noise(True),
        "small buckets": lambda: off({}, None, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
        "100 steps in fp64": lambda: ddp_jobs.trained_apart(group, batches, 100),
        "int8: sent + kept, sent alone, bytes": lambda: ddp_jobs.feedback_left(group, few, "int8", False),
        "int4: sent + kept, sent alone, bytes": lambda: ddp_jobs.feedback_left(group, few, "int4", True),
        "weights by targets": lambda: max(ddp_jobs.token_errors(group, few, False)),
        "a bad step keeps what was kept": lambda: ddp_jobs.kept_after_a_bad_step(group),
        "BatchNorm": lambda: max(more.norm_errors(group, batches, "hook", 30, 0.1)),
        "loss_scale": lambda: max(more.scaled_errors(group, batches, [1] * ranks, False)),
    }


def fsdp_and_checkpoint_jobs(group: Any, ranks: int, folder: Path) -> Jobs:
    import ddp_checkpoint_jobs as checkpoints
    import ddp_more_jobs as more
    import fsdp_jobs
    import torch

    batches = BATCHES[:ranks]

    def fastest(seconds: list[float]) -> list[float]:
        every: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(every, min(seconds))
        return every

    def goes_on(wire: str) -> bool:
        place, split = folder / wire, [5, 3, 4, 2][:ranks]
        whole = checkpoints.train(group, place / "whole", 14, split, wire)
        checkpoints.train(group, place / "stopped", 8, split, wire, 6)
        after = checkpoints.train(group, place / "stopped", 14, split, wire, 0, True)
        return all(torch.equal(value, after["model"][name]) for name, value in whole["model"].items())

    return {
        "FSDP2": lambda: max(more.scaled_errors(group, batches, [1] * ranks, True)),
        "FSDP2 with the hook": lambda: max(fsdp_jobs.gradient_errors(group, batches, 1, 1)),
        "its micro-batches": lambda: max(fsdp_jobs.gradient_errors(group, batches, 3, 1)),
        "its micro-batches by rank": lambda: max(
            fsdp_jobs.gradient_errors(group, batches, [3, 1, 1, 2][:ranks], 1)
        ),
        "its own times": lambda: fastest(fsdp_jobs.timed(group, 0.01, 5)),
        "its check": lambda: fsdp_jobs.cause_reported(group, batches, "weighted")[:2],
        "goes on bit for bit": lambda: goes_on("same"),
        "goes on bit for bit in bf16": lambda: goes_on("bf16"),
    }


def serve(folder: Path) -> None:
    """One rank; the first prints what each job gives."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=timedelta(seconds=DEADLINE_SECONDS))
    failed = False
    group, ranks = dist.group.WORLD, dist.get_world_size()
    for name, job in (ddp_jobs_of(group, ranks) | fsdp_and_checkpoint_jobs(group, ranks, folder)).items():
        try:
            found = job()
        except Exception:  # printed, and the exit code: the other jobs still tell something
            found, failed = traceback.format_exc(), True
        if dist.get_rank() == 0:
            print(f"{name}: {found}", flush=True)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(int(failed))  # torch's own threads may abort a process while its interpreter is torn down


def main() -> int:
    if "RANK" in os.environ:
        serve(Path(sys.argv[2]))
    ranks = int(sys.argv[1])
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    common |= {"NCCL_SOCKET_IFNAME": "lo", "PYPS_TEST_DEVICE": "cuda"}
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}
            command = [sys.executable, __file__, sys.argv[1], folder]
            running.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
        try:
            return max(process.wait(DEADLINE_SECONDS) for process in running)
        finally:
            for process in running:
                process.kill()


if __name__ == "__main__":
    sys.exit(main())
