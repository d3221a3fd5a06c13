"""The job script for Slurm goes the whole way, from profile to report; Slurm's commands are stand-ins."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pyps.report.report import read_report

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_start")]

ROOT = Path(__file__).resolve().parents[2]
NODES = ("old", "new")
SCONTROL = f"""
if [ "$1" = requeue ]; then echo "$2" > requeued; else printf '%s\\n' {" ".join(NODES)}; fi
"""
SRUN = f"""
while [ "${{1#--}}" != "$1" ]; do shift; done
rank=0
for node in {" ".join(NODES)}; do
    SLURM_PROCID=$rank SLURMD_NODENAME=$node "$@" & pids="$pids $!"; rank=$((rank + 1))
done
trap 'kill -TERM $pids' TERM
code=0
for pid in $pids; do
    until wait "$pid" || {{ found=$?; ! kill -0 "$pid" 2>/dev/null; }}; do :; done
    code=$((${{found:-0}} > code ? found : code))
done
exit $code
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a job of two nodes with one task each."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "old,new"}
    job |= {"BIND": "127.0.0.1", "PORT": str(port), "GLOBAL_BATCH": "32", "SAMPLES": "320"}
    job |= {"PROFILE_OPTIONS": "--threads 1 --batches 8,16,32 --repeats 3"}
    path = os.pathsep.join((str(commands), str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, **job, "PATH": path}


def put_files(folder: Path) -> None:
    """What a user has, and the job script."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for name in ("net.py", "train.py"):
        found = re.search(rf"```python\n(# {name}\n.*?)```", page, re.DOTALL)
        assert found
        (folder / name).write_text(found[1])
    shutil.copy(ROOT / "examples" / "slurm" / "store.sbatch", folder)


@pytest.mark.thorough
def test_the_job_of_the_store(tmp_path: Path, shm: Path, environment: dict[str, str]) -> None:
    put_files(tmp_path)
    job = subprocess.run(
        ["bash", "store.sbatch"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert job.returncode == 0, job.stdout + job.stderr
    folder = tmp_path / "pyps-7"
    assert (folder / "report.html").exists()
    reports = [read_report(folder / f"rank-{rank}" / "report.json") for rank in range(2)]
    assert {report.outcome for report in reports} == {"finished"}
    assert sum(report.samples.trained for report in reports) == 320


def test_the_job_of_ddp_is_shell() -> None:
    subprocess.run(["bash", "-n", ROOT / "examples" / "slurm" / "ddp.sbatch"], check=True)
