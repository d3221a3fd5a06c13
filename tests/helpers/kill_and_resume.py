"""Kill a whole run at random moments, resume it each time, and compare its end with that of a run left alone.

    python tests/helpers/kill_and_resume.py --kills 200            # bsp, then asp

Under bsp the parameters and the optimizer's state must be the same bit for bit, and each step must have had
the learning rate of its place in the run. Under asp each sample adds one to its own parameter, so the
parameters count how often each was trained.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from run_tools import make_plan
from safetensors.numpy import load_file

from pyps.checkpoint.folder import checkpoints, newest_checkpoint, verify_folder
from pyps.formats import Plan, write_json
from pyps.formats.events import read_events
from pyps.formats.records import read_run

PYPS = str(Path(sys.executable).parent / "pyps")
BATCHES = (5, 3)
LENGTH = 40
LEARNING_RATE = 0.01
STARTUP_SECONDS = 60.0
PAUSE_SECONDS = 0.004  # a step, so that a part lasts longer than its start
DURING_STARTUP = 0.2  # this share of the kills comes before training

TRAIN = """
import sys, time
import torch
import pyps

torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(40, 4, generator=draws), torch.randn(40, 2, generator=draws)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with pyps.join() as worker:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: 1 / (1 + 0.1 * batch))
    worker.attach(model, optimizer, scheduler=schedule, clip_norm=0.5)
    for x, y in worker.batches((inputs, targets)):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        time.sleep(float(sys.argv[1]))
        worker.step(loss)
"""
COUNT = """
import sys, time
import torch
import pyps

torch.set_num_threads(1)
model = torch.nn.Embedding(40, 1)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with pyps.join() as worker:
    worker.attach(model, optimizer)
    for (chosen,) in worker.batches((torch.arange(40),)):
        model(chosen).sum().backward()
        time.sleep(float(sys.argv[1]))
        worker.step()
