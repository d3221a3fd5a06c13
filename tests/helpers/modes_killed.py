"""Runs in every policy and mode on one device, each killed whole and resumed: what is lost, and how far off.

    python tests/helpers/modes_killed.py cuda [--at-once 4] [--policies bsp saps]

A small convolutional network with dropout, on three workers of one device. Of each mode one run is left
alone, another is killed after its first checkpoint and resumed. Both train all samples; under bsp they end
with the same bits, but for int8 made on a GPU, whose residuals begin anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
from kill_and_resume import PYPS, kill_all
from run_tools import make_local_plan, make_plan
from safetensors.numpy import load_file

from pyps.checkpoint.folder import newest_checkpoint
from pyps.formats import write_json

SAMPLES, DEADLINE_SECONDS = 1200, 150.0
POLICIES = [
    "bsp",
    "backup",
    "softsync",
    "asp",
    "ssp",
    "dssp",
    "dynsgd",
    "saps",
    "r2sp",
    "hps",
]
Mode = tuple[str, tuple[str, ...], bool]  # policy, options, local steps
MODES: list[Mode] = [
    *((policy, (), False) for policy in POLICIES),
    ("bsp", ("--codec", "int8"), False),
    ("asp", ("--codec", "int4"), False),
    ("asp", ("--depth", "2", "--codec", "int8"), False),
    ("saps", ("--depth", "3"), False),
    ("bsp", (), True),
    ("asp", (), True),
    ("saps", ("--codec", "int8"), True),
    ("asp", ("--depth", "2"), True),
    ("quorum", (), True),
]
TRAIN = """
import sys, time
import torch
import pyps

device = sys.argv[1]
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)
inputs = torch.randn(120, 3, 16, 16, generator=draws).to(device)
targets = torch.randint(10, (120,), generator=draws).to(device)
torch.manual_seed(1)
layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Dropout(0.1)
model = torch.nn.Sequential(*layers, torch.nn.Linear(8 * 14 * 14, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with pyps.join() as worker:
    worker.attach(model, optimizer)
    for x, y in worker.batches((inputs, targets)):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        time.sleep(float(sys.argv[2]))
        worker.step(loss)
"""


def killed_and_resumed(mode: Mode, device: str) -> str:
    """Return what came of it, in a line."""
    policy, options, local = mode
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # torch wants it to be deterministic
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = make_local_plan((3, 2, 1), 4, policy) if local else make_plan((9, 5, 3))
        write_json(folder / "plan.json", plan)
        (folder / "train.py").write_text(TRAIN)

        def command(run: str, pause: float) -> list[str]:
            chosen = [*([] if local else ["--policy", policy]), *options, "--checkpoint-every", "3"]
            chosen += ["--samples", str(SAMPLES), "--run-dir", run]
            return [PYPS, "run", *chosen, "train.py", device, str(pause)]

        def finished(arguments: list[str]) -> None:
            limits = {"check": True, "capture_output": True, "timeout": DEADLINE_SECONDS}
            subprocess.run(arguments, cwd=folder, env=environment, **limits)  # type: ignore[call-overload]

        finished(command("whole", 0.0))
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = psutil.Popen(command("killed", 0.03), cwd=folder, env=environment, **quiet)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while newest_checkpoint(folder / "killed") is None and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = process.poll() is not None
        if not ended:
            kill_all(process)
        finished([PYPS, "run", "--resume", "killed"])
        whole, resumed = (load_file(folder / run / "model.safetensors") for run in ("whole", "killed"))
        off = max(float(np.abs(whole[name] - resumed[name]).max()) for name in whole)
        samples = json.loads((folder / "killed" / "report.json").read_text())["samples"]["trained"]
    came = f"{samples:,} of {SAMPLES:,} samples, parameters {f'{off:.1e} off' if off else 'the same bits'}"
    return came + (": it had ended before the kill" if ended else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    options = parser.parse_args()
    modes = [mode for mode in MODES if mode[0] in options.policies]
    with ThreadPoolExecutor(options.at_once) as pool:
        lines = pool.map(lambda mode: killed_and_resumed(mode, options.device), modes)
        for (policy, more, local), line in zip(modes, lines, strict=True):
            print(f"{' '.join([policy, *more, *['local steps'] * local]):28} {line}", flush=True)


if __name__ == "__main__":
    main()
