"""Replicas leave and come under torchft: sum b = B in each step, every sample once in what was committed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

coordination = pytest.importorskip("torchft.coordination")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "ddp"
DEADLINE_SECONDS, B, SAMPLES = 80.0, 96, 1500
SCRIPT = """
import json, sys, time, torch
torch.set_num_threads(1)
from with_torchft import train
def note(reported):
    print(json.dumps(reported), flush=True)
    time.sleep(0.3)
train(float(sys.argv[1]), note)
"""


def replica(address: str, speed: float, said: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "TORCHFT_LIGHTHOUSE": address,
        "PYTHONPATH": str(FOLDER),
        "OMP_NUM_THREADS": "1",
    }
    with said.open("wb") as out, said.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(speed)], stdout=out, stderr=err, env=environment
        )


def notes(said: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.read_text().splitlines() if line.endswith("}")]


@pytest.mark.timeout(150)
def test_replicas_leave_and_come(tmp_path: Path) -> None:
    house = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=2000
    )
    files = [tmp_path / f"{k}.jsonl" for k in range(3)]
    running = [replica(house.address(), speed, files[k]) for k, speed in enumerate((2.0, 1.0))]
    deadline = time.monotonic() + DEADLINE_SECONDS

    def until(steps: int) -> None:
        while len(notes(files[0])) < steps:
            assert time.monotonic() < deadline, files[0].with_suffix(".err").read_text()[-3000:]
            time.sleep(0.1)

    try:
        until(3)
        running.append(replica(house.address(), 1.0, files[2]))
        while len(notes(files[2])) < 3:
            assert time.monotonic() < deadline, files[2].with_suffix(".err").read_text()[-3000:]
            time.sleep(0.1)
        running[1].send_signal(signal.SIGKILL)
        for k in (0, 2):
            running[k].wait(max(1.0, deadline - time.monotonic()))
    finally:
        for one in running:
            one.kill()
            one.wait(10)
        house.shutdown()
    steps: dict[int, list[dict[str, Any]]] = {}
    for file in files:
        for reported in notes(file):
            steps.setdefault(reported["step"], []).append(reported)
    whole = [
        reported
        for reported in steps.values()
        if sum(len(t["rows"]) for t in reported) == reported[0]["total"]
    ]
    assert len(steps) - len(whole) <= 1  # the killed one may not have noted its last
    assert {len(reported) for reported in steps.values()} == {2, 3}
    seen = [row for reported in steps.values() for t in reported for row in t["rows"]]
    assert len(seen) == len(set(seen))
    assert sum(reported[0]["total"] for reported in steps.values()) == SAMPLES
    assert sorted(len(t["rows"]) for t in steps[0]) == [32, 64]