"""
HAS_FINISHED = "this run has finished"  # it was killed after its last word
SCRIPTS = {"bsp": TRAIN, "asp:scaling=none": COUNT}


class Killed:
    """A run that is killed and resumed in `folder` until it has ended."""

    def __init__(self, folder: Path, policy: str, samples: int, seed: int, plan: Plan | None = None) -> None:
        self.folder, self.run_dir, self.policy = folder, folder / "killed", policy
        self.plan = plan or make_plan(BATCHES)
        self.samples, self.luck = samples, random.Random(seed)
        self.kills = self.before_training = 0
        self.had_finished = False  # before the last kill
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "plan.json", self.plan)
        (folder / "train.py").write_text(SCRIPTS[policy])

    def command(self, run_dir: Path, pause: float) -> list[str]:
        """A new run; the last version of it is a checkpoint, too."""
        options = ["--plan", "plan.json", "--samples", str(self.samples), "--policy", self.policy]
        options += ["--checkpoint-every", "3", "--run-dir", str(run_dir)]
        return [PYPS, "run", *options, "train.py", str(pause)]

    def left_alone(self) -> Path:
        """The folder of the same run without kills."""
        run_dir = self.folder / "whole"
        subprocess.run(self.command(run_dir, 0.0), cwd=self.folder, check=True, capture_output=True)
        return run_dir

    def kill_once(self) -> bool:
        """Start or resume, and kill everything at a random moment; False if the run ended before."""
        with (self.folder / "output.txt").open("ab") as output:
            process = psutil.Popen(self._next(), cwd=self.folder, stdout=output, stderr=output)
            began = time.monotonic()
            early = self.luck.random() < DURING_STARTUP
            if not early:
                self._wait_for_training(process)
            time.sleep(self.luck.uniform(0.0, 2.0 if early else 0.4))
            if process.poll() is not None:
                text = (self.folder / "output.txt").read_text()[-2000:]
                assert process.returncode == 0 or HAS_FINISHED in text, text
                return False
            kill_all(process)
        assert time.monotonic() - began < STARTUP_SECONDS
        self.kills += 1
        self.before_training += early
        self._check_folder()
        return True

    def finish(self) -> None:
        """Resume until the end."""
        done = subprocess.run(self._next(), cwd=self.folder, capture_output=True, text=True)
        self.had_finished = HAS_FINISHED in done.stderr
        assert done.returncode == 0 or self.had_finished, done.stderr

    def _next(self) -> list[str]:
        """Return what starts the run again: anew where it was killed before it had noted what it is."""
        if (self.run_dir / "run.json").exists():
            return [PYPS, "run", "--resume", str(self.run_dir)]
        return self.command(self.run_dir, PAUSE_SECONDS)

    def _wait_for_training(self, process: psutil.Popen) -> None:
        """Until this part has a record of its own, and the run a checkpoint."""
        deadline = time.monotonic() + STARTUP_SECONDS
        children: set[int] = set()
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = {child.pid for child in process.children(recursive=True)}
            names = [p for p in self.run_dir.glob("worker-*-*.jsonl") if p.stat().st_size]
            began = any(int(path.stem.rpartition("-")[2]) in children for path in names)
            if began and checkpoints(self.run_dir / "checkpoints"):
                return
            time.sleep(0.01)

    def _check_folder(self) -> None:
        """Whatever was killed: what is there is whole, and the newest but one is at most replaced by it."""
        for path in checkpoints(self.run_dir / "checkpoints"):
            verify_folder(path)


def kill_all(process: psutil.Popen) -> None:
    """SIGKILL the launcher and all that it started."""
    victims = [process, *process.children(recursive=True)]
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(victim.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(victims, timeout=10)


def check_end(killed: Killed) -> None:
    """Compare the end of the killed run with what it must be."""
    newest = newest_checkpoint(killed.run_dir)
    assert newest is not None
    if killed.policy == "bsp":
        other = newest_checkpoint(killed.left_alone())
        assert other is not None
        assert (other / "optimizer.safetensors").exists() == (newest / "optimizer.safetensors").exists()
        kept = (newest / "optimizer.safetensors").exists()  # plain SGD has no state
        for name in ("model.safetensors", *(["optimizer.safetensors"] if kept else [])):
            assert (other / name).read_bytes() == (newest / name).read_bytes(), name
        assert (other.parent.parent / "model.safetensors").read_bytes() == (
            killed.run_dir / "model.safetensors"
        ).read_bytes()
    else:
        counts = load_file(newest / "model.safetensors")["weight"][:, 0]
        np.testing.assert_array_equal(counts, -killed.samples / LENGTH)
    records = read_run(killed.run_dir)
    if killed.policy == "bsp":
        for record in records:
            expected = LEARNING_RATE / (1 + 0.1 * (record.first // killed.plan.global_batch))
            assert record.lr is not None
            assert abs(record.lr / expected - 1) < 1e-6, record
    events = read_events(killed.run_dir / "run.jsonl")
    assert killed.had_finished or sum(event.kind == "resumed" for event in events) >= 1
    versions = [record.version for record in records]
    assert max(versions) == int(newest.name)


def prove(folder: Path, policy: str, samples: int, kills: int, seed: int, plan: Plan | None = None) -> Killed:
    """Kill a run so many times, let it end, and check its end. plan: of two workers; None: a plain one."""
    killed = Killed(folder, policy, samples, seed, plan)
    while killed.kills < kills and killed.kill_once():
        pass
    killed.finish()
    check_end(killed)
    return killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--policies", nargs="+", default=list(SCRIPTS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    each = options.kills // len(options.policies)
    for policy in options.policies:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            killed = prove(Path(folder), policy, 400 * each // LENGTH * LENGTH, each, options.seed)
            done = f"{killed.kills} kills and resumes, {killed.before_training} of them before training"
            print(f"{policy}: {done}, in {time.monotonic() - began:.0f} s: the end is right", flush=True)


if __name__ == "__main__":
    main()
