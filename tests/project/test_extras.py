"""Define what `pip install pyps-train[torch]` leaves out is missed by nothing that does not need it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_scripts import script

pytestmark = pytest.mark.slow

QUICK_START = Path(__file__).resolve().parents[1] / "helpers" / "quick_start" / "sitecustomize.py"
# The modules of every extra but torch.
LEFT_OUT = (
    "accelerate",
    "cvxpy",
    "highspy",
    "jax",
    "lightning",
    "matplotlib",
    "opentelemetry",
    "peft",
    "prometheus_client",
    "pulp",
    "ray",
    "scipy",
    "sklearn",
    "tensorboard",
    "transformers",
    "trl",
    "zmq",
)
WITHOUT = f"import sys\nsys.modules |= dict.fromkeys({LEFT_OUT})\n"
NEED_THEIRS = (
    "pyps.remote.",
    "pyps.shards.",
    "pyps.torch.accelerate",
    "pyps.torch.lightning",
    "pyps.worker.jax",
)
NEED_THEIRS += ("pyps.torch.transformers", "pyps.torch.trl")
IMPORT_ALL = f"""{WITHOUT}
import importlib, pkgutil, pyps
for module in pkgutil.walk_packages(pyps.__path__, "pyps."):
    if not module.name.startswith({NEED_THEIRS}):
        importlib.import_module(module.name)
"""


def test_only_modules_for_an_extra_need_it() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_run_needs_torch_alone(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(QUICK_START.read_text() + WITHOUT)
    command = [sys.executable, "-m", "pyps", "run", "--plan", plan, "--samples", "16"]
    done = subprocess.run(
        [*command, "--run-dir", tmp_path / "out", script(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
