"""The loss that processes reach with the script of docs/how-to/train-async.md, and the simulator's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import torch
from acceptance import Criterion, Findings
from benchmark_tools import record
from papers_real import steady, write_plan
from safetensors.numpy import load_file
from torch import nn
from tuning import CLUSTERS, Budget, TuningScenario, cluster_of

from pyps import Hyper
from pyps.run import RunOptions, run
from pyps.simulate import TorchObjective, simulate
from pyps.store.policies import Policy
from pyps.tasks import TrainingTask

CLUSTER = "four"
BATCHES = 100
HYPER = Hyper(lr=0.05, momentum=0.9)  # the script's
MOST = 0.05


def agreement(budget: Budget, out: Path) -> Findings:
    """Each policy as processes on emulated devices and in virtual time, from the same plan."""
    rows = [["policy", "loss: run", "simulated", "off by"]]
    worst = 0.0
    seed, batches = budget.seeds[0], 4 if budget.quick else BATCHES
    for policy in ("r2sp",) if budget.quick else tuple(Policy.known):
        real, simulated = losses(policy, seed, batches, out / "agreement")
        off = abs(real / simulated - 1.0)
        worst = max(worst, off)
        rows.append([f"`{policy}`", f"{real:.4f}", f"{simulated:.4f}", f"{off:.2%}"])
    about = f"Cluster `{CLUSTER}`, planned batches, {batches} global batches, one seed."
    figure = "worst difference of the training loss between a run and its simulation"
    criterion = Criterion(figure, f"{worst:.2%}", f"<= {MOST:.0%}", worst <= MOST)
    return Findings([about, record.table(rows)], [criterion])


def losses(policy: str, seed: int, batches: int, out: Path) -> tuple[float, float]:
    """Return the losses of a run and of its simulation."""
    folder = out / f"{policy}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cluster = steady(cluster_of(TuningScenario(CLUSTER, link=False), planned=True))
    write_plan(CLUSTER, folder / "plan.json")
    (folder / "train.py").write_text(script())
    options = RunOptions(
        samples=batches * cluster.global_batch,
        policy=policy,
        seed=seed,
        run_dir=folder / "run",
        throttle_from=str(CLUSTERS / f"{CLUSTER}.toml"),
        keep_checkpoints=0,
    )
    run(folder / "plan.json", folder / "train.py", options)
    objective, names = readme_objective(seed)
    arrays = load_file(folder / "run" / "model.safetensors")
    found = np.concatenate([arrays[name].ravel().astype(np.float64) for name in names])
    rules = {"seed": seed, "objective": objective, "lr": HYPER, "optimizer": "momentum"}
    return objective.loss(found), simulate(cluster, policy, iterations=batches, **rules).loss


def script() -> str:
    """The how-to's first Python block."""
    page = (record.OUT.parent / "docs" / "how-to" / "train-async.md").read_text()
    found = re.search(r"```python\n(# train\.py\n.*?)```", page, re.DOTALL)
    if found is None:
        raise SystemExit("docs/how-to/train-async.md: no block that begins with '# train.py'")
    return found[1]


def readme_objective(seed: int) -> tuple[TorchObjective, list[str]]:
    """Return what the script trains, and the names of its parameters."""
    torch.manual_seed(0)
    x, y = torch.randn(512, 16), torch.randn(512, 4)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    task = TrainingTask(model, lambda count: (x[:count], y[:count]), nn.functional.mse_loss)
    return TorchObjective(task, x, y, seed), [name for name, _ in model.named_parameters()]
