"""Installs each wheel of a folder into a clean environment, checks it there and trains with it.

    make wheels
    .venv/bin/python tests/helpers/try_wheels.py dist [--only native,pure,emulated]

native    this processor's wheel: pip check, a plan, a run of two workers
pure      the one without the core: pip check, the same plan, uneven DDP of two ranks, a worker of a store
          elsewhere; a local store's refusal
emulated  the one for aarch64 under qemu-user: pip check, its kernels, a run of two workers with that plan

The last needs qemu-aarch64-static (Debian: qemu-user-static), uv and an apt whose archive has arm64. Python
and the packages for arm64 go into a temporary folder, without root; nothing else of this machine changes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from run_scripts import SAMPLES, script

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = "qemu-aarch64-static"
# PyPI's torch of this version for aarch64 has no CUDA; the emulated processor lacks what newer ones may use.
EMULATED_TORCH = "torch==2.6.0"
DEBS = ("python3", "libstdc++6", "libgomp1")
APT = """
APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }}; APT::Install-Recommends "false";
APT::Sandbox::User "";
Dir::State "{0}/state"; Dir::State::status "{0}/status"; Dir::Cache "{0}/cache"; Dir::Log "{0}";
"""
DDP = """
import os, torch, torch.distributed as dist
from torch.utils.data import TensorDataset
from pyps.torch import uneven

torch.set_num_threads(1)
dist.init_process_group("gloo")
draws = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(64, 4, generator=draws), torch.randn(64, 1, generator=draws))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, loader, step = uneven(model, data, 8, optimizer=optimizer)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        step()
if dist.get_rank() == 0:
    print("split", *step.sampler.split)
dist.destroy_process_group()
"""
JOIN = """
import sys, torch, pyps

torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)
data = torch.randn(64, 4, generator=draws), torch.randn(64, 1, generator=draws)
model = torch.nn.Linear(4, 1)
with pyps.join(sys.argv[1], 0, batches=[8], samples=96) as worker:
    worker.attach(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    for x, y in worker.batches(data):
        torch.nn.functional.mse_loss(model(x), y).backward()
        worker.step()
    print(worker.steps, "steps")
"""
STORE = "import pyps\ntry:\n    pyps.Store.open('x')\nexcept pyps.PypsError as error:\n    print(error)"


@dataclass(frozen=True)
class Place:
    """An environment: its Python, the folder that commands run in, and what their environment has besides."""

    python: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: object, says: str = "") -> None:
        """Run this Python, and print that it went well. Exits if it failed or did not say `says`."""
        command = [str(self.python), *map(str, arguments)]
        given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=self.folder, env=given | self.environment, capture_output=True, text=True
        )
        if done.returncode or says not in done.stdout:
            sys.exit(f"try_wheels: {' '.join(command)}\n{done.stdout}{done.stderr}")
        print(f"  ok  {says or ' '.join(map(str, arguments[:3]))}", flush=True)

    def plan(self) -> None:
        """plan.json, for two devices of which one is slower."""
        lines = ["[job]\nglobal_batch = 8"]
        for name, pace in (("fast", 1.0), ("slow", 1.7)):
            points = [{"batch": b, "seconds": pace * (0.002 + 0.001 * b)} for b in (1, 4, 8)]
            profile = {"schema": "pyps.profile/1", "device": {"name": name}, "points": points}
            profile["model"] = {"name": "line", "parameters": 5}
            (self.folder / f"{name}.json").write_text(json.dumps(profile))
            lines.append(f'[[worker]]\nname = "{name}"\nprofile = "{name}.json"')
        (self.folder / "cluster.toml").write_text("\n".join(lines) + "\n")
        self.run("-m", "pyps", "plan", "cluster.toml", "-o", "plan.json", says="wrote plan.json")

    def train(self) -> None:
        """Two workers, through the store."""
        options = ["--plan", "plan.json", "--samples", SAMPLES, "--run-dir", "out", script(self.folder)]
        self.run("-m", "pyps", "run", *options, says=f"{SAMPLES} samples in 12 versions")


def installed(wheel: Path, folder: Path) -> Place:
    """A venv with a wheel, its planner and torch."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    place = Place(folder / "venv" / "bin" / "python", folder)
    pip = ["-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt"]
    place.run(*pip, f"{wheel}[plan,torch,remote]")
    place.run("-m", "pip", "check", says="No broken requirements found.")
    return place


def native(wheel: Path, folder: Path) -> None:
    place = installed(wheel, folder)
    place.plan()
    place.train()


def pure(wheel: Path, folder: Path) -> None:
    place = installed(wheel, folder)
    place.plan()
    (folder / "ddp.py").write_text(DDP)
    place.run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "ddp.py", says="split ")
    from pyps.remote.server import Server

    with Server("try-wheels", "tcp://127.0.0.1:*", insecure=True) as server:
        place.run("-c", JOIN, server.address, says="12 steps")
    place.run("-c", STORE, says="this installation has no C core")


def emulated(wheel: Path, folder: Path) -> None:
    if not shutil.which(EMULATOR) or not importlib.util.find_spec("uv"):
        sys.exit(f"try_wheels: found no {EMULATOR} or no uv (pip install uv); expected both")
    root, packages, python = arm64(folder), folder / "packages", folder / "python"
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-config", "--target", packages]
    uv += ["--python-platform", "aarch64-manylinux_2_28", "--python-version", "3.11"]
    subprocess.run([*map(str, uv), f"{wheel}[plan,torch]", EMULATED_TORCH, "pip"], check=True)
    # Commands that Python starts by its own name pass here, too: the kernel knows no arm64.
    python.write_text(f'#!/bin/sh\nexec {EMULATOR} -L {root} {root}/usr/bin/python3 "$@"\n')
    python.chmod(0o755)
    (packages / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(python)!r}\n")
    place = Place(python, folder, {"PYTHONPATH": str(packages)})
    place.run("-m", "pip", "check", says="No broken requirements found.")
    place.run(
        "-c", "import platform, pyps.native as n; print(platform.machine(), n.isa())", says="aarch64 neon"
    )
    place.plan()
    place.train()


def arm64(folder: Path) -> Path:
    """A folder with Python for arm64 and what it needs, from this machine's apt archives."""
    apt, root = folder / "apt", folder / "root"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "apt.conf").write_text(APT.format(apt))
    given = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    for command in (["update"], ["-y", "--download-only", "install", *DEBS]):
        subprocess.run(["apt-get", "-qq", *command], env=given, check=True)
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return root


TRIES = {
    "native": (f"*manylinux*{platform.machine()}.whl", native),
    "pure": ("*-none-any.whl", pure),
    "emulated": ("*manylinux*aarch64.whl", emulated),
}


def main() -> None:
    """Try all of them; exits with what a command wrote if it fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, help="the folder that holds them")
    parser.add_argument("--only", default=",".join(TRIES), help="default: all")
    given = parser.parse_args()
    for name in given.only.split(","):
        pattern, attempt = TRIES[name]
        wheels = sorted(given.wheels.resolve().glob(pattern))
        if len(wheels) != 1:
            sys.exit(f"try_wheels: found {len(wheels)} of {pattern} in {given.wheels}; expected 1")
        print(f"{name}: {wheels[0].name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="pyps-try-") as scratch:
            attempt(wheels[0], Path(scratch))


if __name__ == "__main__":
    main()
