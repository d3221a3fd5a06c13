"""The job script for Slurm goes the whole way, from profile to report; Slurm's commands are stand-ins."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from run_scripts import until

from pyps.formats.records import read_run
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
    """Return the environment of a job of two nodes with one task each."""
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
    """Put there what a user has, and the job script."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for name in ("net.py", "train.py"):
        found = re.search(rf"```python\n(# {name}\n.*?)```", page, re.DOTALL)
        assert found
        (folder / name).write_text(found[1])
    shutil.copy(ROOT / "examples" / "slurm" / "store.sbatch", folder)


def computed(job: Path) -> int:
    """Samples in the records of a job's ranks, which begin anew when it is queued again."""
    return sum(record.samples for rank in range(2) for record in read_run(job / f"rank-{rank}"))


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_job_that_is_taken_away_goes_on_when_it_is_queued_again(
    tmp_path: Path, shm: Path, environment: dict[str, str]
) -> None:
    put_files(tmp_path)
    environment |= {"SAMPLES": "1600", "RUN_OPTIONS": "--policy asp", "PYTHONUNBUFFERED": "1"}
    script = (tmp_path / "train.py").read_text()
    slow = script.replace("worker.step", "time.sleep(0.05)\n            worker.step")
    (tmp_path / "train.py").write_text(slow.replace("import os\n", "import os\nimport time\n"))
    job = subprocess.Popen(
        ["bash", "store.sbatch"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    until(
        lambda: len([p for p in tmp_path.glob("pyps-7/rank-*/worker-*.jsonl") if p.stat().st_size]) == 2, 180
    )
    for process in psutil.Process(job.pid).children(recursive=True):
        # Slurm signals all but the shell of this script; srun passes its signal on: some get it twice.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=200)
    assert job.returncode == 143, said.decode()
    assert (tmp_path / "requeued").read_text() == "7\n"
    first = computed(tmp_path / "pyps-7")
    assert 0 < first < 1600
    again = subprocess.run(
        ["bash", "store.sbatch"],
        cwd=tmp_path,
        env={**environment, "SLURM_RESTART_COUNT": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    second = [read_report(tmp_path / "pyps-7.1" / f"rank-{rank}" / "report.json") for rank in range(2)]
    assert {report.outcome for report in second} == {"finished"}
    assert sum(report.samples.trained for report in second) == 1600
    assert first + computed(tmp_path / "pyps-7.1") == 1600, "all that was computed was kept"
    assert (tmp_path / "pyps-7.1" / "report.html").exists()


def test_the_job_of_ddp_is_shell() -> None:
    subprocess.run(["bash", "-n", ROOT / "examples" / "slurm" / "ddp.sbatch"], check=True)
