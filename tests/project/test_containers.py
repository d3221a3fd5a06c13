"""Define what the containers of a run do, without containers: profile to report, and how it ends when one
fails.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from policy_drive import partition
from run_scripts import until

from pyps.formats.records import read_run
from pyps.report.report import read_report
from pyps.run.launcher import LAST_CHECKPOINT_SECONDS
from pyps.run.options import GRACE_SECONDS
from pyps.worker.run.notice import LEFT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_start")]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "containers"
PATIENCE_SECONDS = 250.0  # six programs one after the other, each with torch, where others have the machine


def start(folder: Path, port: int, only: int | None = None, **more: str) -> list[subprocess.Popen[str]]:
    """The two ranks of a run, or only one of them."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for name in ("net.py", "train.py"):
        found = re.search(rf"```python\n(# {name}\n.*?)```", page, re.DOTALL)
        assert found
        (folder / name).write_text(found[1])
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    run = {"RANKS": "2", "HOST": "127.0.0.1", "BIND": "127.0.0.1", "PORT": str(port), "PATH": path}
    run |= {"GLOBAL_BATCH": "32", "SAMPLES": "320"}
    run |= {"PROFILE_OPTIONS": "--threads 1 --batches 8,16,32 --repeats 3"}
    return [
        subprocess.Popen(
            ["sh", EXAMPLES / "rank.sh"],
            cwd=folder,
            env={**os.environ, **run, "RANK": str(rank), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ((0, 1) if only is None else (only,))
    ]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


@pytest.mark.thorough
def test_two_ranks_train_and_report(tmp_path: Path, shm: Path, port: int) -> None:
    ranks = start(tmp_path, port)
    said = [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert (tmp_path / "job" / "report.html").exists()
    reports = [read_report(tmp_path / "job" / f"rank-{rank}" / "report.json") for rank in range(2)]
    assert sum(report.samples.trained for report in reports) == 320
    again = start(tmp_path, port)
    said = [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in again]
    assert all("holds an earlier run" in text for text in said)


@pytest.mark.thorough
def test_all_ranks_end_when_one_fails(tmp_path: Path, shm: Path, port: int) -> None:
    ranks = start(tmp_path, port, NET="missing.py")
    said = [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in ranks]
    assert [rank.returncode != 0 for rank in ranks] == [True, True]
    assert "missing.py" in said[0]


def test_compose_and_kubernetes_set_what_the_script_reads() -> None:
    reads = set(re.findall(r"\$\{([A-Z_]+)", (EXAMPLES / "rank.sh").read_text()))
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    assert [one["environment"]["RANK"] for one in compose.values()] == list(range(len(compose)))
    for name, one in compose.items():
        assert one["environment"].keys() <= reads
        assert one["environment"]["RANKS"] == len(compose)
        assert name.startswith("rank-"), "the script looks for the server there"
    service, *jobs = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    first = 0
    for job in jobs:
        spec, template = job["spec"], job["spec"]["template"]
        assert spec["completions"] == spec["parallelism"]
        assert template["metadata"]["labels"] == service["spec"]["selector"]
        assert template["spec"]["subdomain"] == service["metadata"]["name"]
        env = {one["name"]: one["value"] for one in template["spec"]["containers"][0]["env"]}
        assert env.keys() <= reads
        assert env["FIRST_RANK"] == str(first)
        assert env["HOST"] == f"{jobs[0]['metadata']['name']}-0.{service['metadata']['name']}"
        first += spec["completions"]
    assert {env["RANKS"]} == {str(first)}


def test_a_pod_that_leaves_is_replaced_and_takes_no_longer_than_its_node_allows() -> None:
    _, _, spot = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    (codes,) = [
        r["onExitCodes"]["values"] for r in spot["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in r
    ]
    assert codes == [LEFT]
    pod = spot["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "what a podFailurePolicy asks for"
    assert pod["terminationGracePeriodSeconds"] >= GRACE_SECONDS + LAST_CHECKPOINT_SECONDS


@pytest.mark.thorough
def test_kubernetes_knows_every_field() -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for one in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()):
        schemas.validate(one, "1.31", strict=True)


def test_skypilot_gives_the_script_what_it_reads() -> None:
    reads = set(re.findall(r"\$\{([A-Z_]+)", (EXAMPLES / "rank.sh").read_text()))
    task = yaml.safe_load((EXAMPLES.parent / "skypilot" / "rank.yaml").read_text())
    assert task.keys() <= {"name", "resources", "workdir", "file_mounts", "envs", "setup", "run"}
    assert task["envs"].keys() <= reads
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert str(task["resources"]["ports"]) in (EXAMPLES / "rank.sh").read_text()
    assert "examples/containers/rank.sh" in task["run"]
    for part in (task["setup"], task["run"]):
        subprocess.run(["sh", "-n", "-c", part], check=True)


@pytest.mark.thorough
def test_a_rank_that_is_told_to_leave_comes_back(tmp_path: Path, shm: Path, port: int) -> None:
    """It is like a pod that is replaced: the others train on meanwhile."""
    more = {"SAMPLES": "16000", "RUN_OPTIONS": "--policy asp --json"}
    first, second = start(tmp_path, port, **more)
    records = "job/rank-*/worker-*.jsonl"
    until(lambda: len([p for p in tmp_path.glob(records) if p.stat().st_size]) == 2, PATIENCE_SECONDS)
    second.terminate()
    said, _ = second.communicate(timeout=PATIENCE_SECONDS)
    assert second.returncode == LEFT, said
    assert not list(tmp_path.glob("job/failed-*"))
    again = start(tmp_path, port, only=1, **more)[0]
    said = [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in (first, again)]
    assert (first.returncode, again.returncode) == (0, 0), said
    reports = [read_report(path) for path in tmp_path.glob("job/rank-*/report.json")]
    assert len(reports) == 3
    trained = [record for folder in tmp_path.glob("job/rank-*") for record in read_run(folder)]
    assert partition([(record.first, record.samples) for record in trained]) == [(0, 16000)]
