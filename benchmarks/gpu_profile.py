"""One GPU as several unequal devices, profiled, planned and run: python benchmarks/gpu_profile.py [--save].

NVIDIA's multi-process service gives each client a share of the GPU's multiprocessors
(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), which makes real devices of unequal speed out of one. Where the driver
does not let it be started, the clients are emulated by --throttle; without a GPU all of it happens on the
CPU, and the output says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prediction import CPU_PAIR, LARGEST, MODELS, Client, profile_together, run_plan, sizes
from record import machine, save_table, table

from pyps.formats import read_profile

SHARES = (70, 30)  # percent of the multiprocessors
OTHERS = {  # other runs by the same plan
    "even split, ms": ("--even",),
    "asp, int8, ms": ("--policy", "asp", "--codec", "int8"),
}
GPU_LARGEST = {"mlp": 8192, "cnn": 2048, "transformer": 1024}


@contextmanager
def multi_process_service(folder: Path) -> Iterator[bool]:
    """Runs it for this process's children; False where it cannot be started."""
    control = shutil.which("nvidia-cuda-mps-control")
    folders = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = {**os.environ, **folders}
    if not control or subprocess.run([control, "-d"], capture_output=True, env=environment).returncode:
        yield False
        return
    os.environ |= folders
    try:
        yield True
    finally:
        subprocess.run([control], input="quit\n", text=True, capture_output=True)
        for name in folders:
            del os.environ[name]


def clients_of(service: bool, device: str) -> tuple[tuple[Client, ...], str]:
    """The clients, and how they came to be unequal."""
    if device == "cpu":
        return CPU_PAIR, "no GPU here: two devices emulated on the CPU"
    if not service:
        pair = tuple(Client(c.name, (*c.options, "--device", device)) for c in CPU_PAIR)
        return pair, "no multi-process service: two devices emulated"
    shared = tuple(
        Client(f"share{share}", ("--device", device), {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)})
        for share in SHARES
    )
    return shared, f"multi-process service, {' and '.join(map(str, SHARES))} % of the multiprocessors"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    largest = LARGEST if device == "cpu" else GPU_LARGEST
    rows = [["model", "fits", "left out", "batches", "plan ms", "run ms", "run / plan", *OTHERS]]
    with tempfile.TemporaryDirectory() as pipes, multi_process_service(Path(pipes)) as service:
        clients, how = clients_of(service, device)
        for model in options.models.split(","):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                profile_together(model, sizes(largest[model]), clients, folder)
                run = run_plan(model, largest[model], clients, folder, device)
                others = [
                    run_plan(model, largest[model], clients, folder, device, f"other-{k}", more)
                    for k, more in enumerate(OTHERS.values())
                ]
                fits = [read_profile(folder / f"{client.name}.json").fit for client in clients]
            rows.append(
                [
                    model,
                    ", ".join(fit.kind for fit in fits if fit),
                    ", ".join(f"{fit.leave_one_out_error or 0:.1%}" for fit in fits if fit),
                    ", ".join(map(str, run.batches)),
                    f"{1e3 * run.predicted_seconds:.1f}",
                    f"{1e3 * run.measured_seconds:.1f}",
                    f"{run.ratio:.3f}",
                    *(f"{1e3 * other.measured_seconds:.1f}" for other in others),
                ]
            )
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    text = f"{name} ({how}). {machine()}.\n\n{table(rows)}"
    print(text)
    if options.save:
        save_table("gpu", text)


if __name__ == "__main__":
    main()
