"""A node is lost while torchrun trains: those left go on with sum b = B and every sample of the epoch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import elastic_train
import psutil
import pytest

DEADLINE_SECONDS = 90.0
SCRIPT = Path(elastic_train.__file__)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def agent(folder: Path, port: int, number: int) -> subprocess.Popen[bytes]:
    """torchrun for one node of one rank; the first one keeps the rendezvous."""
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1",
        "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf={conf},is_host={number == 0}", "--rdzv-id=test", "--monitor-interval=0.1",
        str(SCRIPT), str(folder),
    ]  # fmt: skip
    log = (folder / f"agent-{number}.log").open("wb")
    # A store that agents share keeps the addresses of ranks that are gone (torch 2.13).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def notes(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for f in sorted(folder.glob("notes-*.jsonl")) for line in f.read_text().splitlines()
    ]


def end(process: subprocess.Popen[bytes]) -> None:
    """The agent with its worker, at once: as a node that loses its power."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait(10)


@pytest.mark.timeout(120)
def test_a_lost_node(tmp_path: Path) -> None:
    port, deadline = free_port(), time.monotonic() + DEADLINE_SECONDS
    agents = [agent(tmp_path, port, number) for number in range(3)]
    try:
        while len(notes(tmp_path)) < 3 * 10:
            assert time.monotonic() < deadline, "\n".join(f.read_text() for f in tmp_path.glob("agent-*.log"))
            assert all(a.poll() is None for a in agents)
            time.sleep(0.1)
        end(agents[2])
        for left in agents[:2]:
            assert left.wait(max(1.0, deadline - time.monotonic())) == 0
    finally:
        for one in agents:
            end(one)
    told = notes(tmp_path)
    assert {note["ranks"] for note in told} == {2, 3}
    again = {note["from"] for note in told} - {0}
    assert len(again) == 1
    (resumed,) = again
    check_samples(told, resumed)


def check_samples(told: list[dict[str, Any]], resumed: int) -> None:
    """Each once in what the parameters saw; those after the checkpoint twice in all, no other."""
    rounds: dict[tuple[int, int], list[int]] = {}
    for note in told:
        rounds.setdefault((note["ranks"], note["step"]), []).extend(note["rows"])
    kept = {key: rows for key, rows in rounds.items() if (key[0] == 3) == (key[1] < resumed)}
    assert sorted(k for rows in kept.values() for k in rows) == list(range(elastic_train.SAMPLES))
    full = [rows for (_, step), rows in kept.items() if step < elastic_train.SAMPLES // elastic_train.B - 1]
    assert all(len(rows) == elastic_train.B for rows in full)
    lost = Counter(k for key, rows in rounds.items() if key not in kept for k in rows)
    assert set(lost.values()) <= {1}
    assert len(lost) <= (elastic_train.EVERY + 1) * elastic_train.B
